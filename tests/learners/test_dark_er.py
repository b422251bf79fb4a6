"""Dark-ER: held to remembered logits, each kind of image in a forward pass of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.replay import Replay

FIRST = Task(0, (0, 1), (0, 1), 2, num_planned_classes=4)


def test_dark_er__is_held_to_the_logits_of_the_slots(build: Callable[..., Learner]) -> None:
    learner = build("dark_er", capacity=5, alpha=0.3)
    learner.begin_task(FIRST)
    images, past = torch.randn(3, 3, 32, 32), torch.randn(2, 3, 32, 32)
    remembered = torch.randn(2, 4)
    learner.remember(torch.tensor([4, 1]), remembered)
    features, sizes = learner.backbone.features, []
    learner.backbone.features = lambda batch: sizes.append(len(batch)) or features(batch)
    replay = Replay(past, torch.tensor([0, 1]), torch.tensor([1, 4]))
    output = learner(images, torch.tensor([0, 1, 0]), (replay,))
    assert sizes == [3, 2]
    recalled = learner.head(features(past))
    expected = 0.3 * (recalled - remembered[[1, 0]]).square().mean(1)
    torch.testing.assert_close(output.replays[0].terms["dark"], expected)
    assert output.supervised is None
    assert output.logits.shape == (3, 4)
    assert learner.predict(images).shape == (3, 2)
    assert learner.rehearsal.draws == 1
    assert learner.rehearsal.remembers_logits
