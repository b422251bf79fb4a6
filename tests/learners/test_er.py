"""Experience replay: one cross-entropy over current and past images, over all columns of the run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.replay import Replay

FIRST = Task(0, (0, 1), (0, 1), 2, num_planned_classes=6)


def test_er__has_a_column_for_every_planned_class(build: Callable[..., Learner]) -> None:
    learner = build("er")
    learner.begin_task(FIRST)
    images, labels = torch.randn(3, 3, 32, 32), torch.tensor([0, 1, 0])
    output = learner(images, labels)
    assert output.logits.shape == (3, 6)
    assert output.columns.tolist() == list(range(6))
    assert learner.predict(images).shape == (3, 2)
    torch.testing.assert_close(output.supervised, F.cross_entropy(output.logits, labels, reduction="none"))
    assert output.replays == ()


def test_er__keeps_its_columns_when_more_classes_come_than_planned(build: Callable[..., Learner]) -> None:
    learner = build("er")
    learner.begin_task(FIRST)
    before = learner.head.weight.detach().clone()
    learner.begin_task(Task(1, (2, 3, 4, 5, 6, 7), (2, 3, 4, 5, 6, 7), 8))
    assert learner.head.weight.shape[0] == 8
    assert torch.equal(learner.head.weight[:6], before)


def test_er__sees_current_and_past_images_in_one_pass(build: Callable[..., Learner]) -> None:
    learner = build("er")
    learner.begin_task(FIRST)
    images, past = torch.randn(3, 3, 32, 32), torch.randn(2, 3, 32, 32)
    labels, known = torch.tensor([0, 1, 0]), torch.tensor([5, 4])
    calls = []
    learner.backbone.register_forward_pre_hook(lambda module, inputs: calls.append(inputs))
    features = learner.backbone.features
    sizes: list[int] = []
    learner.backbone.features = lambda batch: sizes.append(len(batch)) or features(batch)
    output = learner(images, labels, (Replay(past, known, torch.tensor([7, 9])),))
    assert sizes == [5]  # batch norm would see both kinds together
    logits = learner.head(features(torch.cat([images, past])))
    torch.testing.assert_close(
        output.supervised, F.cross_entropy(logits, torch.cat([labels, known]), reduction="none")
    )
    torch.testing.assert_close(output.logits, logits[:3])
    torch.testing.assert_close(output.replays[0].logits, logits[3:])
