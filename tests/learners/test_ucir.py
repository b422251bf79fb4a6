"""UCIR: cosines, directions of features, and a margin for images of earlier classes."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.ucir import missing_margin

TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3, 4), (2, 3, 4), 5))


def test_missing_margin__compares_an_old_class_with_its_nearest_new_ones() -> None:
    cosines = torch.tensor([[0.9, 0.0, 0.3, 0.5, -0.2], [0.1, 0.9, 0.8, 0.7, 0.6], [0.9, 0.9, 0.1, 0.2, 0.3]])
    found = missing_margin(cosines, torch.tensor([0, 1, 2]), num_known=2, margin=0.5, num_rivals=2)
    # 0.5 - 0.9 + 0.5 and nothing; 0.5 - 0.9 + 0.8 and + 0.7; a new class counts nothing.
    torch.testing.assert_close(found, torch.tensor([0.05, 0.35, 0.0]))
    one = missing_margin(cosines[:, :3], torch.tensor([0, 1, 2]), num_known=2, margin=0.5, num_rivals=2)
    torch.testing.assert_close(one, torch.tensor([0.0, 0.4, 0.0]))


def test_ucir__weighs_the_change_of_direction_by_the_numbers_of_classes(
    build: Callable[..., Learner],
) -> None:
    learner = build("ucir", capacity=0)
    images, labels = torch.randn(3, 3, 32, 32), torch.tensor([0, 3, 1])
    learner.begin_task(TASKS[0])
    assert learner(images, torch.tensor([0, 1, 0])).auxiliary == {}
    learner.end_task(TASKS[0], lambda: None)
    before, row = learner.query(images), learner.head.weight.detach().clone()
    learner.begin_task(TASKS[1])
    assert torch.equal(learner.head.known, row)
    with torch.no_grad():
        learner.backbone.vit.norm.bias.add_(0.5)
    output = learner(images, labels)
    features = learner.backbone.features(images)
    expected = 5 * math.sqrt(2 / 3) * (1 - F.cosine_similarity(features, before))
    torch.testing.assert_close(output.auxiliary["direction"], expected)
    cosines = F.normalize(features, dim=1) @ F.normalize(learner.head.rows, dim=1).T
    torch.testing.assert_close(output.logits, learner.head.scale * cosines)
    torch.testing.assert_close(
        output.auxiliary["margin"],
        missing_margin(cosines, labels, num_known=2, margin=0.5, num_rivals=2),
    )


def test_ucir__gives_rows_of_new_classes_the_direction_of_their_mean_features(
    build: Callable[..., Learner],
) -> None:
    learner = build("ucir", capacity=0)
    learner.begin_task(TASKS[0])
    learner.prepare_task(TASKS[0], lambda: None)  # the first rows are drawn: nothing is looked at
    learner.end_task(TASKS[0], lambda: None)
    learner.begin_task(TASKS[1])
    before = learner.head.rows.detach().clone()
    width = before.shape[1]
    values = torch.zeros(3, width)
    values[0, 0], values[1, 1], values[2, 2] = 2.0, 5.0, 1.0
    learner.prepare_task(TASKS[1], lambda: (values, torch.tensor([2, 2, 3]), torch.arange(3)))
    after = learner.head.rows.detach()
    norm = before[:2].norm(dim=1).mean()
    expected = torch.zeros(2, width)
    expected[0, :2], expected[1, 2] = norm / math.sqrt(2), norm  # lengths of features do not count
    torch.testing.assert_close(after[2:4], expected)
    assert torch.equal(after[[0, 1, 4]], before[[0, 1, 4]])  # one class has no image here


def test_ucir__decay_leaves_the_rows_of_earlier_classes(build: Callable[..., Learner]) -> None:
    learner = build("ucir", capacity=0)
    for task in TASKS:
        learner.begin_task(task)
        before = learner.head.rows.detach().clone()
        parameters = [each for group in learner.parameter_groups() for each in group.parameters]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            learner(torch.randn(3, 3, 32, 32), torch.tensor(task.classes[:1] * 3)).logits.sum().backward()
            optimizer.step()
        if task.index == 0:
            learner.end_task(task, lambda: None)
    after = learner.head.rows.detach()
    assert torch.equal(after[:2], before[:2])
    assert not bool((after[2:] == before[2:]).all(1).any())


def test_ucir__the_change_of_direction_is_not_rounded_by_autocast(build: Callable[..., Learner]) -> None:
    learner = build("ucir", capacity=0)
    learner.begin_task(TASKS[0])
    learner.end_task(TASKS[0], lambda: None)
    learner.begin_task(TASKS[1])
    features = torch.randn(2, learner.backbone.width)
    taught = features + 0.05 * torch.randn_like(features)
    learner.teacher.forward = lambda images: taught.bfloat16()
    learner.backbone.features = lambda images: features.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = learner(torch.zeros(2, 3, 32, 32), torch.tensor([2, 3])).auxiliary["direction"]
    cosine = F.cosine_similarity(features.bfloat16().double(), taught.bfloat16().double())
    torch.testing.assert_close(found.double(), 5 * math.sqrt(2 / 3) * (1 - cosine), rtol=1e-3, atol=0)
