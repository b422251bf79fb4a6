"""What the base class does for all methods."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner, LearnerConfig, TaskStatistics

FIRST, SECOND = Task(0, (0, 1), (0, 1), 2), Task(1, (2,), (2,), 3)


@pytest.fixture(name="learner")
def bare_learner(tiny_backbone: PromptableViT) -> Learner:
    return Learner(copy.deepcopy(tiny_backbone), LearnerConfig(name="bare"), num_tasks=2)


def test_learner__starts_frozen_and_empty(learner: Learner) -> None:
    assert learner.backbone_is_frozen
    assert learner.num_seen_classes == 0
    assert learner.tasks == []
    learner.begin_task(FIRST)
    learner.begin_task(SECOND)
    assert learner.task == SECOND
    assert learner.num_seen_classes == 3


def test_learner__keeps_only_a_frozen_backbone_in_eval_mode(learner: Learner) -> None:
    learner.head = nn.Linear(2, 2)
    assert learner.train() is learner
    assert learner.training
    assert learner.head.training
    assert not learner.backbone.training
    learner.backbone.vit.pos_embed.requires_grad_(True)
    assert not learner.backbone_is_frozen
    assert learner.train().backbone.training
    assert not learner.eval().backbone.training
    assert not learner.head.training


def test_learner__query_is_the_backbone_s_class_token(learner: Learner) -> None:
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        expected = learner.backbone.vit.eval().forward_features(images)[:, 0]
    torch.testing.assert_close(learner.query(images), expected, atol=1e-6, rtol=0)


def test_task_statistics__keep_contiguous_copies() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    statistics = TaskStatistics({"flipped": values.T, "row": values[0]})
    values.zero_()
    assert statistics.flipped.is_contiguous()
    assert statistics.flipped.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert statistics.row.tolist() == [0, 1, 2]
    assert list(statistics.state_dict()) == ["flipped", "row"]
    assert not list(statistics.parameters())


def test_learner__makes_room_for_the_statistics_of_a_finished_task(learner: Learner) -> None:
    learner.begin_task(FIRST)
    assert learner.statistics_of(FIRST) == {}
    learner.statistics["0"] = TaskStatistics({"mean": torch.ones(4), "factor": torch.ones(0, 4)})
    shapes = {name: tensor.shape for name, tensor in learner.statistics_of(FIRST).items()}

    other = Learner(copy.deepcopy(learner.backbone), learner.config, num_tasks=2)
    other.begin_task(FIRST)
    other.allocate(FIRST, shapes)
    other.begin_task(SECOND)
    other.allocate(SECOND, {})  # this task left nothing behind
    assert list(other.statistics) == ["0"]
    other.load_state_dict(learner.state_dict())
    assert other.statistics_of(FIRST)["mean"].tolist() == [1, 1, 1, 1]


def test_learner__leaves_to_the_method_what_only_it_can_say(learner: Learner) -> None:
    images, labels = torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.long)
    with pytest.raises(NotImplementedError):
        learner(images, labels)
    with pytest.raises(AttributeError, match="head"):
        learner.predict(images)
    assert learner.statistics_size([5, 5]) == 0
    assert learner.parameter_groups() == []  # nothing of it is trained


def test_parameter_groups__are_the_modules_that_are_trained(learner: Learner) -> None:
    learner.backbone.requires_grad_(True)
    learner.head = nn.Linear(4, 2)
    learner.teacher = nn.Linear(4, 2).requires_grad_(False)
    learner.head.bias.requires_grad_(False)
    groups = {group.name: group for group in learner.parameter_groups()}
    assert list(groups) == ["backbone", "head"]
    assert groups["backbone"].parameters == list(learner.backbone.parameters())
    assert groups["head"].parameters == [learner.head.weight]
    assert {group.learning_rate_scale for group in groups.values()} == {1.0}
