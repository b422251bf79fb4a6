"""What verify finds: each test changes a real small run in one place."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from vbm_ptm.cli import main
from vbm_ptm.errors import TrainingInterrupted, UsageError
from vbm_ptm.experiment import run
from vbm_ptm.runs.findings import Finding
from vbm_ptm.runs.verification import verify

Tree = dict[str, Any]


@pytest.fixture
def changed(two_runs: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the first run, to be changed."""
    return shutil.copytree(two_runs[0], tmp_path / "run")


def rewrite(file: Path, change: Callable[[Any], None]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def found(path: Path) -> list[Finding]:
    return verify(path).items


def test_verify__finds_nothing_in_runs_that_are_whole(two_runs: tuple[Path, Path]) -> None:
    for path in two_runs:
        findings = verify(path)
        assert findings.items == []
        assert any("3 checkpoints" in what for what in findings.checked)
        assert any("metrics" in what for what in findings.checked)
        num_lines = len((path / "log.jsonl").read_text().splitlines())
        assert f"{num_lines} lines of log.jsonl" in findings.checked


def test_verify__finds_a_changed_count(changed: Path) -> None:
    def one_more(result: Tree) -> None:
        cell = result["accuracy_counts"]["rows"][1][0]
        cell["class_incremental_top1"] += -1 if cell["class_incremental_top1"] else 1

    rewrite(changed / "result.json", one_more)
    where = [item.what for item in found(changed)]
    assert "metrics.class_incremental.top1.curve of result.json" in where
    assert "log.jsonl against result.json, task 2, accuracy over all seen classes" in where
    assert [what for what in where if "counts on task 1 after task 2" in what and "task_01/" in what]
    assert not [what for what in where if "task 3" in what and "log.jsonl" in what]


def test_verify__finds_a_count_that_is_none(changed: Path) -> None:
    def too_many(result: Tree) -> None:
        result["accuracy_counts"]["rows"][0][0]["class_incremental_top1"] = 99

    rewrite(changed / "result.json", too_many)
    (first, *_) = [item for item in found(changed) if item.what == "accuracy_counts of result.json"]
    assert "99" in first.found


def test_verify__finds_a_changed_metric(changed: Path) -> None:
    def better(result: Tree) -> None:
        result["metrics"]["class_incremental"]["top1"]["last_accuracy"] += 0.01

    rewrite(changed / "result.json", better)
    (item,) = found(changed)
    assert item.what == "metrics.class_incremental.top1.last_accuracy of result.json"


def test_verify__does_not_compare_the_words_of_the_note(changed: Path) -> None:
    def reworded(result: Tree) -> None:
        result["metrics"]["note"] = "as an earlier version said it"

    rewrite(changed / "result.json", reworded)
    assert found(changed) == []


def test_verify__finds_a_missing_task(changed: Path) -> None:
    def without_second(result: Tree) -> None:
        del result["task_records"][1]

    rewrite(changed / "result.json", without_second)
    where = {item.what: item for item in found(changed)}
    assert where["finished tasks in result.json"].expected == "[1, 2, 3]"
    assert where["finished tasks in result.json"].found == "[1, 3]"


def test_verify__finds_a_missing_last_checkpoint(changed: Path) -> None:
    shutil.rmtree(changed / "checkpoints/task_02")
    (item,) = found(changed)
    assert (item.expected, item.found) == ("one after task 3", "after task 1, 2")


def test_verify__finds_checkpoints_that_changed_places(changed: Path) -> None:
    checkpoints = changed / "checkpoints"
    (checkpoints / "task_00").rename(checkpoints / "aside")
    (checkpoints / "task_01").rename(checkpoints / "task_00")
    (checkpoints / "aside").rename(checkpoints / "task_01")
    swapped = [item for item in found(changed) if "swapped" in item.remedy]
    assert [item.found for item in swapped] == ["the learner after task 2", "the learner after task 1"]


def test_verify__finds_a_checkpoint_of_another_run(changed: Path, two_runs: tuple[Path, Path]) -> None:
    shutil.rmtree(changed / "checkpoints/task_02")
    shutil.copytree(two_runs[1] / "checkpoints/task_02", changed / "checkpoints/task_02")
    items = found(changed)
    # The other run's log is of another length.
    assert {item.what.partition(" ")[0] for item in items} - {"log.jsonl"} == {"task_02/state.json"}
    (settings,) = [item for item in items if item.what.endswith("settings")]
    assert "seed 1 and 2" in settings.found


def test_verify__finds_a_learner_of_another_run(changed: Path, two_runs: tuple[Path, Path]) -> None:
    name = "checkpoints/task_02/learner.safetensors"
    shutil.copyfile(two_runs[1] / name, changed / name)
    first, *_ = found(changed)
    assert first.what.endswith("task_02")
    assert "learner.safetensors is damaged" in first.found


def test_verify__finds_a_cut_log(changed: Path) -> None:
    log = changed / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-100])
    items = found(changed)
    assert [item.what for item in items if "bytes" in item.expected] == ["log.jsonl"]
    assert [item for item in items if item.found == "none"]  # half a line
    (tasks,) = [item for item in items if item.what == "finished tasks in log.jsonl"]
    assert (tasks.expected, tasks.found) == ("[1, 2, 3]", "[1, 2]")


def test_verify__finds_a_line_that_is_missing_in_the_middle(changed: Path) -> None:
    log = changed / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    first, second, *_ = [number for number, line in enumerate(lines) if '"event": "step", "task": 1' in line]
    gone = lines.pop(second)
    log.write_text("".join(lines).replace("\n", " " * len(gone) + "\n", 1))  # as long as before
    where = [item.what for item in found(changed)]
    assert where == [
        f"log.jsonl, line {second + 1}, task 2",
        "log.jsonl, task 2, num_steps of its steps",
        "log.jsonl, task 2, num_images of its steps",
    ]
    assert first + 1 == second


def test_verify__finds_a_record_that_the_log_contradicts(changed: Path) -> None:
    log = changed / "log.jsonl"
    log.write_text(log.read_text().replace('"num_samples": 24', '"num_samples": 25', 1))
    (item,) = found(changed)
    assert item.what == "log.jsonl against result.json, task 1, num_samples"
    assert (item.expected, item.found) == ("24", "25")
    log.unlink()
    assert "log.jsonl" in [item.what for item in found(changed)]


def test_verify__finds_changed_settings(changed: Path) -> None:
    config = yaml.safe_load((changed / "config.yaml").read_text())
    config["optimization"]["epochs"] = 4
    (changed / "config.yaml").write_text(yaml.safe_dump(config))
    (item,) = found(changed)
    assert item.what == "config.yaml against result.json"
    assert "optimization.epochs 2 and 4" in item.found


def test_verify__takes_settings_that_came_later_as_what_they_meant_before(changed: Path) -> None:
    def without_later_settings(config: Tree) -> None:
        del (
            config["trainer"]["compile"],
            config["optimization"]["fused"],
            config["trainer"]["mixed_precision"],
        )

    rewrite(changed / "result.json", lambda result: without_later_settings(result["config"]))
    state = changed / "checkpoints/task_02/state.json"
    before = hashlib.sha256(state.read_bytes()).hexdigest()
    rewrite(state, lambda values: without_later_settings(values["config"]))
    sums = state.parent / "SHA256SUMS"
    sums.write_text(sums.read_text().replace(before, hashlib.sha256(state.read_bytes()).hexdigest()))
    assert found(changed) == []
    rewrite(changed / "result.json", lambda result: result["config"]["trainer"].update(compile="maybe"))
    assert {item.what for item in found(changed)} == {
        "config.yaml against result.json",
        *(f"task_0{index}/state.json against result.json, settings" for index in range(3)),
    }


def test_verify__says_what_a_stopped_run_lacks(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    with pytest.raises(TrainingInterrupted):
        run(toy_tree("nearest_mean"), output=tmp_path / "run", stop_after_task=1)
    (item,) = found(tmp_path / "run")
    assert (item.what, item.found) == ("state of the run", "interrupted")
    assert "resume" in item.remedy


def test_verify__command(changed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(changed)]) == 0
    assert "all of it agrees" in capsys.readouterr().out
    assert main(["verify", str(changed), "--evaluate", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["holds"] is True
    assert said["checked"][-1] == "the learner after task 3, measured again"
    rewrite(changed / "result.json", lambda result: result.update(num_steps=1))
    assert main(["verify", str(changed)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("num_steps of result.json: expected 18, found 1; ")
    assert shown[-1] == "1 finding"
    (changed / "result.json").write_text("{}")
    assert main(["verify", str(changed)]) == 1
    assert main(["verify", str(tmp_path)]) == 2
    assert "not a run directory" in capsys.readouterr().err
    assert main(["verify", str(changed), "--set", "dataset.path=x"]) == 2
    assert "--evaluate" in capsys.readouterr().err


def test_verify__measures_again(changed: Path) -> None:
    """A forged checkpoint, whose sums were made anew, is found by nothing else."""
    folder, name = changed / "checkpoints/task_02", "learner.safetensors"
    before = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    zeros = {key: torch.zeros_like(value) for key, value in load_file(folder / name).items()}
    save_file(zeros, folder / name)
    sums = folder / "SHA256SUMS"
    sums.write_text(
        sums.read_text().replace(before, hashlib.sha256((folder / name).read_bytes()).hexdigest())
    )
    assert found(changed) == []
    items = verify(changed, is_evaluated=True).items
    assert items
    assert {item.what.partition(",")[0] for item in items} == {"measured again"}


def test_verify__needs_images_to_measure(changed: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        verify(changed, is_evaluated=True, overrides=[f"dataset.path={tmp_path / 'nowhere'}"])
