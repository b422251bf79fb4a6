"""FDR: the distance from answers that were given at the end of a task."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.fdr import answer_distance
from vbm_ptm.replay import Replay

TASKS = tuple(
    Task(t, (2 * t, 2 * t + 1), (2 * t, 2 * t + 1), 2 * t + 2, num_planned_classes=4) for t in (0, 1)
)
IMAGES = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class FeaturesOfRows:
    """Six images of a task; which of them were looked at."""

    def __init__(self, learner: Learner, task: Task) -> None:
        self.learner = learner
        self.task = task
        self.asked: list[int] = []

    def labels(self) -> tuple[Tensor, Tensor]:
        rows = torch.arange(6) + 6 * self.task.index
        return rows % 2 + 2 * self.task.index, rows

    def __call__(self, rows: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        self.asked += rows
        wanted = torch.tensor(rows)
        return self.learner.query(IMAGES[wanted]), wanted % 2 + 2 * self.task.index, wanted


def finish(learner: Learner, task: Task) -> list[int]:
    """End a task; return the rows whose features were computed."""
    features = FeaturesOfRows(learner, task)
    learner.end_task(task, features)
    return features.asked


def test_answer_distance__has_the_golden_value() -> None:
    answer = torch.tensor([[1.0, 0, 0]]).double().softmax(1)
    found = answer_distance(torch.tensor([[0, 0, 1.0]]).double(), answer)
    assert found.item() == pytest.approx(0.515022, abs=1e-6)


def test_fdr__keeps_answers_with_their_images(build: Callable[..., Learner]) -> None:
    learner = build("fdr", capacity=9)
    learner.begin_task(TASKS[0])
    finish(learner, TASKS[0])
    rows = learner.rehearsed_rows()
    assert len(rows) == 6
    torch.testing.assert_close(
        learner.answers[:6], learner.head(learner.query(IMAGES[rows])).softmax(1), atol=1e-6, rtol=0
    )
    first = dict(zip(rows.tolist(), learner.answers.clone(), strict=False))
    learner.begin_task(TASKS[1])
    with torch.no_grad():
        learner.head.weight.mul_(3)
    asked = finish(learner, TASKS[1])
    assert len(asked) == 4  # of those that were chosen alone
    rows = learner.rehearsed_rows()
    assert learner.exemplars.per_class() == dict.fromkeys(range(4), 2)
    now = learner.head(learner.query(IMAGES[rows])).softmax(1).detach()
    for slot, row in enumerate(rows.tolist()):
        expected = first[row] if row < 6 else now[slot]
        torch.testing.assert_close(learner.answers[slot], expected, atol=1e-6, rtol=0)
    output = learner.rehearse(Replay(IMAGES[rows], torch.zeros(8, dtype=torch.int64), torch.arange(8)))
    torch.testing.assert_close(output.supervised, (now - learner.answers[:8]).norm(dim=1), atol=1e-5, rtol=0)
    output.supervised.sum().backward()
    assert bool(learner.head.weight.grad.isfinite().all())
