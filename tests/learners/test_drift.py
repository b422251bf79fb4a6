"""Drift compensation: what is held, and Gaussians that follow the features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from vbm_ptm.class_statistics import transport
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.alignment import gaussians_of
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.drift import Drift, DriftConfig
from vbm_ptm.learners.slca import SLCAConfig

Build = Callable[..., Learner]
TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3), (2, 3), 4), Task(2, (4,), (4,), 5))


def features_of(task: Task, *, seed: int) -> tuple[torch.Tensor, list[int]]:
    labels = [class_index for class_index in task.classes for _ in range(4)]
    noise = torch.randn(len(labels), 48, generator=torch.Generator().manual_seed(seed))
    return F.one_hot(torch.tensor(labels), 48) * 5 + noise, labels


def test_drift__is_held_while_a_task_is_trained_and_restored_with_it() -> None:
    drift, restored = Drift(), Drift()
    before, after = torch.randn(7, 3), torch.randn(7, 3)
    assert drift.finish(after) == {}
    drift.hold(before)
    restored.load_state_dict(drift.state_dict())
    assert torch.equal(restored.earlier, before)
    for each in (drift, restored):
        assert torch.equal(each.finish(after)["transport"], transport(before, after).float())
        assert each.earlier.numel() == 0
    restored.load_state_dict(drift.state_dict())
    assert drift.finish(after) == {}


def test_drift__is_off_by_default_and_refuses_axes_that_cannot_turn() -> None:
    assert SLCAConfig().drift == "none"
    assert SLCAConfig(drift="linear", covariance="shared").drift == "linear"
    with pytest.raises(ValueError, match="covariance 'diagonal'"):
        SLCAConfig(drift="linear", covariance="diagonal")
    assert issubclass(SLCAConfig, DriftConfig)


@pytest.mark.parametrize("name", ["slca", "slca_pp"])
def test_learner__older_gaussians_follow_the_features_of_every_later_task(
    build: Build, train: Any, given_features: Any, name: str
) -> None:
    learner, still = (build(name, drift=drift, alignment_epochs=1) for drift in ("linear", "none"))
    moves = []
    for task in TASKS:
        before, labels = features_of(task, seed=2 * task.index)
        after, _ = features_of(task, seed=2 * task.index + 1)
        for each in (learner, still):
            each.begin_task(task)
            each.prepare_task(task, given_features(before, labels))
            train(each, task)
            each.end_task(task, given_features(after, labels))
        moves.append(transport(before, after).float())
    moved, kept = gaussians_of(learner), gaussians_of(still)
    assert moved.classes.tolist() == kept.classes.tolist() == [0, 1, 2, 3, 4]
    for number, first in enumerate((0, 0, 1, 1, 2)):
        mean, factor = kept.means[number], kept.factors[number]
        for move in moves[first + 1 :]:
            mean, factor = mean @ move, factor @ move
        torch.testing.assert_close(moved.means[number], mean, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(moved.factors[number], factor, atol=1e-5, rtol=1e-5)
    assert [sorted(set(learner.statistics_of(task)) - set(still.statistics_of(task))) for task in TASKS] == [
        [],
        ["transport"],
        ["transport"],
    ]
    assert learner.statistics_size([4]) - still.statistics_size([4]) == 48**2
