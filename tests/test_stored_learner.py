"""Stored learners of whole runs, on a tiny real ViT and real images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vbm_ptm.config import compose
from vbm_ptm.data.images import decode_image
from vbm_ptm.errors import UsageError
from vbm_ptm.experiment import build, run
from vbm_ptm.stored_learner import evaluate, predict

Tree = dict[str, Any]


def test_evaluate__measures_what_training_measured(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    result = run(toy_tree(), output=tmp_path / "run")
    again = evaluate(tmp_path / "run")
    assert again.to_dict()["rows"][0] == result["accuracy_counts"]["rows"][-1]


def test_predict__sees_every_image_as_evaluation_does(
    toy_tree: Callable[..., Tree], toy_folder: Path, tmp_path: Path
) -> None:
    tree = toy_tree("nearest_mean")
    tree["data"] = {"evaluation_batch_size": 7}
    result = run(tree, output=tmp_path / "run")
    images = sorted((toy_folder / "test").rglob("*.png"))
    predictions = list(predict(tmp_path / "run", images, top_k=5))
    assert [item.path for item in predictions] == images
    assert all(len(item.class_names) == len(set(item.class_names)) == 5 for item in predictions)
    assert all(list(item.scores) == sorted(item.scores, reverse=True) for item in predictions)
    cells = result["accuracy_counts"]["rows"][-1]
    hits = [item.path.parent.name in item.class_names[:1] for item in predictions]
    hits_of_five = [item.path.parent.name in item.class_names for item in predictions]
    assert sum(hits) == sum(cell["class_incremental_top1"] for cell in cells)
    assert sum(hits_of_five) == sum(cell["class_incremental_top5"] for cell in cells)

    (alone,) = predict(tmp_path / "run", [str(images[14])], top_k=1)
    assert alone.class_names == predictions[14].class_names[:1]
    assert alone.scores[0] == pytest.approx(predictions[14].scores[0], abs=1e-5)
    (early,) = predict(tmp_path / "run", [images[14]], top_k=99, task=0)
    assert sorted(early.class_names) == sorted(result["tasks"][0])


def test_predict__decodes_and_transforms_as_evaluation_does(
    toy_tree: Callable[..., Tree], toy_folder: Path
) -> None:
    benchmark = build(compose(tree=toy_tree("nearest_mean")).validate()).benchmark
    test = benchmark.datasets.test
    for index in (0, 17):
        file = toy_folder / test.source_name(index)
        pixels = benchmark.transforms.evaluate(decode_image(file))
        assert torch.equal(benchmark.transforms.evaluate(test.image(index)), pixels)


def test_predict__names_broken_images_after_all_others(
    toy_tree: Callable[..., Tree], toy_folder: Path, tmp_path: Path
) -> None:
    run(toy_tree("nearest_mean"), output=tmp_path / "run")
    good = sorted((toy_folder / "test" / "class_03").glob("*.png"))[:2]
    broken = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for path in broken:
        path.write_text("no image")
    predictions = predict(tmp_path / "run", [good[0], *broken, good[1]], top_k=1, device="cpu")
    assert [next(predictions).path, next(predictions).path] == good
    with pytest.raises(UsageError) as caught:
        next(predictions)
    assert [
        name in message for name, message in zip(("a.png", "b.jpg"), caught.value.problems, strict=True)
    ] == [
        True,
        True,
    ]
