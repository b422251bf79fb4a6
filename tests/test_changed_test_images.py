"""What may happen to the test images of a stored run, and what must not change by it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Image
from torch import Tensor

from vbm_ptm.errors import UsageError
from vbm_ptm.experiment import run
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.registry import learner_class
from vbm_ptm.runs.stored_learner import evaluate

pytestmark = pytest.mark.slow

Tree = dict[str, Any]


def counts(directory: Path) -> list[tuple[int, int]]:
    """Return correct and all test images of each task."""
    row = evaluate(directory).to_dict()["rows"][-1]
    return [(cell["class_incremental_top1"], cell["total"]) for cell in row]


def test_evaluate__a_deleted_test_class_changes_its_own_task_alone(
    toy_tree: Callable[..., Tree], toy_folder: Path, tmp_path: Path
) -> None:
    tree = toy_tree("nearest_mean")
    folder = tmp_path / "images"
    shutil.copytree(toy_folder, folder)
    tree["dataset"]["path"] = str(folder)
    result = run(tree, output=tmp_path / "run")
    before = counts(tmp_path / "run")
    shutil.rmtree(folder / "test" / "class_03")
    after = counts(tmp_path / "run")
    task = next(index for index, names in enumerate(result["tasks"]) if "class_03" in names)
    assert [total for _, total in after] == [12 if index == task else 16 for index in range(3)]
    assert [pair for index, pair in enumerate(after) if index != task] == [
        pair for index, pair in enumerate(before) if index != task
    ]
    shutil.copytree(folder / "test" / "class_04", folder / "test" / "zzz")
    with pytest.raises(UsageError, match="classes that the training split does not know: 'zzz'"):
        evaluate(tmp_path / "run")


@pytest.mark.parametrize("learner", ["s_iprompt", "nearest_mean"])
def test_evaluate__overwritten_domains_change_no_score(
    learner: str,
    toy_tree: Callable[..., Tree],
    toy_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The domain, which is the task here, sorts test images into the tasks they are reported under; no more."""
    names = [f"class_{index:02d}" for index in range(4)]
    domains = ("clay", "ink", "oil")

    def write(split: str, domain_of: Callable[[int], str]) -> None:
        files = [file for name in names for file in sorted((toy_folder / split / name).iterdir())]
        rows = {
            "image": [{"bytes": file.read_bytes(), "path": None} for file in files],
            "label": [file.parent.name for file in files],
            "domain": [domain_of(number) for number in range(len(files))],
        }
        Dataset.from_dict(rows).cast_column("image", Image()).to_parquet(
            tmp_path / "table" / f"{split}.parquet"
        )

    (tmp_path / "table").mkdir()
    for split in ("train", "test"):
        write(split, lambda number: domains[number % 3])
    tree = toy_tree(learner)
    tree["dataset"] |= {"path": str(tmp_path / "table"), "domain_column": "domain"}
    tree["scenario"] = {"kind": "domain_incremental"}
    assert run(tree, output=tmp_path / "run")["domains"] == ["clay", "ink", "oil"]
    scores: dict[bytes, Tensor] = {}
    predict = learner_class(learner).predict

    def watched(self: Learner, images: Tensor, query: Tensor | None = None) -> Tensor:
        found = predict(self, images, query)
        scores.update((image.numpy().tobytes(), row) for image, row in zip(images, found, strict=True))
        return found

    monkeypatch.setattr(learner_class(learner), "predict", watched)
    before = counts(tmp_path / "run")
    scores_before = dict(scores)
    scores.clear()
    write("test", lambda number: "ink")
    after = counts(tmp_path / "run")
    assert len(scores) == 16
    assert scores.keys() == scores_before.keys()
    for image, row in scores.items():
        torch.testing.assert_close(row, scores_before[image], atol=1e-5, rtol=1e-5)
    assert [total for _, total in after] == [0, 16, 0]
    assert sum(correct for correct, _ in after) == sum(correct for correct, _ in before)
