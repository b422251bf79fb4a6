"""CODA-Prompt: prefixes from weighted components, a share of the pool for each task, growth beyond the plan.

Shapes: N images, D width, M components, L tokens of a prompt.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.learners import create_learner
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded

Build = Callable[..., Learner]
Train = Callable[..., Learner]

TASKS = tuple(
    Task(index, (2 * index, 2 * index + 1), (2 * index, 2 * index + 1), 2 * index + 2) for index in range(8)
)
SMALL: dict[str, Any] = {"pool_size": 12, "prompt_length": 4, "blocks": [0, 1]}


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def wide_learner(num_tasks: int) -> Learner:
    """Return a learner with the official pool on a backbone of width 144."""
    with seeded(0):
        backbone = PromptableViT(
            VisionTransformer(img_size=32, patch_size=16, embed_dim=144, depth=1, num_heads=1, num_classes=0)
        )
        settings = {"pool_size": 100, "blocks": [0]}
        return create_learner("coda_prompt", backbone=backbone, num_tasks=num_tasks, settings=settings)


def components_per_task(learner: Learner) -> list[int]:
    return [len(parameter) for parameter in learner.prompts["0"].components]


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_coda_prompt__follows_the_formula(build: Build, images: Tensor, weight: float) -> None:
    learner = build("coda_prompt", orthogonality_weight=weight, **SMALL)
    with seeded(1):
        for task in TASKS[:2]:
            learner.begin_task(task)
        for (
            parameter
        ) in learner.prompts.parameters():  # as training leaves them: neither orthogonal nor short
            torch.nn.init.normal_(parameter)
    query = learner.query(images)
    prefixes, penalty = {}, 0.0
    for block in (0, 1):
        prompt = learner.prompts[str(block)]
        keys, attentions, components = (
            torch.cat(list(parameters)) for parameters in (prompt.keys, prompt.attentions, prompt.components)
        )
        assert len(keys) == 8  # two tasks of four
        attended = query[:, None, :] * attentions
        lengths = attended.norm(dim=2) * keys.norm(dim=1)
        alpha = (attended * keys).sum(2) / lengths
        combined = sum(alpha[:, m, None, None] * components[m] for m in range(8))
        prefixes[block] = torch.stack([combined[:, :2], combined[:, 2:]], dim=1)
        for rows in (keys, attentions, components.flatten(1)):
            penalty = penalty + ((rows @ rows.T - torch.eye(8)) ** 2).sum() / 64
    features = learner.backbone.encode(images, prefixes=prefixes)[:, 0]
    expected = torch.cat([features @ head.weight.T + head.bias for head in learner.heads.tasks], dim=1)

    output = learner(images, torch.full((5,), 3))
    assert output.columns.tolist() == [2, 3]
    torch.testing.assert_close(output.logits, expected[:, 2:], atol=1e-5, rtol=0)
    torch.testing.assert_close(learner.predict(images), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(learner.predict(images, query), expected, atol=1e-5, rtol=0)
    if weight:
        assert list(output.auxiliary) == ["orthogonality"]
        assert output.auxiliary["orthogonality"].shape == ()
        torch.testing.assert_close(output.auxiliary["orthogonality"], 0.1 * penalty, atol=0, rtol=1e-5)
    else:
        assert output.auxiliary == {}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_coda_prompt__finished_components_are_frozen_bit_by_bit(
    build: Build, train: Train, optimizer: Literal["adam", "sgd"]
) -> None:
    learner = build("coda_prompt", orthogonality_weight=0.1, **SMALL)
    finished: dict[str, Tensor] = {}
    for task in TASKS[:3]:
        with seeded(task.index):
            learner.begin_task(task)
        start = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
        assert all(torch.equal(start[name], tensor) for name, tensor in finished.items())
        train(learner, task, optimizer=optimizer)
        after = learner.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in finished.items())
        own = [
            f"prompts.{block}.{kind}.{task.index}"
            for block in (0, 1)
            for kind in ("components", "keys", "attentions")
        ]
        own += [f"heads.tasks.{task.index}.{kind}" for kind in ("weight", "bias")]
        for name in own:
            assert not torch.equal(after[name], start[name]), name
        assert {name for name, parameter in learner.named_parameters() if parameter.requires_grad} == set(own)
        finished |= {name: after[name].clone() for name in own}
    groups = learner.parameter_groups()
    assert [group.name for group in groups] == ["components", "keys", "attentions", "heads"]
    assert [len(group.parameters) for group in groups] == [2, 2, 2, 2]


@pytest.mark.parametrize(("num_tasks", "share", "unused"), [(3, 33, 1), (7, 14, 2)])
def test_coda_prompt__pool_need_not_be_a_multiple_of_the_tasks(
    num_tasks: int, share: int, unused: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    learner = wide_learner(num_tasks)
    assert caplog.messages == [f"pool of 100 for {num_tasks} tasks: {share} components each, {unused} unused"]
    for task in TASKS[:num_tasks]:
        learner.begin_task(task)
    assert components_per_task(learner) == [share] * num_tasks
    assert learner.predict(torch.randn(2, 3, 32, 32)).shape == (2, 2 * num_tasks)


def test_coda_prompt__grows_beyond_the_planned_tasks_while_there_is_room() -> None:
    learner = wide_learner(3)
    for task in TASKS[:4]:
        learner.begin_task(task)
    assert components_per_task(learner) == [33] * 4
    keys = torch.cat([parameter.detach() for parameter in learner.prompts["0"].keys])
    assert (keys @ keys.T - torch.eye(132)).abs().max() < 1e-5
    with pytest.raises(UsageError) as raised:
        learner.begin_task(TASKS[4])
    assert str(raised.value) == (
        "5 tasks with 33 components each need 165 orthogonal keys, but the backbone has 144 dimensions: "
        # 28 for each of the three planned tasks
        "a run that begins with a learner.pool_size of at most 84 has room for them."
    )


@pytest.mark.parametrize(
    ("pool_size", "num_tasks", "message"),
    [
        (
            100,
            3,
            "3 tasks with 33 components each need 99 orthogonal keys, but the backbone has 48 dimensions",
        ),
        (49, 1, "a run that begins with a learner.pool_size of at most 48"),
        (2, 3, "learner.pool_size 2 gives none of 3 tasks a component; it must be at least 3"),
    ],
)
def test_coda_prompt__refuses_a_pool_that_does_not_fit(
    build: Build, pool_size: int, num_tasks: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build("coda_prompt", num_tasks=num_tasks, **(SMALL | {"pool_size": pool_size}))
    build("coda_prompt", num_tasks=1, **(SMALL | {"pool_size": 48}))


def test_coda_prompt__refuses_blocks_and_lengths_that_cannot_be(build: Build) -> None:
    message = r"learner.blocks: \[0, 2\] must be different blocks of the backbone, which are 0 to 1"
    with pytest.raises(UsageError, match=message):
        build("coda_prompt", pool_size=12, blocks=[0, 2])
    with pytest.raises(ValidationError, match="its length must be even"):
        build("coda_prompt", prompt_length=5)
    with pytest.raises(ValidationError, match="blocks"):
        build("coda_prompt", blocks=[])
