"""Whole runs on a tiny real ViT and real images."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo.utils

from vbm_ptm.backbones import Backbone
from vbm_ptm.config.run_config import compose
from vbm_ptm.errors import TrainingInterrupted, UsageError
from vbm_ptm.experiment import run
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.runs.stored_learner import evaluate

pytestmark = pytest.mark.slow

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


def test_run__goes_on_where_images_and_weights_have_moved(
    toy_tree: Callable[..., Tree], toy_folder: Path, tiny_weights: Path, tmp_path: Path
) -> None:
    whole = run(toy_tree(), output=tmp_path / "whole")
    output, images, weights = (tmp_path / name for name in ("run", "images", "weights.safetensors"))
    with pytest.raises(TrainingInterrupted):
        run(toy_tree(), output=output, stop_after_task=1)
    tree = toy_tree()
    tree["dataset"]["path"] = str(shutil.copytree(toy_folder, images))
    tree["backbone"]["checkpoint"] = str(shutil.copy(tiny_weights, weights))
    with pytest.raises(UsageError, match=r"exists already, with other settings"):
        run(tree, output=output)
    before = (output / "config.yaml").read_bytes()
    image = next(images.glob("train/*/*.png"))
    other = image.rename(image.with_name("other.png"))
    with pytest.raises(UsageError, match="the images or their split are not those"):
        run(tree, output=output, resume=True)
    other.rename(image)
    assert (output / "config.yaml").read_bytes() == before
    moved = run(tree, output=output, resume=True)
    assert moved["task_records"] == whole["task_records"]
    assert weights_of(output, 2) == weights_of(tmp_path / "whole", 2)
    # What follows needs no word of where they lie now.
    assert RunDirectory(output).config().dataset.path == images
    assert evaluate(output).rows[-1] is not None


def test_run__says_that_it_starts_anew_without_a_checkpoint(
    toy_tree: Callable[..., Tree], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = compose(tree=toy_tree("nearest_mean")).validate()
    with RunDirectory(tmp_path / "run").claimed(config, resume=False):
        (tmp_path / "run" / "log.jsonl").touch()
    assert run(config, output=tmp_path / "run", resume=True)["status"] == "finished"
    assert "no checkpoint yet: training starts from the beginning" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", logger="vbm_ptm"):
        run(config, output=tmp_path / "run", resume=True)
        run(config, output=tmp_path / "other")
    assert caplog.text.count("is finished: nothing is read or trained") == 1
    assert "no checkpoint yet" not in caplog.text


def test_run__returns_the_result_of_a_finished_run(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    config = compose(tree=toy_tree("nearest_mean")).validate()
    result = run(config, output=tmp_path / "run")
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert json.loads(json.dumps(result)) == written
    before = (tmp_path / "run" / "log.jsonl").read_bytes()
    assert run(config, output=tmp_path / "run", resume=True) == written
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == before


def test_run__refuses_a_damaged_checkpoint_and_leaves_the_log_as_it_was(
    toy_tree: Callable[..., Tree], tmp_path: Path
) -> None:
    tree = toy_tree("nearest_mean")
    with pytest.raises(TrainingInterrupted):
        run(tree, output=tmp_path / "run", stop_after_task=1)
    log = tmp_path / "run" / "log.jsonl"
    log.write_bytes(log.read_bytes() + b"the tail of a task that was not finished")
    before = log.read_bytes()
    (tmp_path / "run/checkpoints/statistics/task_00.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="missing or empty"):
        run(tree, output=tmp_path / "run", resume=True)
    assert log.read_bytes() == before


def test_run__class_sizes_from_one_up_and_unequal_tasks(
    toy_folder: Path, toy_tree: Callable[..., Tree], tmp_path: Path
) -> None:
    """Classes of 1, 2, 3 and 6 images with a held-out fifth: every class keeps a training image."""
    for number, count in enumerate((1, 2, 3, 6)):
        folder = tmp_path / "flat" / f"class_{number:02d}"
        folder.mkdir(parents=True)
        for index in range(count):
            (folder / f"{index}.png").symlink_to(toy_folder / "train" / folder.name / f"{index}.png")
    tree = toy_tree("slca")
    tree["dataset"]["path"] = str(tmp_path / "flat")
    tree["scenario"] = {"task_sizes": [3, 1], "class_order": "natural"}
    result = run(tree, output=tmp_path / "run")
    assert result["data"]["train"]["min_images_per_class"] == 1
    assert [len(names) for names in result["tasks"]] == [3, 1]
    assert result["data"]["test"]["classes_without_images"] == ["class_00"]
    assert [record["num_views"] for record in result["task_records"]] == [2, 2]
    assert evaluate(tmp_path / "run").to_dict()["rows"][-1] == result["accuracy_counts"]["rows"][-1]


def test_run__leaves_a_damaged_checkpoint_out_only_when_asked(
    toy_tree: Callable[..., Tree], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tree = toy_tree() | {"checkpoint": {"every": "1 step"}}
    whole = run(tree, output=tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        run(tree, output=tmp_path / "run", stop_after_task=2)
    file = tmp_path / "run/checkpoints/task_01/state.json"
    file.write_text(file.read_text().replace('"task_index": 1', '"task_index": 0'))
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    with pytest.raises(UsageError, match=r"task_01/state.json is damaged") as caught:
        run(tree, output=tmp_path / "run", resume=True)
    assert caught.value.advice == "skip_damaged"
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log
    with caplog.at_level(logging.WARNING):
        result = run(tree, output=tmp_path / "run", resume=True, skip_damaged=True)
    assert "task_01/state.json is damaged" in caplog.text
    assert result["metrics"] == whole["metrics"]
    assert result["task_records"] == whole["task_records"]
    assert weights_of(tmp_path / "run", 2) == weights_of(tmp_path / "whole", 2)


def test_run__refuses_the_checkpoint_of_another_run(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    for seed in (1, 2):
        with pytest.raises(TrainingInterrupted):
            run(toy_tree("finetune") | {"seed": seed}, output=tmp_path / str(seed), stop_after_task=1)
    folder = tmp_path / "1" / "checkpoints"
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "2" / "checkpoints", folder)
    tree = toy_tree("finetune") | {"seed": 1}
    with pytest.raises(UsageError, match=r"task_00 belongs to another run.*seed: 2 against 1"):
        run(tree, output=tmp_path / "1", resume=True)
    with pytest.raises(UsageError, match=r"no checkpoint in .* can be used"):
        run(tree, output=tmp_path / "1", resume=True, skip_damaged=True)


@pytest.mark.slow
def test_run__a_session_that_is_known_is_not_missed(tmp_path: Path) -> None:
    """Sessions of the digits look alike, so that some images are sent to another one's head."""
    overrides = [
        "view_batch.num_views=1",
        "optimization.epochs=1",
        "scenario.num_tasks=5",
        "backbone.image_size=32",
    ]
    config = compose(dataset="digits", learner="s_iprompt", overrides=overrides).validate()
    metrics = run(config, output=tmp_path / "run")["metrics"]
    told, guessed = (
        metrics[scope]["top1"]["last_accuracy"] for scope in ("task_incremental", "class_incremental")
    )
    assert told > guessed + 1
    assert metrics["task_expert"] is None


@pytest.mark.slow
def test_run__compiles_where_it_is_asked_for(
    toy_tree: Callable[..., Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend "eager" makes the same graphs, and computes them as they are; the setting is kept on resume."""
    monkeypatch.setattr("vbm_ptm.backbones.compiling.check_compiler", lambda device_type: None)
    monkeypatch.setattr(Backbone, "compile_parts", lambda self: setattr(self, "compile_backend", "eager"))
    tree = toy_tree("slca")
    plain = run(tree, output=tmp_path / "plain")
    torch._dynamo.utils.counters.clear()
    compiled = tree | {"trainer": tree.get("trainer", {}) | {"compile": True}}
    with pytest.raises(TrainingInterrupted):
        run(compiled, output=tmp_path / "run", stop_after_task=1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
    with pytest.raises(UsageError, match=r"trainer\.compile: true against false"):
        run(tree, output=tmp_path / "run", resume=True)
    ours = run(compiled, output=tmp_path / "run", resume=True)
    assert ours["accuracy_counts"] == plain["accuracy_counts"]
    assert [task["frozen_sha256"] for task in ours["task_records"]] == [
        task["frozen_sha256"] for task in plain["task_records"]
    ]


def test_run__keeps_the_precision_that_it_was_started_in(
    toy_tree: Callable[..., Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun where bf16 is fast, resumed where it is not: "auto" is chosen once."""
    tree = toy_tree("linear_probe")
    del tree["trainer"]
    monkeypatch.setattr("vbm_ptm.engine.precision.has_fast_bf16", lambda device_type: True)
    with pytest.raises(TrainingInterrupted):
        run(tree, output=tmp_path / "run", stop_after_task=1)
    assert RunDirectory(tmp_path / "run").config().trainer.mixed_precision == "bf16"
    monkeypatch.setattr("vbm_ptm.engine.precision.has_fast_bf16", lambda device_type: False)
    result = run(tree, output=tmp_path / "run", resume=True)
    assert result["config"]["trainer"]["mixed_precision"] == "bf16"
    with pytest.raises(UsageError, match=r"mixed_precision: bf16 against no"):
        run(tree | {"trainer": {"mixed_precision": "no"}}, output=tmp_path / "run", resume=True)
    assert run(tree, output=tmp_path / "slow")["config"]["trainer"]["mixed_precision"] == "no"
