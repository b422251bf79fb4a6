"""BiC: a correction of the newest logits that held-out images decide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.bic import fitted_correction
from vbm_ptm.replay import is_held_out

TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3, 4), (2, 3, 4), 5))


def test_fitted_correction__undoes_a_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(4000, 5, generator=generator).double()
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    biased = torch.cat([logits[:, :2], (logits[:, 2:] + 1.5) / 0.5], dim=1)
    alpha, beta = fitted_correction(biased, labels, num_known=2).tolist()
    assert (alpha, beta) == (pytest.approx(0.5, abs=0.05), pytest.approx(-1.5, abs=0.15))
    apart = fitted_correction(torch.eye(5).double(), torch.arange(5), num_known=2)
    assert bool(apart.isfinite().all())  # no finite one is the best there without the pull


def test_is_held_out__takes_equally_many_of_each_class() -> None:
    labels = torch.tensor([0] * 30 + [1] * 45)
    rows = torch.arange(75) * 7
    held = is_held_out(rows, labels, share=0.1)
    assert labels[held].bincount().tolist() == [3, 3]
    order = torch.randperm(75, generator=torch.Generator().manual_seed(0))
    assert torch.equal(is_held_out(rows[order], labels[order], share=0.1), held[order])
    assert int(is_held_out(rows[29:], labels[29:], share=0.1).sum()) == 0  # a class of one is trained on
    assert int(is_held_out(rows[28:], labels[28:], share=0.1).sum()) == 2


def test_bic__puts_the_correction_into_the_classifier(build: Callable[..., Learner]) -> None:
    learner = build("bic", capacity=10)
    images = torch.randn(30, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(30) % 5
    asked: list[list[int]] = []

    def features_for(task: Task) -> Callable[..., object]:
        own = [row for row in range(30) if int(labels[row]) in task.classes]

        def features(rows: list[int] | None = None) -> object:
            wanted = torch.tensor(own if rows is None else rows)
            asked.append(wanted.tolist())
            return learner.query(images[wanted]), labels[wanted], wanted

        return features

    learner.begin_task(TASKS[0])
    learner.end_task(TASKS[0], features_for(TASKS[0]))
    assert learner.report(TASKS[0]) == {"correction": [1.0, 0.0]}
    exemplars = learner.rehearsed_rows().tolist()
    learner.begin_task(TASKS[1])
    before, old = learner.predict(images).detach(), labels[exemplars]
    output = learner(images[:5], labels[:5])
    torch.testing.assert_close(
        output.supervised, 0.6 * F.cross_entropy(output.logits, labels[:5], reduction="none")
    )
    learner.end_task(TASKS[1], features_for(TASKS[1]))
    alpha, beta = learner.report(TASKS[1])["correction"]
    assert (alpha, beta) != (1.0, 0.0)
    expected = torch.cat([before[:, :2], alpha * before[:, 2:] + beta], dim=1)
    torch.testing.assert_close(learner.predict(images), expected, atol=1e-5, rtol=1e-5)
    held = asked[-1]
    assert labels[held].bincount().tolist() == [1] * 5
    assert {row for row in held if int(labels[row]) < 2} <= set(exemplars)
    assert len(old) == 10


def test_bic__says_where_no_image_can_be_held_out(
    build: Callable[..., Learner], caplog: pytest.LogCaptureFixture
) -> None:
    learner = build("bic", capacity=10)
    labels = torch.tensor([0, 1, 2, 3] * 3 + [4])
    values = torch.randn(len(labels), learner.backbone.width)
    for task in TASKS:
        learner.begin_task(task)
        own = torch.isin(labels, torch.tensor(task.classes)).nonzero()[:, 0]
        learner.end_task(task, lambda own=own: (values[own], labels[own], own))
    assert "task 2: a class has a single image" in caplog.text
    assert learner.report(TASKS[1]) == {"correction": [1.0, 0.0]}
