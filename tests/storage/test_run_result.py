"""What result.json holds, read and written; ``result.json`` beside this file was written by version 0.1.0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vbm_ptm.errors import UsageError
from vbm_ptm.storage.run_result import RunResult, read_result
from vbm_ptm.storage.summary import summary

WRITTEN = Path(__file__).with_name("result.json")


def as_stored(now: Any, stored: Any) -> Any:
    """Return ``now`` without the keys that ``stored`` lacks: later versions add some."""
    if isinstance(now, dict) and isinstance(stored, dict):
        return {key: as_stored(value, stored[key]) for key, value in now.items() if key in stored}
    if isinstance(now, list) and isinstance(stored, list):
        return [as_stored(*pair) for pair in zip(now, stored, strict=True)]
    return now


@pytest.fixture(name="values")
def stored_values() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(WRITTEN.read_text())
    return values


def test_read_result__gives_attributes_and_keeps_every_key(values: dict[str, Any]) -> None:
    result = read_result(WRITTEN)
    assert (result.learner, result.is_finished, result.num_images) == ("l2p", True, values["num_images"])
    assert result.data.train.images == 1437
    assert result.weights is not None
    assert result.weights.sha256 == values["weights"]["sha256"]
    assert [record.num_steps for record in result.task_records] == [2] * 5
    assert result.task_seconds == pytest.approx(
        sum(sum(task.values()) for task in values["timings"]["tasks"])
    )
    assert as_stored(result.to_json(), values) == values


def test_run_result__counts_give_the_stored_numbers(values: dict[str, Any]) -> None:
    matrix = RunResult.model_validate(values).matrix
    assert as_stored(summary(matrix), values["metrics"]) == values["metrics"]
    assert matrix.last() == values["metrics"]["class_incremental"]["top1"]["last_accuracy"]


def test_read_result__takes_what_the_first_runs_did_not_write(values: dict[str, Any], tmp_path: Path) -> None:
    for name in ("domains", "extends"):
        del values[name]
    del values["data"]["expected"], values["data"]["warnings"]
    for record in values["task_records"]:
        for name in ("num_skipped_steps", "num_test_images", "frozen_sha256", "trained_sha256"):
            del record[name]
    (tmp_path / "result.json").write_text(json.dumps(values))
    result = read_result(tmp_path / "result.json")
    assert (result.domains, result.extends, result.data.expected) == ((), None, None)
    assert result.task_records[0].trained_sha256 == ""
    assert as_stored(result.to_json(), values) == values


def test_read_result__keeps_what_a_later_version_added(values: dict[str, Any]) -> None:
    values["energy"] = values["data"]["energy"] = 1.5
    assert as_stored(RunResult.model_validate(values).to_json(), values) == values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, r"format version 2; this version of vbm_ptm reads version 1"),
        ({"status": "done"}, r"result\.json is damaged \(status: "),
        ({"num_steps": None}, r"result\.json is damaged \(num_steps: "),
    ],
)
def test_read_result__refuses_what_it_does_not_know(
    change: dict[str, Any], message: str, values: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "result.json").write_text(json.dumps(values | change))
    with pytest.raises(UsageError, match=message):
        read_result(tmp_path / "result.json")


@pytest.mark.parametrize("text", ['{"status": ', "[1]", ""])
def test_read_result__says_what_is_damaged(text: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(UsageError, match=r"result\.json is damaged"):
        read_result(tmp_path / "result.json")
