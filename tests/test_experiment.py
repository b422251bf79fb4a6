"""Whole runs on a tiny real ViT and real images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vbm_ptm.errors import TrainingInterrupted
from vbm_ptm.experiment import evaluate, run

Tree = dict[str, Any]


def weights_of(directory: Path, task: int) -> bytes:
    return (directory / "checkpoints" / f"task_{task:02d}" / "learner.safetensors").read_bytes()


def test_run__is_the_same_twice_and_when_interrupted(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    one = run(toy_tree(), output=tmp_path / "one")
    two = run(toy_tree(), output=tmp_path / "two")
    with pytest.raises(TrainingInterrupted):
        run(toy_tree(), output=tmp_path / "three", stop_after_task=2)
    stored = json.loads((tmp_path / "three" / "result.json").read_text())
    assert stored["status"] == "interrupted"
    three = run(toy_tree(), output=tmp_path / "three", resume=True)
    assert one["metrics"] == two["metrics"] == three["metrics"]
    assert (
        weights_of(tmp_path / "one", 2)
        == weights_of(tmp_path / "two", 2)
        == weights_of(tmp_path / "three", 2)
    )
    assert one["task_records"] == three["task_records"]


def test_evaluate__measures_what_training_measured(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    result = run(toy_tree(), output=tmp_path / "run")
    again = evaluate(tmp_path / "run")
    assert again.to_dict()["rows"][0] == result["accuracy_counts"]["rows"][-1]
