"""Expandable: frozen earlier backbones, an auxiliary classifier, and a last balanced fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.expandable import auxiliary_targets
from vbm_ptm.randomness import seeded

TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3, 4), (2, 3, 4), 5))
IMAGES = torch.randn(30, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(30) % 5


class TrainingImages:
    """What the trainer hands to ``end_task``; notes what it was asked for."""

    def __init__(self, learner: Learner, task: Task) -> None:
        self.learner = learner
        self.own = [row for row in range(30) if int(LABELS[row]) in task.classes]
        self.asked: list[tuple[list[int], str, int]] = []

    def __call__(
        self, rows: Sequence[int] | None = None, transform: Any = "eval", *, draw: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = torch.tensor(self.own if rows is None else list(rows), dtype=torch.int64)
        self.asked.append((wanted.tolist(), transform, draw))
        return self.learner.query(IMAGES[wanted]), LABELS[wanted], wanted


def finish(learner: Learner, task: Task) -> TrainingImages:
    features = TrainingImages(learner, task)
    with seeded(task.index):
        learner.eval().end_task(task, features)
    return features


def test_auxiliary_targets__put_earlier_classes_into_one() -> None:
    assert auxiliary_targets(torch.tensor([0, 3, 5, 6, 9]), num_known=5).tolist() == [0, 0, 1, 2, 5]


def test_expandable__freezes_earlier_backbones_and_starts_from_the_last(
    build: Callable[..., Learner],
) -> None:
    learner = build("expandable", capacity=10, balanced_epochs=1)
    learner.begin_task(TASKS[0])
    finish(learner, TASKS[0])
    before = learner.query(IMAGES[:2])
    learner.begin_task(TASKS[1])
    learner.train()
    assert learner.query(IMAGES[:2]).shape == (2, 2 * learner.backbone.width)
    torch.testing.assert_close(learner.query(IMAGES[:2]), torch.cat([before, before], dim=1))
    frozen = {name: tensor.clone() for name, tensor in learner.earlier.state_dict().items()}
    optimizer = torch.optim.SGD(
        [parameter for group in learner.parameter_groups() for parameter in group.parameters], lr=0.1
    )
    output = learner(IMAGES[:4], torch.tensor([0, 2, 3, 4]))
    assert output.logits.shape == (4, 5)
    loss = (
        F.cross_entropy(output.logits, torch.tensor([0, 2, 3, 4]))
        + output.auxiliary["newest_features"].mean()
    )
    loss.backward()
    optimizer.step()
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in learner.earlier.state_dict().items())
    assert not torch.equal(learner.query(IMAGES[:2])[:, learner.backbone.width :], before)
    assert not any(module.training for module in learner.earlier.modules() if module is not learner.earlier)


def test_expandable__auxiliary_classifier_sees_the_newest_features_alone(
    build: Callable[..., Learner],
) -> None:
    learner = build("expandable", capacity=10, balanced_epochs=0)
    learner.begin_task(TASKS[0])
    assert learner(IMAGES[:2], LABELS[:2]).auxiliary == {}
    finish(learner, TASKS[0])
    learner.begin_task(TASKS[1])
    output = learner(IMAGES[:5], LABELS[:5])
    newest = learner.backbone.features(IMAGES[:5])
    expected = F.cross_entropy(
        learner.auxiliary_head(newest), torch.tensor([0, 0, 1, 2, 3]), reduction="none"
    )
    torch.testing.assert_close(output.auxiliary["newest_features"], expected)
    learner.begin_task(Task(2, (0, 4), (), 5, "sketch"))
    assert learner.auxiliary_head is None


def test_expandable__draws_its_classifiers_anew_at_an_epoch(build: Callable[..., Learner]) -> None:
    learner = build("expandable", reset_epoch=3)
    learner.begin_task(TASKS[0])
    before = learner.head.weight.detach().clone()
    learner.begin_epoch(2)
    assert torch.equal(learner.head.weight, before)
    with seeded(5):
        learner.begin_epoch(3)
    assert not torch.equal(learner.head.weight, before)
    bound = learner.backbone.width**-0.5  # torch's law for a linear layer
    assert float(learner.head.weight.detach().abs().max()) <= bound


def test_expandable__fits_its_classifier_to_equally_many_images_of_each_class(
    build: Callable[..., Learner],
) -> None:
    learner = build("expandable", capacity=8, balanced_epochs=4)
    learner.begin_task(TASKS[0])
    first = finish(learner, TASKS[0])
    assert [transform for _, transform, _ in first.asked] == ["eval"]  # the first task has no balanced fit
    learner.begin_task(TASKS[1])
    backbone = {name: tensor.clone() for name, tensor in learner.backbone.state_dict().items()}
    head = learner.head.weight.detach().clone()
    asked = [each for each in finish(learner, TASKS[1]).asked if each[1] == "weak"]
    assert [draw for _, _, draw in asked] == [0, 1, 2, 3]
    assert LABELS[asked[0][0]].bincount().tolist() == [4, 4, 4, 4, 4]  # as many as there are exemplars
    assert len({tuple(rows) for rows, _, _ in asked}) == 1
    assert not torch.equal(learner.head.weight, head)
    assert all(torch.equal(tensor, backbone[name]) for name, tensor in learner.backbone.state_dict().items())
    assert learner.exemplars.per_class() == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    assert all(parameter.grad is None for parameter in learner.parameters())


def test_expandable__balanced_fit_softens_the_logits(
    build: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CE(z / 5) of z = [5, 0, 0] is 0.551445."""
    logits = torch.tensor([[5.0, 0, 0]])
    assert F.cross_entropy(logits / 5, torch.tensor([0])).item() == pytest.approx(0.551445, abs=1e-6)
    learner = build("expandable", capacity=8, balanced_epochs=1, balanced_temperature=5.0)
    learner.begin_task(TASKS[0])
    finish(learner, TASKS[0])
    learner.begin_task(TASKS[1])
    seen: list[Tensor] = []
    made: list[Tensor] = []
    cross_entropy = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda z, y: seen.append(z) or cross_entropy(z, y))
    learner.head.register_forward_hook(lambda module, inputs, output: made.append(output))
    finish(learner, TASKS[1])
    torch.testing.assert_close(seen[0], made[0] / 5)


def test_expandable__without_a_buffer_forgets_all_but_the_newest_classes(
    build: Callable[..., Learner],
) -> None:
    learner = build("expandable", capacity=0, balanced_epochs=30)
    for task in TASKS:
        learner.begin_task(task)
        finish(learner, task)
    assert set(learner.predict(IMAGES).argmax(1).tolist()) <= set(TASKS[1].new_classes)
