"""Drift compensation: what is held, and Gaussians that follow the features."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from vbm_ptm.class_statistics import gaussian_factor
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.alignment import gaussians_of
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.drift import Drift, DriftConfig, transport
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


def test_transport__equals_the_reference() -> None:
    golden = load_file(Path(__file__).parents[1] / "golden2" / "sldc.safetensors")
    options = {"ridge": float(golden["gamma"]), "alpha": float(golden["alpha"])}
    moved = transport(golden["before"], golden["after"], **options)
    torch.testing.assert_close(moved, golden["operator"], atol=1e-12, rtol=1e-10)
    share = float(golden["identity_share"])
    solved = (moved - share * torch.eye(4).double()) / (1 - share)
    torch.testing.assert_close(solved, golden["solved"], atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(golden["old.mean"] @ moved, golden["new.mean"], atol=1e-12, rtol=1e-10)
    factor = golden["old.factor"] @ moved
    torch.testing.assert_close(factor, golden["new.factor"], atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(factor.T @ factor, golden["new.covariance"], atol=1e-12, rtol=1e-10)


def test_transport__matches_hand_values() -> None:
    """One dimension: all rows are 1 once they are divided by their lengths, so that the solution is 2 / (2 + 1e-4)."""
    before, after = torch.tensor([[1.0], [2.0]]), torch.tensor([[2.0], [2.0]])
    share = math.exp(-2)
    assert transport(before, after).item() == pytest.approx((1 - share) * 2 / 2.0001 + share, abs=1e-12)


def test_transport__of_features_that_stay_is_the_identity() -> None:
    rows = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(transport(rows, rows), torch.eye(6).double(), atol=1e-4, rtol=0)
    torch.testing.assert_close(transport(rows, 3 * rows), torch.eye(6).double(), atol=1e-4, rtol=0)
    turn = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(1))).Q
    share = math.exp(-40 / 6)
    expected = (1 - share) * turn.double() + share * torch.eye(6)
    torch.testing.assert_close(transport(rows, rows @ turn), expected, atol=1e-4, rtol=0)


def test_transport__moves_a_factor_as_its_covariance() -> None:
    generator = torch.Generator().manual_seed(2)
    features, old, new = (torch.randn(9, 4, generator=generator) for _ in range(3))
    _, factor = gaussian_factor(features)
    moved = transport(old, new)
    covariance = moved.T @ torch.cov(features.double().T) @ moved
    torch.testing.assert_close((factor @ moved).T @ (factor @ moved), covariance, atol=1e-10, rtol=0)
