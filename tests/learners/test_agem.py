"""A-GEM and A-GEM-R: a gradient that does not work against that of past images."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.agem import projected
from vbm_ptm.learners.base import Learner
from vbm_ptm.replay import Replay

FIRST = Task(0, (0, 1), (0, 1), 2, num_planned_classes=6)


class LabelsAlone(NamedTuple):
    """What a method that chooses by chance may look at: asked for features, it raises."""

    own: Tensor
    rows: Tensor

    def labels(self) -> tuple[Tensor, Tensor]:
        return self.own, self.rows


@pytest.mark.parametrize(("current", "expected"), [([1, -2], [1.5, -1.5]), ([2, 1], [2, 1])])
def test_projected__has_the_golden_values(current: list[float], expected: list[float]) -> None:
    past = torch.tensor([1.0, 1]).double()
    assert projected(torch.tensor(current).double(), past).tolist() == pytest.approx(expected, abs=1e-12)
    assert projected(torch.tensor(current).double(), 0 * past).tolist() == current


@pytest.mark.parametrize("name", ["agem", "agem_r"])
def test_agem__learns_a_draw_like_current_images(build: Callable[..., Learner], name: str) -> None:
    learner = build(name)
    learner.begin_task(FIRST)
    images, labels = torch.randn(3, 3, 32, 32), torch.tensor([0, 1, 0])
    one, two = learner(images, labels), learner.rehearse(Replay(images, labels, torch.arange(3)))
    assert one.logits.shape == (3, 6)
    assert torch.equal(one.logits, two.logits)
    assert learner.project_gradient(torch.tensor([1.0, -2]), torch.tensor([1.0, 1])).tolist() == [1.5, -1.5]


def test_agem__keeps_equally_many_images_of_each_class(build: Callable[..., Learner]) -> None:
    learner, labels = build("agem", capacity=9), torch.arange(12) % 2
    for task in (FIRST, Task(1, (2, 3), (2, 3), 4, num_planned_classes=6)):
        learner.begin_task(task)
        rows = torch.arange(12) + 100 * task.index
        learner.end_task(task, LabelsAlone(labels + 2 * task.index, rows))
    assert learner.exemplars.per_class() == dict.fromkeys(range(4), 2)
    assert len(set(learner.rehearsed_rows().tolist())) == 8
