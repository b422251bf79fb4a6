"""Whole runs on networks that are no ViT: the same commands, checkpoints and exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from vbm_ptm.building import build
from vbm_ptm.config.run_config import compose
from vbm_ptm.errors import TrainingInterrupted, UsageError
from vbm_ptm.experiment import run
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.runs.export import export
from vbm_ptm.runs.stored_learner import evaluate, predict

Tree = dict[str, Any]

RESNET = {"name": "resnet18_cifar", "channels": 4}
FROM_SCRATCH = {"name": "test_resnet.r160_in1k", "from_scratch": True, "image_size": 32}
TAKES_ANY = {
    "finetune": {},
    "linear_probe": {},
    "nearest_mean": {},
    "ran_pac": {"projection_width": 50},
    "slca": {"alignment_epochs": 1, "alignment_samples_per_class": 4},
}


def trained_matrix(result: Tree) -> AccuracyMatrix:
    return AccuracyMatrix.from_dict(result["accuracy_counts"])


@pytest.fixture
def tree_on(toy_tree: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return a function that makes a small configuration of a learner on a backbone."""

    def make(learner: str, backbone: Tree = RESNET) -> Tree:
        tree = toy_tree(learner, **TAKES_ANY.get(learner, {}))
        tree["backbone"] = dict(backbone)
        tree["dataset"]["transforms"] = {"crop": "padded", "normalization": "cifar10"}
        return tree

    return make


@pytest.mark.parametrize(
    "learner",
    [name if name == "nearest_mean" else pytest.param(name, marks=pytest.mark.slow) for name in TAKES_ANY],
)
def test_run__trains_what_needs_no_tokens_on_resnet18(
    tree_on: Callable[..., Tree], tmp_path: Path, learner: str
) -> None:
    result = run(tree_on(learner), output=tmp_path / "run")
    assert result["status"] == "finished"
    assert (result["weights"]["file"], result["weights"]["seed"]) == ("from scratch", 1993)
    assert evaluate(tmp_path / "run").rows[-1] == trained_matrix(result).rows[-1]


@pytest.mark.slow
def test_run__on_resnet18_goes_on_as_if_it_had_not_stopped(
    tree_on: Callable[..., Tree], tmp_path: Path
) -> None:
    whole = run(tree_on("finetune"), output=tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        run(tree_on("finetune"), output=tmp_path / "parts", stop_after_task=1)
    parts = run(tree_on("finetune"), output=tmp_path / "parts", resume=True)
    assert whole["task_records"] == parts["task_records"]
    assert whole["metrics"] == parts["metrics"]


@pytest.mark.parametrize(
    "backbone",
    [
        pytest.param(RESNET, id="resnet18_cifar"),
        pytest.param(FROM_SCRATCH, id="timm", marks=pytest.mark.slow),
    ],
)
def test_export__of_a_network_predicts_as_the_run_does(
    tree_on: Callable[..., Tree], toy_folder: Path, tmp_path: Path, backbone: Tree
) -> None:
    run(tree_on("finetune", backbone) | {"trainer": {"max_steps_per_task": 1}}, output=tmp_path / "run")
    folder = export(tmp_path / "run")
    images = sorted(toy_folder.glob("test/*/0.png"))
    assert list(predict(folder, images)) == list(predict(tmp_path / "run", images))
    card = ModelCard.load(folder / "README.md")
    assert backbone["name"].partition(".")[0] in card.data.tags
    assert "vision-transformer" not in card.data.tags
    assert (card.data.base_model, card.data.license) == (None, None)
    assert f"- pre trained weights: none, {backbone['name']} from scratch (drawn by seed 1993" in card.text


def test_build__refuses_prompt_learners_by_name(tree_on: Callable[..., Tree]) -> None:
    with pytest.raises(UsageError, match=r"resnet18_cifar.*learner 'l2p' needs"):
        build(compose(tree=tree_on("l2p")).validate())


@pytest.mark.parametrize(
    ("learner", "settings"),
    [
        ("finetune", {}),
        ("ran_pac", {"first_session": {"kind": "finetune"}}),
        ("aper", {"first_session": {"kind": "finetune"}}),
    ],
)
def test_build__refuses_micro_batches_where_batch_norms_are_trained(
    tree_on: Callable[..., Tree], learner: str, settings: Tree
) -> None:
    tree = tree_on(learner)
    tree["learner"] |= settings
    tree["optimization"]["gradient_accumulation_steps"] = 2
    with pytest.raises(UsageError, match=r"gradient_accumulation_steps is 2.*batch norms"):
        build(compose(tree=tree).validate())


def test_build__takes_micro_batches_where_batch_norms_are_frozen(tree_on: Callable[..., Tree]) -> None:
    for learner in ("linear_probe", "ran_pac"):
        frozen = tree_on(learner)
        frozen["optimization"]["gradient_accumulation_steps"] = 2
        build(compose(tree=frozen).validate())


def test_build__refuses_a_fresh_final_norm_without_a_vit(tree_on: Callable[..., Tree]) -> None:
    tree = tree_on("slca")
    tree["learner"]["reinitialize_final_norm"] = True
    with pytest.raises(UsageError, match="reinitialize_final_norm"):
        build(compose(tree=tree).validate())
