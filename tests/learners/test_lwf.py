"""LwF: softened answers of the network before the task."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.lwf import soft_cross_entropy

TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3), (2, 3), 4))


@pytest.mark.parametrize(("logits", "expected"), [([1, 1], 0.693147), ([3, 0], 0.604825)])
def test_soft_cross_entropy__has_the_golden_values(logits: list[float], expected: float) -> None:
    found = soft_cross_entropy(
        torch.tensor([logits]).double(), torch.tensor([[2.0, 0]]).double(), temperature=2
    )
    assert found.item() == pytest.approx(expected, abs=1e-6)


def test_lwf__distils_the_columns_of_earlier_classes(build: Callable[..., Learner]) -> None:
    learner = build("lwf", alpha=3.0)
    images, labels = torch.randn(3, 3, 32, 32), torch.tensor([2, 3, 2])
    learner.begin_task(TASKS[0])
    assert learner(images, torch.tensor([0, 1, 0])).auxiliary == {}
    before = learner.head(learner.query(images))
    learner.end_task(TASKS[0], lambda: None)
    learner.begin_task(TASKS[1])
    learner.train()
    with torch.no_grad():
        learner.head.weight.mul_(1.5)
    output = learner(images, labels)
    assert output.logits.shape == (3, 4)
    assert output.columns.tolist() == [0, 1, 2, 3]
    expected = 3 * F.cross_entropy(output.logits[:, :2] / 2, (before / 2).softmax(1), reduction="none")
    torch.testing.assert_close(output.auxiliary["distillation"], expected)
    output.auxiliary["distillation"].sum().backward()
    assert all(parameter.grad is None for parameter in learner.teacher.parameters())


def test_lwf__needs_no_teacher_after_the_task(build: Callable[..., Learner]) -> None:
    learner = build("lwf")
    for task in TASKS:
        learner.begin_task(task)
        learner.end_task(task, lambda: None)
    assert not [name for name in learner.state_dict() if name.startswith("teacher.")]
