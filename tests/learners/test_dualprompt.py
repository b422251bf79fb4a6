"""DualPrompt: general prefixes for all, the task's own expert in training, the expert of the nearest key afterwards.

Shapes: N images, D width (48).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded

Build = Callable[..., Learner]
Train = Callable[..., Learner]

TASKS = tuple(
    Task(index, (2 * index, 2 * index + 1), (2 * index, 2 * index + 1), 2 * index + 2) for index in range(3)
)
SMALL: dict[str, Any] = {"general_blocks": [0], "general_length": 2, "expert_blocks": [1], "expert_length": 3}
LABELS = torch.full((5,), 4)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def learner(build: Build, images: Tensor) -> Learner:
    """In its third task; the keys are the queries of images 0, 1 and 2, less what all queries share."""
    learner = build("dualprompt", transfer_prompts=False, **SMALL)
    with seeded(1):
        for task in TASKS:
            learner.begin_task(task)
    queries = learner.query(images)
    with torch.no_grad():
        for key, query in zip(learner.experts.keys, queries, strict=False):
            key.copy_(query - queries.mean(0))
    return learner


def scores(learner: Learner, images: Tensor, task_index: int) -> Tensor:
    """Return the logits (N, seen) with the general prefix and one task's expert."""
    prefixes = {0: learner.general.prefixes[0][None], 1: learner.experts.prefixes[task_index][0][None]}
    features = learner.backbone.encode(images, prefixes=prefixes)[:, 0]
    return torch.cat([features @ head.weight.T + head.bias for head in learner.heads.tasks], dim=1)


def test_dualprompt__trains_with_the_task_s_own_expert(learner: Learner, images: Tensor) -> None:
    output = learner(images, LABELS)
    assert output.columns.tolist() == [4, 5]
    torch.testing.assert_close(output.logits, scores(learner, images, 2)[:, 4:], atol=1e-6, rtol=0)
    query, key = learner.query(images).double(), learner.experts.keys[2].detach().double()
    cosine = (query * key).sum(1) / ((query**2).sum(1).sqrt() * (key**2).sum().sqrt())
    assert list(output.auxiliary) == ["pull"]
    torch.testing.assert_close(output.auxiliary["pull"].double(), -cosine, atol=1e-6, rtol=0)


def test_dualprompt__a_known_task_has_its_own_expert(learner: Learner, images: Tensor) -> None:
    for task in TASKS:
        expected = scores(learner, images, task.index)[:, list(task.classes)]
        torch.testing.assert_close(learner.predict_task(images, task), expected, atol=1e-6, rtol=0)


def test_dualprompt__pull_has_a_weight(build: Build, images: Tensor) -> None:
    pulls = []
    for weight in (1.0, 0.25):
        learner = build("dualprompt", pull_weight=weight, **SMALL)
        with seeded(0):
            learner.begin_task(TASKS[0])
        pulls.append(learner(images, LABELS).auxiliary["pull"])
    torch.testing.assert_close(0.25 * pulls[0], pulls[1], atol=1e-7, rtol=0)


def test_dualprompt__keys_learn_from_the_pull_alone(learner: Learner, images: Tensor) -> None:
    output = learner(images, LABELS)
    F.cross_entropy(output.logits, torch.zeros(5, dtype=torch.long)).backward(retain_graph=True)
    assert learner.experts.keys[2].grad is None
    assert bool(learner.experts.prefixes[2].grad.any())
    assert bool(learner.general.prefixes.grad.any())
    learner.zero_grad()
    output.auxiliary["pull"].mean().backward()
    assert bool(learner.experts.keys[2].grad.any())
    assert learner.experts.prefixes[2].grad is None
    assert learner.general.prefixes.grad is None


def test_dualprompt__predicts_with_the_nearest_expert_of_each_image(learner: Learner, images: Tensor) -> None:
    queries = F.normalize(learner.query(images).double(), dim=1)
    keys = F.normalize(torch.stack(list(learner.experts.keys)).detach().double(), dim=1)
    chosen = [max(range(3), key=lambda task: row[task]) for row in (queries @ keys.T).tolist()]
    assert chosen[:3] == [0, 1, 2]
    expected = torch.stack([scores(learner, images, task)[row] for row, task in enumerate(chosen)])
    assert not torch.isclose(expected[0], scores(learner, images, 1)[0], atol=1e-4).all()
    torch.testing.assert_close(learner.predict(images), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        learner.predict(images, learner.query(images[[2, 2, 2, 2, 2]])),
        scores(learner, images, 2),
        atol=1e-6,
        rtol=0,
    )


@pytest.mark.parametrize("is_on", [True, False])
def test_dualprompt__transfer_copies_the_expert_but_not_the_key(
    build: Build, train: Train, is_on: bool
) -> None:
    learner = build("dualprompt", transfer_prompts=is_on, **SMALL)
    train(learner, TASKS[0])
    learner.begin_task(TASKS[1])
    first, second = learner.experts.prefixes
    assert torch.equal(first, second) == is_on
    assert not torch.equal(*learner.experts.keys)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_dualprompt__finished_experts_are_frozen_bit_by_bit(
    build: Build, train: Train, optimizer: Literal["adam", "sgd"]
) -> None:
    learner = build("dualprompt", **SMALL)
    finished: dict[str, Tensor] = {}
    for task in TASKS:
        with seeded(task.index):
            learner.begin_task(task)
        start = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
        train(learner, task, optimizer=optimizer)
        after = learner.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in finished.items())
        own = [f"experts.{kind}.{task.index}" for kind in ("prefixes", "keys")]
        own += [f"heads.tasks.{task.index}.{kind}" for kind in ("weight", "bias")]
        for name in [*own, "general.prefixes"]:
            assert not torch.equal(after[name], start[name]), name
        finished |= {name: after[name].clone() for name in own}
    assert [group.name for group in learner.parameter_groups()] == ["general", "experts", "keys", "heads"]


@pytest.mark.parametrize(
    ("general", "experts"), [([0], [2]), ([0, 0], [1]), ([0], [0]), ([-1], [1])], ids=str
)
def test_dualprompt__refuses_blocks_that_are_not_there(
    build: Build, general: list[int], experts: list[int]
) -> None:
    with pytest.raises(
        UsageError, match="must be different blocks of the backbone, which are 0 to 1"
    ) as raised:
        build("dualprompt", general_blocks=general, expert_blocks=experts)
    assert f"learner.general_blocks and learner.expert_blocks: {general + experts}" in str(raised.value)


def test_dualprompt__is_not_without_blocks(build: Build) -> None:
    for name in ("general_blocks", "expert_blocks"):
        with pytest.raises(ValidationError, match=name):
            build("dualprompt", **(SMALL | {name: []}))


def test_dualprompt__without_its_prefixes_is_a_linear_probe(
    build: Build, train: Train, images: Tensor
) -> None:
    """The accuracy of a prompt learner is no proof that its prompts do anything: this is what is left without."""
    dualprompt, probe = build("dualprompt", **SMALL), build("linear_probe")
    encode = dualprompt.backbone.encode
    dualprompt.backbone.encode = lambda images, prefixes=None: encode(images)
    for task in TASKS:
        dualprompt.begin_task(task)
        probe.begin_task(task)
        dualprompt.heads.load_state_dict(probe.heads.state_dict())
        train(dualprompt, task)
        train(probe, task)
        assert torch.equal(dualprompt.predict(images), probe.predict(images))
    dualprompt.backbone.encode = encode
    assert not torch.isclose(dualprompt.predict(images), probe.predict(images), atol=1e-4).all()
