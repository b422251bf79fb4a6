"""LwF-MC: iCaRL's loss without exemplars."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded

TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3), (2, 3), 4), Task(2, (0, 4), (4,), 5, "sketch"))


def test_lwf_mc__is_icarl_without_exemplars(build: Callable[..., Learner]) -> None:
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])
    found = []
    for learner in (build("lwf_mc"), build("icarl", capacity=0, classifier="linear")):
        losses = []
        for task in TASKS:
            with seeded(task.index):
                learner.begin_task(task)
            with torch.no_grad():
                learner.head.weight.mul_(1 + task.index)
            output = learner(images, torch.tensor(task.classes)[labels])
            losses += [output.supervised, output.logits]
            learner.end_task(task, lambda: None)
        found.append([*losses, learner.predict(images), *learner.state_dict().values()])
    assert all(torch.equal(one, two) for one, two in zip(*[each[:7] for each in found], strict=True))
    assert not [name for name in build("lwf_mc").state_dict() if "exemplars" in name]
