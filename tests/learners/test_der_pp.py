"""DER++: one draw for the remembered logits, another for the labels, three forward passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.objective import ObjectiveConfig, PartSize, ViewBatchObjective
from vbm_ptm.learners.base import Learner
from vbm_ptm.replay import Replay

FIRST = Task(0, (0, 1, 2), (0, 1, 2), 3)


def test_der_pp__has_the_golden_loss(build: Callable[..., Learner]) -> None:
    """Given logits in place of a network: 0.395495 + 0.1 * 0.666667 + 0.5 * 1.551445."""
    learner = build("der_pp", capacity=2, alpha=0.1, beta=0.5)
    learner.begin_task(FIRST)
    learner.remember(torch.tensor([1]), torch.tensor([[1.0, 0, 0]]))
    given = {2: torch.tensor([[2.0, 0, 0], [0, 1, 0]]), 1: torch.tensor([[0.0, 0, 1]])}
    learner._logits = lambda images: given[len(images)]  # type: ignore[method-assign]
    image = torch.zeros(1, 3, 32, 32)
    replay = Replay(image, torch.tensor([0]), torch.tensor([1]))
    labels = torch.tensor([0, 1])
    output = learner(torch.zeros(2, 3, 32, 32), labels, (replay, replay))
    loss, parts = ViewBatchObjective(ObjectiveConfig())(
        output, labels, num_views=1, num_global_groups=2, replays=[PartSize(1, 1), PartSize(1, 1)]
    )
    assert parts["dark"].item() == pytest.approx(0.0666667, abs=1e-6)
    assert parts["replay"].item() == pytest.approx(0.5 * 1.551445, abs=1e-6)
    assert loss.item() == pytest.approx(1.237884, abs=1e-5)


def test_der_pp__looks_at_its_two_draws_apart(build: Callable[..., Learner]) -> None:
    learner = build("der_pp", capacity=3)
    learner.begin_task(FIRST)
    features, sizes = learner.backbone.features, []
    learner.backbone.features = lambda batch: sizes.append(len(batch)) or features(batch)
    draws = tuple(
        Replay(torch.randn(count, 3, 32, 32), torch.zeros(count, dtype=torch.int64), torch.arange(count))
        for count in (1, 2)
    )
    output = learner(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0]), draws)
    assert sizes == [4, 1, 2]
    logits = learner.head(features(draws[1].images))
    torch.testing.assert_close(
        output.replays[1].terms["replay"], 0.5 * F.cross_entropy(logits, draws[1].labels, reduction="none")
    )
    assert learner.rehearsal.draws == 2
    assert learner(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 0])).replays == ()
