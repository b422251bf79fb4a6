"""The cosine to class means, computed by hand in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner


def cosines(features: Tensor, means: list[Tensor]) -> Tensor:
    """Return (N, classes) in float64, written with plain sums."""
    rows = [
        [float((row * mean).sum() / (row * row).sum().sqrt() / (mean * mean).sum().sqrt()) for mean in means]
        for row in features.double()
    ]
    return torch.tensor(rows, dtype=torch.float64)


def test_nearest_mean__scores_are_cosines_to_class_means(
    build: Callable[..., Learner], given_features: Any
) -> None:
    learner = build("nearest_mean")
    generator = torch.Generator().manual_seed(3)
    all_values, all_labels = [], []
    for task in (Task(0, (0, 1), (0, 1), 2), Task(1, (2,), (2,), 3)):
        labels = [
            k for k in task.classes for _ in range(4 + 3 * k)
        ]  # sizes differ: a sum over all would not do
        values = torch.randn(len(labels), 48, generator=generator) + torch.tensor(labels)[:, None]
        learner.begin_task(task)
        given = given_features(values, labels)
        learner.end_task(task, given)
        assert given.transforms == ["eval"]
        all_values.append(values.double())
        all_labels += labels
    values, labels = torch.cat(all_values), torch.tensor(all_labels)
    images = torch.randn(5, 3, 32, 32, generator=generator)
    query = learner.query(images)
    expected = cosines(query, [values[labels == k].mean(0) for k in range(3)])
    scores = learner.predict(images)
    torch.testing.assert_close(scores.double(), expected, atol=1e-6, rtol=0)
    assert torch.equal(learner.predict(images, query), scores)


def test_nearest_mean__takes_the_mean_over_all_domains(
    build: Callable[..., Learner], given_features: Any
) -> None:
    learner = build("nearest_mean")
    generator = torch.Generator().manual_seed(4)
    first, second = torch.randn(6, 48, generator=generator), torch.randn(3, 48, generator=generator)
    tasks = [Task(0, (0, 1), (0, 1), 2, "photo"), Task(1, (1, 2), (2,), 3, "sketch")]
    for task, values, labels in zip(tasks, (first, second), ([0, 1, 1, 1, 0, 1], [2, 1, 2]), strict=True):
        learner.begin_task(task)
        learner.end_task(task, given_features(values, labels))
    means = [
        first[[0, 4]].double().mean(0),
        torch.cat([first[[1, 2, 3, 5]], second[[1]]]).double().mean(0),
        second[[0, 2]].double().mean(0),
    ]
    query = torch.randn(4, 48, generator=generator)
    scores = learner.predict(torch.zeros(4, 3, 32, 32), query)
    torch.testing.assert_close(scores.double(), cosines(query, means), atol=1e-6, rtol=0)


def test_nearest_mean__sums_in_double_precision(build: Callable[..., Learner], given_features: Any) -> None:
    learner = build("nearest_mean")
    task = Task(0, (0,), (0,), 1)
    learner.begin_task(task)
    values = torch.full((3, 48), 1.0)
    values[0], values[2] = 2.0**26, -(2.0**26)  # in float32 the 1 between them would be lost
    learner.end_task(task, given_features(values, [0, 0, 0]))
    assert learner.statistics_of(task)["sum"].tolist() == [[1.0] * 48]


def test_nearest_mean__trains_nothing(build: Callable[..., Learner]) -> None:
    learner = build("nearest_mean")
    learner.begin_task(Task(0, (0, 1), (0, 1), 2))
    assert learner.parameter_groups() == []
    assert not any(parameter.requires_grad for parameter in learner.parameters())
    output = learner(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))
    assert output.logits.tolist() == [[0, 0], [0, 0]]  # no mean is known yet: no class is nearer


def test_nearest_mean__cosines_are_not_rounded_by_autocast(
    build: Callable[..., Learner], given_features: Any
) -> None:
    learner = build("nearest_mean")
    task = Task(0, (0, 1), (0, 1), 2)
    learner.begin_task(task)
    generator = torch.Generator().manual_seed(5)
    learner.end_task(task, given_features(torch.randn(6, 48, generator=generator), [0, 1, 1, 1, 0, 1]))
    images, query = torch.zeros(4, 3, 32, 32), torch.randn(4, 48, generator=generator)
    expected = learner.predict(images, query)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(learner.predict(images, query), expected)
        assert learner.predict(images, query.bfloat16()).dtype == torch.float32
