"""APER against golden numbers and hand values, in its five variants."""

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
from vbm_ptm.learners.base import Learner

Build = Callable[..., Learner]
GOLDEN = Path(__file__).parents[1] / "golden2" / "aper.safetensors"
KINDS = ("adapter", "ssf", "vpt_deep", "vpt_shallow", "finetune")
FIRST, SECOND = Task(0, (0, 1), (0, 1), 2), Task(1, (2,), (2,), 3)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def after_first_task(
    build: Build, train: Any, given_features: Any, images: Tensor, **settings: Any
) -> Learner:
    learner = build("aper", **settings)
    train(learner, FIRST)
    learner.end_task(FIRST, given_features(learner.query(images), [0, 1, 0, 1, 1]))
    return learner


def test_aper__scores_equal_the_reference(build: Build, given_features: Any) -> None:
    golden = load_file(GOLDEN)
    learner = build("aper")
    task = Task(0, (0, 1, 2), (0, 1, 2), 3)
    learner.begin_task(task)
    learner.end_task(task, given_features(golden["features"], golden["labels"].tolist()))
    scores = learner.predict(torch.zeros(4, 3, 32, 32), golden["queries"])
    torch.testing.assert_close(scores, golden["scores"])
    counts = golden["labels"].bincount()[:, None]
    torch.testing.assert_close(learner.statistics_of(task)["sum"] / counts, golden["prototypes"])


def test_aper__one_norm_holds_for_both_halves(build: Build, given_features: Any) -> None:
    """Prototype [3, 4 | 0, 0] and query [3, 4 | 5, 0]: 25 / (5 sqrt 50), where a norm of each half would give 1."""
    learner, task = build("aper"), Task(0, (0,), (0,), 1)
    learner.begin_task(task)
    learner.end_task(task, given_features(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), [0]))
    score = learner.predict(torch.zeros(1, 3, 32, 32), torch.tensor([[3.0, 4.0, 5.0, 0.0]]))
    assert score.item() == pytest.approx(0.7071068, abs=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_aper__features_are_the_frozen_ones_beside_the_adapted(
    build: Build, train: Any, given_features: Any, images: Tensor, kind: str
) -> None:
    learner = after_first_task(build, train, given_features, images, first_session={"kind": kind})
    query = learner.query(images)
    assert query.shape == (5, 96)
    assert torch.equal(query[:, :48], learner.backbone.query(images))
    assert not torch.allclose(query[:, 48:], query[:, :48], atol=1e-4)
    with torch.no_grad():
        adapted = learner.first_session.encode(learner.backbone, images)
    torch.testing.assert_close(query[:, 48:], adapted)


@pytest.mark.parametrize("kind", KINDS)
def test_aper__later_tasks_train_nothing_and_change_no_feature(
    build: Build, train: Any, given_features: Any, images: Tensor, kind: str
) -> None:
    learner = after_first_task(build, train, given_features, images, first_session={"kind": kind})
    before, scores = learner.query(images), learner.predict(images)
    learner.begin_task(SECOND)
    assert learner.parameter_groups() == []
    assert not any(parameter.requires_grad for parameter in learner.parameters())
    learner.end_task(SECOND, given_features(before[:2], [2, 2]))
    assert torch.equal(learner.query(images), before)
    torch.testing.assert_close(learner.predict(images)[:, :2], scores)
    expected = F.cosine_similarity(before, before[:2].mean(0), dim=1)
    torch.testing.assert_close(learner.predict(images)[:, 2], expected)


def test_aper__dropout_is_off_wherever_features_are_taken(build: Build, images: Tensor) -> None:
    learner = build("aper", first_session={"kind": "adapter", "adapter_dropout": 0.5})
    learner.begin_task(FIRST)
    with torch.no_grad():
        for adapter in learner.first_session.adaptation.blocks:
            adapter.up.weight.normal_()
    for is_training in (True, False):
        learner.train(is_training)
        assert torch.equal(learner.query(images), learner.query(images))
        assert torch.equal(learner.predict(images), learner.predict(images))
    learner.train()
    logits = [learner(images, torch.zeros(5, dtype=torch.long)).logits for _ in range(2)]
    assert not torch.equal(*logits)


def test_aper__head_starts_as_a_cosine(build: Build, images: Tensor) -> None:
    learner = build("aper")
    learner.begin_task(FIRST)
    output = learner(images, torch.zeros(5, dtype=torch.long))
    assert output.columns.tolist() == [0, 1]
    cosines = F.cosine_similarity(
        learner.backbone.query(images)[:, None], learner.first_session.head.weight, dim=2
    )
    torch.testing.assert_close(output.logits, cosines, atol=1e-6, rtol=0)


def test_aper__without_adaptation_it_is_the_nearest_mean(
    build: Build, given_features: Any, images: Tensor
) -> None:
    aper, mean = build("aper", first_session={"kind": "none"}), build("nearest_mean")
    for learner in (aper, mean):
        learner.begin_task(FIRST)
        learner.end_task(FIRST, given_features(learner.query(images), [0, 1, 0, 1, 1]))
    torch.testing.assert_close(aper.predict(images), mean.predict(images), atol=1e-6, rtol=0)
    assert aper.config.trained_tasks == "none"
