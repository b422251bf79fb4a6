"""iCaRL: its loss against hand values, exemplars, and the nearest mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.icarl import ICaRLConfig, distilled_cross_entropy

TASKS = (Task(0, (0, 1), (0, 1), 2, num_planned_classes=4), Task(1, (2, 3), (2, 3), 4, num_planned_classes=4))
IMAGES = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 4


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("logits", "is_hard", "label", "expected"),
    [
        ([0, 1, 2], [0, 0, 1], 2, 0.621465),  # over the seen columns
        ([0, 1, 2, -1], [0, 0, 1, 1], 2, 0.544414),  # and an unseen one
        ([0, 1, 2], [0, 0, 1], 0, 1.288132),  # an exemplar of an old class has the soft target alone
    ],
)
def test_distilled_cross_entropy__has_the_golden_values(
    logits: list[float], is_hard: list[float], label: int, expected: float
) -> None:
    loss = distilled_cross_entropy(
        rows(logits), torch.tensor([label]), soft=rows([1, -1]), is_hard=torch.tensor(is_hard).double()
    )
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_distilled_cross_entropy__of_the_first_task_is_plain() -> None:
    logits, labels = torch.randn(5, 3), torch.tensor([0, 1, 2, 1, 0])
    plain = F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, 3).float(), reduction="none").mean(1)
    found = distilled_cross_entropy(logits, labels, soft=None, is_hard=torch.ones(3))
    torch.testing.assert_close(found, plain)


def features_of(learner: Learner, task: Task) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    own = [row for row in range(24) if int(LABELS[row]) in task.classes]

    def features(
        wanted: Sequence[int] | None = None, transform: Literal["eval", "flip", "weak"] = "eval"
    ) -> tuple[Tensor, Tensor, Tensor]:
        chosen = torch.tensor(own if wanted is None else list(wanted))
        images = IMAGES[chosen].flip(-1) if transform == "flip" else IMAGES[chosen]
        return learner.query(images), LABELS[chosen], chosen

    return features


def after_both_tasks(learner: Learner) -> Learner:
    for task in TASKS:
        learner.begin_task(task)
        learner.eval().end_task(task, features_of(learner, task))
    return learner


def test_icarl__teaches_by_the_network_before_the_task(build: Callable[..., Learner]) -> None:
    learner = build("icarl", capacity=8)
    learner.begin_task(TASKS[0])
    learner.end_task(TASKS[0], features_of(learner, TASKS[0]))
    before = learner.head(learner.query(IMAGES[:3]))
    learner.begin_task(TASKS[1])
    learner.train()
    assert not any(module.training for module in learner.teacher.modules())
    with torch.no_grad():
        for parameter in learner.backbone.parameters():
            parameter.add_(0.1)
    torch.testing.assert_close(learner.teacher(IMAGES[:3]), before)
    output = learner(IMAGES[:3], torch.tensor([2, 3, 0]))
    assert output.logits.shape == (3, 4)
    expected = distilled_cross_entropy(
        output.logits, torch.tensor([2, 3, 0]), soft=before, is_hard=torch.tensor([0.0, 0, 1, 1])
    )
    torch.testing.assert_close(output.supervised, expected)


def test_icarl__of_domains_labels_all_classes_of_the_domain(build: Callable[..., Learner]) -> None:
    learner = build("icarl")
    learner.begin_task(Task(0, (0, 1, 2), (0, 1, 2), 3, "photo"))
    learner.begin_task(Task(1, (0, 2, 3), (3,), 4, "sketch"))
    assert learner.is_hard.tolist() == [1, 0, 1, 1]


def test_icarl__keeps_exemplars_of_every_class_and_their_means(build: Callable[..., Learner]) -> None:
    learner = after_both_tasks(build("icarl", capacity=8))
    assert learner.exemplars.per_class() == {0: 2, 1: 2, 2: 2, 3: 2}
    held = learner.rehearsed_rows()
    for label in range(4):
        own = held[LABELS[held] == label]
        both = [
            F.normalize(learner.query(images), dim=1).mean(0)
            for images in (IMAGES[own], IMAGES[own].flip(-1))
        ]
        mean = F.normalize(sum(F.normalize(each, dim=0) for each in both), dim=0)
        torch.testing.assert_close(learner.class_means[label], mean, atol=1e-5, rtol=0)
    scores = learner.predict(IMAGES)
    vectors = F.normalize(learner.query(IMAGES), dim=1)
    torch.testing.assert_close(scores, -torch.cdist(vectors, learner.class_means).square(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("normalize", "expected"), [(True, 0), (False, 1)])
def test_icarl__nearest_mean_depends_on_normalisation(
    build: Callable[..., Learner], normalize: bool, expected: int
) -> None:
    """The golden case: x = [2, .5] lies nearer to [1, 1], but points to where [4, 0] lies."""
    learner = build("icarl", normalize=normalize)
    learner.begin_task(TASKS[0])
    width = learner.backbone.width
    means = F.pad(torch.tensor([[4.0, 0], [1, 1]]), (0, width - 2))
    learner.class_means = F.normalize(means, dim=1) if normalize else means
    query = F.pad(torch.tensor([[2.0, 0.5]]), (0, width - 2))
    scores = learner.predict(IMAGES[:1], query)
    assert int(scores.argmax()) == expected
    values = {True: [-0.0597, -0.2850], False: [-4.25, -1.25]}[normalize]
    assert scores[0].tolist() == pytest.approx(values, abs=1e-4)


def test_icarl__without_a_buffer_predicts_by_its_head(build: Callable[..., Learner]) -> None:
    with pytest.raises(ValidationError, match="classifier"):
        ICaRLConfig(capacity=0)
    learner = after_both_tasks(build("icarl", capacity=0, classifier="linear"))
    torch.testing.assert_close(learner.predict(IMAGES), learner.head(learner.query(IMAGES)))
    assert len(learner.rehearsed_rows()) == 0


def test_icarl__averages_over_all_planned_columns_if_told_so(build: Callable[..., Learner]) -> None:
    learner = build("icarl", all_columns=True)
    learner.begin_task(TASKS[0])
    output = learner(IMAGES[:2], LABELS[:2])
    assert output.logits.shape == (2, 2)
    logits = learner.head(learner.backbone.features(IMAGES[:2]))
    expected = F.binary_cross_entropy_with_logits(logits, F.one_hot(LABELS[:2], 4).float(), reduction="none")
    torch.testing.assert_close(output.supervised, expected.mean(1))
