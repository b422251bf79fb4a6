"""Stored learners of whole runs, on a tiny real ViT and real images."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from vbm_ptm.building import build
from vbm_ptm.cli import main
from vbm_ptm.config.run_config import compose
from vbm_ptm.data.images import decode_image
from vbm_ptm.data.reading.datasets import load_image_dataset, write_split
from vbm_ptm.errors import UsageError
from vbm_ptm.experiment import run
from vbm_ptm.learners.nearest_mean import NearestMean
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.runs.export import export
from vbm_ptm.runs.stored_learner import _decoded, evaluate, evaluate_on, load, predict
from vbm_ptm.storage.summary import summary

pytestmark = pytest.mark.slow

Tree = dict[str, Any]


def test_evaluate__measures_what_training_measured(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    result = run(toy_tree(), output=tmp_path / "run")
    again = evaluate(tmp_path / "run")
    assert again.to_dict()["rows"][-1] == result["accuracy_counts"]["rows"][-1]
    trained, measured = (each["class_incremental"]["top1"] for each in (result["metrics"], summary(again)))
    assert measured["last_accuracy"] == trained["last_accuracy"]
    # One measurement says nothing of these.
    assert measured["average_incremental_accuracy"] is None
    assert measured["forgetting"] is measured["backward_transfer"] is None


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


def test_evaluate__finds_data_and_weights_that_have_moved(
    toy_tree: Callable[..., Tree], toy_folder: Path, tiny_weights: Path, tmp_path: Path
) -> None:
    tree = toy_tree("nearest_mean")
    images, weights, split = (tmp_path / name for name in ("images", "weights.safetensors", "split.csv"))
    write_split(load_image_dataset(compose(tree=tree).validate().dataset), split)
    tree["dataset"]["split_file"] = str(split)
    tree["dataset"]["path"] = str(shutil.copytree(toy_folder, images))
    tree["backbone"]["checkpoint"] = str(shutil.copy(tiny_weights, weights))
    result = run(tree, output=tmp_path / "run")
    stored = (tmp_path / "run/config.yaml").read_bytes()
    shutil.rmtree(images)
    weights.unlink()
    list_now = split.rename(tmp_path / "moved.csv")
    places = f"dataset.path={toy_folder}", f"dataset.split_file={list_now}"
    moved = [*places, f"backbone.checkpoint={tiny_weights}"]
    for missing, message in (
        (moved[1:], r"images"),
        (moved[::2], r"split\.csv"),
        (moved[:2], r"weights\.safe"),
    ):
        with pytest.raises(UsageError, match=message):
            evaluate(tmp_path / "run", overrides=missing)
    again = evaluate(tmp_path / "run", overrides=moved)
    assert again.to_dict()["rows"][-1] == result["accuracy_counts"]["rows"][-1]
    image = toy_folder / "test/class_03/0.png"
    assert next(predict(tmp_path / "run", [image], overrides=moved[2:])).path == image
    assert (tmp_path / "run/config.yaml").read_bytes() == stored
    for other in ("learner.name=l2p", "dataset.name=x", "dataset.test_fraction=0.5", "nonsense"):
        with pytest.raises(UsageError, match="the run is finished"):
            evaluate(tmp_path / "run", overrides=[*moved, other])


def test_evaluate__of_a_run_without_a_finished_task(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    with directory.claimed(compose(tree=toy_tree()).validate(), resume=False):
        pass
    for use in (evaluate, load, export):
        with pytest.raises(UsageError, match="has no finished task yet; train at least one"):
            use(directory.path)


def test_evaluate_on__measures_known_classes_by_name_and_refuses_others(
    toy_tree: Callable[..., Tree], toy_folder: Path, tmp_path: Path
) -> None:
    result = run(toy_tree("nearest_mean"), output=tmp_path / "run")
    known = result["tasks"][0]
    for name in known:
        shutil.copytree(toy_folder / "train" / name, tmp_path / "some/train" / name)
        shutil.copytree(toy_folder / "test" / name, tmp_path / "some/test" / name)
    (cell,) = evaluate_on(tmp_path / "run", str(tmp_path / "some")).rows[0]
    assert cell is not None
    counted = result["accuracy_counts"]["rows"][-1][0]
    assert (cell.total, cell.class_incremental_top1) == (counted["total"], counted["class_incremental_top1"])
    broken = next((tmp_path / "some/test" / known[0]).iterdir())
    broken.write_bytes(b"")
    (fewer,) = evaluate_on(
        tmp_path / "run",
        str(tmp_path / "some"),
        overrides=["dataset.on_bad_image=skip", "data.num_workers=0"],
    ).rows[0]
    assert fewer is not None
    assert fewer.total == cell.total - 1
    broken.unlink()
    with pytest.raises(UsageError, match="images are prepared as they were for training the learner"):
        evaluate_on(tmp_path / "run", "digits", overrides=["dataset.transforms.strong=none"])
    (tmp_path / "some/train" / known[0]).rename(tmp_path / "some/train/unheard of")
    (tmp_path / "some/test" / known[0]).rename(tmp_path / "some/test/unheard of")
    with pytest.raises(
        UsageError, match=r"1 of 4 classes are not among those .* knows: 'unheard of'\. It knows"
    ):
        evaluate_on(tmp_path / "run", str(tmp_path / "some"))


def test_draft_decoding__is_that_of_training_evaluation_and_prediction(tmp_path: Path) -> None:
    overrides = ["dataset.transforms.draft_decoding=true", "dataset.transforms.test_resize=1"]
    config = compose(dataset="digits", learner="nearest_mean", overrides=overrides).validate()
    benchmark = build(config).benchmark
    sizes = {benchmark.datasets.train.draft_size, benchmark.datasets.test.draft_size}
    assert sizes == {benchmark.transforms.draft_size} == {64}
    Image.new("RGB", (256, 300)).save(tmp_path / "a.jpg")
    assert [image.size for _, image in _decoded([tmp_path / "a.jpg"], [], draft_size=64)] == [(64, 75)]


def test_predict__shows_an_image_for_which_all_classes_are_ruled_out(
    mean_run: Path, toy_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        NearestMean, "predict", lambda self, images: torch.full((len(images), 12), -torch.inf)
    )
    image = next(toy_folder.glob("test/*/*.png"))
    assert main(["predict", str(mean_run), str(image)]) == 0
    assert "none: all are ruled out" in capsys.readouterr().out
    assert main(["predict", str(mean_run), str(image), "--csv"]) == 0
    assert capsys.readouterr().out.splitlines() == ["path,rank,class,score,probability", f"{image},,,,"]
