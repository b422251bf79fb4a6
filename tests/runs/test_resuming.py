"""Going on with what another version has written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from miniatures import picture, write_table

from vbm_ptm.errors import TrainingInterrupted
from vbm_ptm.experiment import run
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.runs.stored_learner import evaluate


def test_run__whose_rows_were_known_by_number_goes_on_and_is_measured(
    toy_tree: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As versions left it that did not say so: their configuration has no ``dataset.row_names``."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    images = [
        {"bytes": picture(row % 6, of=6, number=row, file_format="PNG"), "path": None} for row in range(60)
    ]
    table = write_table(tmp_path / "all.parquet", [f"class {row % 6}" for row in range(60)], images=images)
    tree = toy_tree("nearest_mean")
    tree["dataset"]["path"] = str(table)
    output = tmp_path / "run"
    with pytest.raises(TrainingInterrupted):
        run(
            tree | {"dataset": {**tree["dataset"], "row_names": "number"}},
            output=output,
            stop_after_task=1,
        )
    stored = yaml.safe_load((output / "config.yaml").read_text())
    before = RunDirectory(output).checkpoint().state.config
    for config in (stored, before):
        del config["dataset"]["row_names"]
    (output / "config.yaml").write_text(yaml.safe_dump(stored))
    directory = RunDirectory(output)
    directory.check_same_run(before, directory.config(), what="a checkpoint")
    assert directory.config().dataset.row_names == "number"
    assert sum(cell.total for cell in evaluate(output).rows[-1] if cell) == 4
    resumed = run(tree, output=output, resume=True)
    fresh = run(tree, output=tmp_path / "fresh")
    assert resumed["config"]["dataset"]["row_names"] == "number"
    assert fresh["config"]["dataset"]["row_names"] == "content"
    assert resumed["split_sha256"] != fresh["split_sha256"]
