"""WA: a weighted distillation, and new rows of the classifier as long as the old ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner

TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3, 4), (2, 3, 4), 5))


def test_wa__weighs_distillation_by_the_share_of_old_classes(build: Callable[..., Learner]) -> None:
    learner = build("wa", capacity=0)
    images, labels = torch.randn(3, 3, 32, 32), torch.tensor([2, 4, 0])
    learner.begin_task(TASKS[0])
    first = learner(images, torch.tensor([0, 1, 0]))
    assert first.auxiliary == {}
    torch.testing.assert_close(
        first.supervised, F.cross_entropy(first.logits, torch.tensor([0, 1, 0]), reduction="none")
    )
    learner.end_task(TASKS[0], lambda: None)
    before = learner.head(learner.query(images))
    learner.begin_task(TASKS[1])
    with torch.no_grad():
        learner.head.weight.mul_(1.5)
    output = learner(images, labels)
    torch.testing.assert_close(
        output.supervised, 0.6 * F.cross_entropy(output.logits, labels, reduction="none")
    )
    taught = (before / 2).log_softmax(1)
    log_probabilities = (output.logits[:, :2] / 2).log_softmax(1)
    expected = F.kl_div(log_probabilities, taught, reduction="none", log_target=True).sum(1)
    torch.testing.assert_close(output.auxiliary["distillation"], 0.4 * expected)


def test_wa__keeps_old_rows_and_aligns_new_ones(build: Callable[..., Learner]) -> None:
    learner = build("wa", capacity=0)
    learner.begin_task(TASKS[0])
    learner.after_step()
    assert bool((learner.head.weight >= 0).all())
    learner.end_task(TASKS[0], lambda: None)
    old = learner.head.weight.detach().clone()
    learner.begin_task(TASKS[1])
    assert torch.equal(learner.head.weight[:2], old)
    learner.after_step()
    for _ in range(2):  # the second time nothing is left to do
        learner.end_task(TASKS[1], lambda: None)
        lengths = torch.linalg.vector_norm(learner.head.weight.detach(), dim=1)
        assert float(lengths[2:].mean()) == pytest.approx(float(lengths[:2].mean()), rel=1e-5)
        assert torch.equal(learner.head.weight[:2], old)
    assert not [name for name in learner.state_dict() if name.startswith("teacher.")]
