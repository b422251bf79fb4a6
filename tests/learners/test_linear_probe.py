"""The linear probe is logistic regression on frozen features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded

TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3, 4), (2, 3, 4), 5))


def test_linear_probe__is_a_linear_layer_on_the_class_token(build: Callable[..., Learner]) -> None:
    learner = build("linear_probe")
    for task in TASKS:
        learner.begin_task(task)
    images = torch.randn(4, 3, 32, 32)
    with torch.no_grad():
        features = learner.backbone.vit.eval().forward_features(images)[:, 0]
    expected = torch.cat([features @ head.weight.T + head.bias for head in learner.heads.tasks], dim=1)
    torch.testing.assert_close(learner.predict(images), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(learner.predict(images, 2 * features), 2 * expected, atol=1e-6, rtol=0)
    output = learner(images, torch.tensor([2, 3, 4, 2]))
    assert output.columns.tolist() == [2, 3, 4]
    assert output.auxiliary == {}
    torch.testing.assert_close(output.logits, expected[:, 2:], atol=1e-6, rtol=0)


def test_linear_probe__equals_a_plain_loop_over_features(
    build: Callable[..., Learner], train: Callable[..., Learner]
) -> None:
    learner = build("linear_probe")
    backbone = {name: tensor.clone() for name, tensor in learner.backbone.state_dict().items()}
    heads = []
    for task in TASKS:
        train(learner, task, optimizer="sgd")
        generator = torch.Generator().manual_seed(task.index)
        features = learner.query(torch.randn(6, 3, 32, 32, generator=generator))
        with seeded(task.index):
            head = torch.nn.Linear(48, len(task.classes))
            torch.nn.init.zeros_(head.bias)
        with seeded(task.index):
            torch.nn.init.trunc_normal_(head.weight, std=0.02)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.02, momentum=0.9, weight_decay=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(head(features), torch.arange(6) % len(task.classes)).backward()
            optimizer.step()
        heads.append(head)
    for head, own in zip(heads, learner.heads.tasks, strict=True):
        torch.testing.assert_close(own.weight, head.weight, atol=1e-7, rtol=0)
        torch.testing.assert_close(own.bias, head.bias, atol=1e-7, rtol=0)
    assert all(torch.equal(tensor, backbone[name]) for name, tensor in learner.backbone.state_dict().items())


def test_linear_probe__freezes_the_heads_of_finished_tasks(
    build: Callable[..., Learner], train: Callable[..., Learner]
) -> None:
    learner = train(build("linear_probe"), TASKS[0])
    before = learner.heads.tasks[0].weight.clone()
    train(learner, TASKS[1])
    assert torch.equal(learner.heads.tasks[0].weight, before)
    assert [group.name for group in learner.parameter_groups()] == ["heads"]
    assert learner.parameter_groups()[0].parameters == list(learner.heads.tasks[1].parameters())
