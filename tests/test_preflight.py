"""What is known before training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from vbm_ptm.config import compose
from vbm_ptm.errors import UsageError
from vbm_ptm.experiment import run
from vbm_ptm.preflight import explain_setting, survey

Tree = dict[str, Any]


def as_file(tree: Tree, folder: Path) -> Path:
    file = folder / "all.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def mebibytes(text: str) -> float:
    number, unit = text.split()
    assert unit == "MiB"
    return float(number.replace(",", ""))


def test_survey__foretells_what_a_run_takes(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    tree = toy_tree()
    tree["checkpoint"] = {"keep": "all"}
    facts = survey(compose(config_file=as_file(tree, tmp_path)))
    result = run(tree, output=tmp_path / "run")
    assert (facts["training images"], facts["test images"], facts["classes"]) == (72, 48, 12)
    assert facts["tasks"] == "4, 4, 4 classes"
    assert facts["training images per task"] == "24, 24, 24"
    assert (facts["steps"], facts["images to train on"]) == (result["num_steps"], result["num_images"])
    assert facts["split SHA-256"] == result["split_sha256"]
    assert facts["backbone"].endswith(result["weights"]["sha256"])
    assert facts["a step"] == "8 images = 4 groups x 2 views"

    parameters = result["task_records"][0]["parameters"]
    assert facts["parameters"] == ", ".join(f"{name} {count:,}" for name, count in parameters.items())
    trained = sum(parameters.values()) - parameters["frozen"]
    # fp32 weights and gradients, and one average of SGD with momentum.
    expected = 4 * (parameters["frozen"] + 3 * trained) / 2**20
    assert mebibytes(facts["memory for weights, gradients and optimizer"]) == pytest.approx(
        expected, abs=0.051
    )
    files = [file for file in (tmp_path / "run" / "checkpoints").rglob("*") if file.is_file()]
    stored = sum(file.stat().st_size for file in files) / 2**20
    assert mebibytes(facts["disk for checkpoints"]) == pytest.approx(stored, rel=0.1)


def test_survey__counts_the_steps_of_a_smoke_run(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    tree = toy_tree("finetune")
    tree["trainer"] = {"max_steps_per_task": 2}
    tree["scenario"]["num_tasks"] = 4  # 9 samples of an epoch make steps of 3 groups, not of 4
    facts = survey(compose(config_file=as_file(tree, tmp_path)))
    result = run(tree, output=tmp_path / "run")
    assert (facts["steps"], facts["images to train on"]) == (8, 48)
    assert (result["num_steps"], result["num_images"]) == (8, 48)


def test_survey__adam_needs_two_averages_and_the_last_two_checkpoints_stay(
    toy_tree: Callable[..., Tree], tmp_path: Path
) -> None:
    one = survey(compose(config_file=as_file(toy_tree(), tmp_path)))
    adam = ["optimization.optimizer=adam", "checkpoint.keep=all"]
    two = survey(compose(config_file=as_file(toy_tree(), tmp_path), overrides=adam))
    memory, disk = "memory for weights, gradients and optimizer", "disk for checkpoints"
    assert mebibytes(two[memory]) == pytest.approx(mebibytes(one[memory]) * 4 / 3, abs=0.11)
    assert mebibytes(two[disk]) == pytest.approx(mebibytes(one[disk]) * 3 / 2, rel=0.1)


def test_survey__knows_a_learner_that_is_not_trained(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    facts = survey(compose(config_file=as_file(toy_tree("nearest_mean"), tmp_path)))
    assert (facts["steps"], facts["images to train on"]) == (0, 0)
    assert mebibytes(facts["disk for checkpoints"]) < 0.1


def test_survey__counts_the_statistics_of_classes(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    """SLCA keeps a mean and a factor per class: 10 x (1 + 64) vectors of 64 numbers, every class having > 64 images."""
    tree = toy_tree()
    tree["dataset"] = {"name": "digits"}
    tree["scenario"] = {"num_tasks": 1}
    facts = survey(compose(config_file=as_file(tree, tmp_path)))
    stored = 300_096 + 10 * 64 + 10  # backbone, one head
    expected = 4 * (stored + 10 * (1 + 64) * 64) / 2**20
    assert mebibytes(facts["disk for checkpoints"]) == pytest.approx(expected, abs=0.051)


def test_survey__finds_what_a_run_would_stumble_over(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    tree = toy_tree()
    tree["scenario"]["num_tasks"] = 13
    with pytest.raises(UsageError, match=r"scenario\.num_tasks is 13"):
        survey(compose(config_file=as_file(tree, tmp_path)))
    tree["dataset"]["path"] = "/nowhere"
    with pytest.raises(UsageError, match="there is nothing at '/nowhere'"):
        survey(compose(config_file=as_file(tree, tmp_path)))


def test_explain_setting__names_value_and_source() -> None:
    sources: dict[str, Any] = {
        "dataset": "cifar100",
        "learner": "slca",
        "preset": "paper",
        "overrides": ["seed=5"],
    }

    def source(key: str) -> str:
        (line,) = explain_setting(key, compose(**sources)).values()
        return line

    assert source("seed") == "5  (from --set seed=5)"
    assert source("device") == "auto  (from the default)"
    assert source("preset") == "paper  (from --preset)"
    assert source("learner.name").endswith("learners/slca.yaml)")
    assert source("dataset.image_column").endswith("datasets/cifar100.yaml)")
    assert source("view_batch.num_views").endswith("learners/slca.yaml, preset paper)")
    assert source("dataset.transforms.normalization").endswith(
        "learners/slca.yaml, preset paper for cifar100)"
    )
    assert set(explain_setting("view_batch", compose(**sources))) == {
        "view_batch.num_views",
        "view_batch.allow_partial_cycle",
    }
    with pytest.raises(UsageError, match=r"Did you mean 'view_batch\.num_views'\?"):
        explain_setting("view_batch.num_view", compose(**sources))
