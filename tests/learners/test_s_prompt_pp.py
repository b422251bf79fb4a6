"""S-Prompt++ is DualPrompt without general prefixes, on the first blocks.

Shapes: N images, D width (48).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded

Build = Callable[..., Learner]
Train = Callable[..., Learner]

TASKS = tuple(
    Task(index, (2 * index, 2 * index + 1), (2 * index, 2 * index + 1), 2 * index + 2) for index in range(3)
)
SMALL: dict[str, Any] = {"expert_blocks": [0, 1], "expert_length": 3}


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def learner(build: Build, images: Tensor) -> Learner:
    """In its third task; the keys are the queries of images 0, 1 and 2, less what all queries share."""
    learner = build("s_prompt_pp", transfer_prompts=False, **SMALL)
    with seeded(1):
        for task in TASKS:
            learner.begin_task(task)
    queries = learner.query(images)
    with torch.no_grad():
        for key, query in zip(learner.experts.keys, queries, strict=False):
            key.copy_(query - queries.mean(0))
    return learner


def scores(learner: Learner, images: Tensor, task_index: int) -> Tensor:
    """Return the logits (N, seen) with one task's expert."""
    expert = learner.experts.prefixes[task_index]
    features = learner.backbone.encode(images, prefixes={0: expert[0][None], 1: expert[1][None]})[:, 0]
    return torch.cat([features @ head.weight.T + head.bias for head in learner.heads.tasks], dim=1)


def test_s_prompt_pp__trains_with_the_task_s_own_expert(learner: Learner, images: Tensor) -> None:
    output = learner(images, torch.full((5,), 5))
    assert output.columns.tolist() == [4, 5]
    torch.testing.assert_close(output.logits, scores(learner, images, 2)[:, 4:], atol=1e-6, rtol=0)
    query, key = learner.query(images).double(), learner.experts.keys[2].detach().double()
    cosine = (query * key).sum(1) / ((query**2).sum(1).sqrt() * (key**2).sum().sqrt())
    assert list(output.auxiliary) == ["pull"]
    torch.testing.assert_close(output.auxiliary["pull"].double(), -cosine, atol=1e-6, rtol=0)
    assert [group.name for group in learner.parameter_groups()] == ["experts", "keys", "heads"]


def test_s_prompt_pp__predicts_with_the_nearest_expert_of_each_image(
    learner: Learner, images: Tensor
) -> None:
    predicted = learner.predict(images)
    for row in range(3):
        expected = scores(learner, images, row)[row]
        torch.testing.assert_close(predicted[row], expected, atol=1e-6, rtol=0)
        assert not torch.isclose(expected, scores(learner, images, (row + 1) % 3)[row], atol=1e-4).all()


def test_s_prompt_pp__a_known_task_has_its_own_expert(learner: Learner, images: Tensor) -> None:
    for task in TASKS:
        expected = scores(learner, images, task.index)[:, list(task.classes)]
        torch.testing.assert_close(learner.predict_task(images, task), expected, atol=1e-6, rtol=0)


def test_s_prompt_pp__pull_has_a_weight(build: Build, images: Tensor) -> None:
    pulls = []
    for weight in (1.0, 0.25):
        learner = build("s_prompt_pp", pull_weight=weight, **SMALL)
        with seeded(0):
            learner.begin_task(TASKS[0])
        pulls.append(learner(images, torch.zeros(5, dtype=torch.long)).auxiliary["pull"])
    torch.testing.assert_close(0.25 * pulls[0], pulls[1], atol=1e-7, rtol=0)


@pytest.mark.parametrize("is_on", [True, False])
def test_s_prompt_pp__transfers_experts_and_freezes_finished_ones(
    build: Build, train: Train, is_on: bool
) -> None:
    learner = build("s_prompt_pp", transfer_prompts=is_on, **SMALL)
    train(learner, TASKS[0])
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    learner.begin_task(TASKS[1])
    assert torch.equal(*learner.experts.prefixes) == is_on
    assert not torch.equal(*learner.experts.keys)
    train(learner, TASKS[1])
    after = learner.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not torch.equal(*learner.experts.prefixes)


def test_s_prompt_pp__refuses_blocks_that_are_not_there(build: Build) -> None:
    message = r"learner.expert_blocks: \[1, 2\] must be different blocks of the backbone, which are 0 to 1"
    with pytest.raises(UsageError, match=message):
        build("s_prompt_pp", expert_blocks=[1, 2])
