"""EASE against golden numbers, hand values and the nearest mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.ease import completed_prototypes, subspace_scores

Build = Callable[..., Learner]
GOLDEN = Path(__file__).parents[1] / "golden2" / "ease.safetensors"
TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3, 4), (2, 3, 4), 5), Task(2, (5,), (5,), 6))


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def live_through(
    learner: Learner, train: Any, given_features: Any, images: Tensor, *, until: int = 3
) -> Learner:
    for task in TASKS[:until]:
        train(learner, task)
        labels = [task.classes[row % len(task.classes)] for row in range(6)]
        learner.end_task(task, given_features(learner.query(images), labels))
    return learner


@pytest.mark.parametrize("task", [0, 1, 2])
def test_prototypes_and_scores__equal_the_reference(task: int) -> None:
    """Two classes in each of three tasks."""
    golden = load_file(GOLDEN)
    observed = [golden["observed"][2 * own : 2 * own + 2, : own + 1] for own in range(task + 1)]
    prototypes = completed_prototypes(observed)
    torch.testing.assert_close(prototypes, golden[f"after{task}.prototypes"])
    queries = golden["queries"][:, : task + 1]
    scores = subspace_scores(queries, observed, alpha=golden["alpha"].item())
    torch.testing.assert_close(scores, golden[f"after{task}.scores"])


def test_completed_prototypes__match_hand_values() -> None:
    """One old class at 1, two newer ones at 1 and -1 there, and at 2 and 4 in their own subspace."""
    newer = torch.tensor([[[1.0], [2.0]], [[-1.0], [4.0]]])
    completed = completed_prototypes([torch.tensor([[[1.0]]]), newer])
    assert completed[0, 1].item() == pytest.approx(2.2384058, abs=1e-6)
    assert torch.equal(completed[1:], newer)


def test_completed_prototypes__lie_among_those_of_newer_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    observed = [torch.randn(2, own + 1, 5, generator=generator) for own in range(4)]
    completed = completed_prototypes(observed)
    for own in range(4):
        for newer in range(own + 1, 4):
            there = torch.cat([part[:, newer] for part in observed[newer:]])
            ours = completed[2 * own : 2 * own + 2, newer]
            assert bool((ours <= there.amax(0) + 1e-6).all())
            assert bool((ours >= there.amin(0) - 1e-6).all())


def test_ease__after_the_first_task_is_the_nearest_mean_of_adapted_features(
    build: Build, train: Any, given_features: Any, images: Tensor
) -> None:
    learner = live_through(build("ease"), train, given_features, images, until=1)
    features = learner.query(images)
    means = torch.stack([features[0::2].mean(0), features[1::2].mean(0)])
    expected = F.cosine_similarity(features[:, None], means, dim=2)
    torch.testing.assert_close(learner.predict(images), expected, atol=1e-6, rtol=0)


def test_ease__predicts_by_the_formula_in_all_subspaces(
    build: Build, train: Any, given_features: Any, images: Tensor
) -> None:
    learner = live_through(build("ease", alpha=0.3), train, given_features, images)
    features = learner.query(images).unflatten(1, (3, 48))
    observed = [learner.get_submodule(f"prototypes.{own}").of_classes for own in range(3)]
    assert [tuple(part.shape) for part in observed] == [(2, 1, 48), (3, 2, 48), (1, 3, 48)]
    prototypes, own = completed_prototypes(observed), [0, 0, 1, 1, 1, 2]
    scores = learner.predict(images)
    for class_index in range(6):
        cosines = F.cosine_similarity(features, prototypes[class_index], dim=2)
        others = sum(cosines[:, j] for j in range(3) if j != own[class_index])
        expected = cosines[:, own[class_index]] + 0.3 / 2 * others
        torch.testing.assert_close(scores[:, class_index], expected, atol=1e-5, rtol=0)
    for task in TASKS:
        cosines = F.cosine_similarity(features[:, task.index, None], observed[task.index][:, -1], dim=2)
        torch.testing.assert_close(learner.predict_task(images, task), cosines, atol=1e-5, rtol=0)


def test_ease__adapters_are_fresh_for_each_task_and_old_ones_stay(
    build: Build, train: Any, given_features: Any, images: Tensor
) -> None:
    learner = live_through(build("ease"), train, given_features, images, until=1)
    before = learner.query(images)
    learner.begin_task(TASKS[1])
    assert not any(bool(block.up.weight.any()) for block in learner.experts[1].blocks)
    assert torch.equal(learner.query(images)[:, :48], before)
    torch.testing.assert_close(learner.query(images)[:, 48:], learner.backbone.query(images))
    train(learner, TASKS[1])
    assert torch.equal(learner.query(images)[:, :48], before)
    assert learner.predict(images)[:, 2:].tolist() == [[0.0] * 3] * 6  # no prototype yet
    trainable = [expert.blocks[0].up.weight.requires_grad for expert in learner.experts]
    assert trainable == [False, True]


def test_ease__dropout_is_off_wherever_features_are_taken(
    build: Build, train: Any, given_features: Any, images: Tensor
) -> None:
    learner = live_through(build("ease", adapter_dropout=0.5), train, given_features, images)
    scores = []
    for is_training in (True, False):
        learner.train(is_training)
        scores += [learner.predict(images), learner.predict(images)]
    assert all(torch.equal(scores[0], each) for each in scores[1:])


def test_ease__is_refused_where_classes_come_back(build: Build) -> None:
    learner = build("ease")
    with pytest.raises(UsageError, match="'ease' is not defined where a class comes back"):
        learner.begin_task(Task(0, (0, 1), (0, 1), 2, "photo"))
    assert len(learner.experts) == 0
