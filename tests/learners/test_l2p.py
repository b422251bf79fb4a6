"""L2P: which prompts an image gets, where they stand in the sequence, what the heads read and what the keys learn.

Shapes: N images, D width (48), P prompts of the pool, L tokens of a prompt, k chosen prompts.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners import create_learner
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded

Build = Callable[..., Learner]
Train = Callable[..., Learner]

TASKS = tuple(
    Task(index, (2 * index, 2 * index + 1), (2 * index, 2 * index + 1), 2 * index + 2) for index in range(4)
)
SMALL: dict[str, Any] = {"pool_size": 6, "prompt_length": 3, "top_k": 2}


@pytest.fixture
def images() -> Tensor:
    return torch.randn(7, 3, 32, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture
def learner(build: Build) -> Learner:
    """In its second task; its keys lie among the queries, so that the images choose differently."""
    learner = build("l2p", **SMALL)
    with seeded(1):
        for task in TASKS[:2]:
            learner.begin_task(task)
        queries = learner.query(torch.randn(6, 3, 32, 32))
    with torch.no_grad():
        learner.pool.keys.copy_(queries - queries.mean(0))
    return learner


def cosines(learner: Learner, images: Tensor) -> Tensor:
    """Return (N,P) in float64, written with plain sums."""
    query, keys = learner.query(images).double(), learner.pool.keys.detach().double()
    lengths = (query**2).sum(1).sqrt()[:, None] * (keys**2).sum(1).sqrt()
    return query @ keys.T / lengths


def choices(learner: Learner, images: Tensor) -> list[list[int]]:
    """Return the k best prompts of every image."""
    return [
        sorted(range(6), key=lambda number: -row[number])[:2] for row in cosines(learner, images).tolist()
    ]


def sequences(learner: Learner) -> list[Tensor]:
    """Return a list that grows by the input of block 0 with every pass."""
    seen: list[Tensor] = []
    learner.backbone.vit.blocks[0].register_forward_pre_hook(
        lambda module, given: seen.append(given[0].detach())
    )
    return seen


@pytest.mark.parametrize("position", ["class_token", "none"])
def test_l2p__prompts_stand_behind_the_class_token(build: Build, images: Tensor, position: str) -> None:
    learner = build("l2p", prompt_position=position, **SMALL)
    learner.begin_task(TASKS[0])
    seen = sequences(learner)
    learner(images, torch.zeros(7, dtype=torch.long))
    learner.predict(images)
    plain, trained, _, predicted = seen
    assert plain.shape == (7, 17, 48)
    assert trained.shape == (7, 1 + 2 * 3 + 16, 48)
    for row, chosen in enumerate(choices(learner, images)):
        prompts = torch.cat([learner.pool.prompts[number] for number in chosen])
        if position == "class_token":
            prompts = prompts + learner.backbone.vit.pos_embed[0, 0]
        expected = torch.cat([plain[row, :1], prompts, plain[row, 1:]])
        torch.testing.assert_close(trained[row], expected, atol=1e-6, rtol=0)
    assert torch.equal(predicted, trained)


def test_l2p__sequence_of_the_reference_has_222_tokens() -> None:
    with seeded(0):
        backbone = PromptableViT(
            VisionTransformer(img_size=224, patch_size=16, embed_dim=8, depth=1, num_heads=1, num_classes=0)
        )
        learner = create_learner("l2p", backbone=backbone, num_tasks=1)
        learner.begin_task(TASKS[0])
    seen = sequences(learner)
    learner.predict(torch.randn(1, 3, 224, 224))
    assert seen[-1].shape == (1, 222, 8)


def test_l2p__heads_read_the_mean_of_the_prompts_outputs(learner: Learner, images: Tensor) -> None:
    plain_encode = learner.backbone.encode
    outputs: list[Tensor] = []

    def scores(changed: slice) -> Tensor:
        """Predict while some positions of the prompted output are moved."""

        def encode(images: Tensor, tokens: Tensor | None = None) -> Tensor:
            outputs.append(plain_encode(images, tokens=tokens))
            noise = torch.zeros_like(outputs[-1])
            if tokens is not None:
                noise[:, changed] = 100.0
            return outputs[-1] + noise

        learner.backbone.encode = encode
        return learner.predict(images)

    logits = scores(slice(0))
    weight = torch.cat([head.weight for head in learner.heads.tasks])
    bias = torch.cat([head.bias for head in learner.heads.tasks])
    torch.testing.assert_close(logits, outputs[-1][:, 1:7].mean(1) @ weight.T + bias, atol=1e-5, rtol=0)
    for other in (slice(0, 1), slice(7, None)):  # the class token, the patches
        assert torch.equal(scores(other), logits)
    for prompt in (slice(1, 2), slice(6, 7)):
        assert not torch.isclose(scores(prompt), logits).any()
    learner.backbone.encode = plain_encode
    output = learner(images, torch.full((7,), 2))
    assert output.columns.tolist() == [2, 3]
    torch.testing.assert_close(output.logits, logits[:, 2:], atol=1e-6, rtol=0)


def test_l2p__keys_learn_from_the_pull_alone(learner: Learner, images: Tensor) -> None:
    output = learner(images, torch.full((7,), 2))
    chosen = choices(learner, images)
    assert len({tuple(row) for row in chosen}) > 1
    rows = cosines(learner, images)
    expected = [-0.1 * (row[first] + row[second]) for row, (first, second) in zip(rows, chosen, strict=True)]
    assert list(output.auxiliary) == ["pull"]
    torch.testing.assert_close(output.auxiliary["pull"].double(), torch.stack(expected), atol=1e-6, rtol=0)

    F.cross_entropy(output.logits, torch.zeros(7, dtype=torch.long)).backward(retain_graph=True)
    assert learner.pool.keys.grad is None
    used = sorted({number for row in chosen for number in row})
    assert learner.pool.prompts.grad.flatten(1).any(1).nonzero()[:, 0].tolist() == used
    learner.zero_grad()
    output.auxiliary["pull"].mean().backward()
    assert learner.pool.prompts.grad is None
    assert learner.pool.keys.grad.any(1).nonzero()[:, 0].tolist() == used


def test_l2p__vote_of_the_step_is_an_option_of_training(
    learner: Learner, build: Build, images: Tensor
) -> None:
    voting = build("l2p", batchwise_prompt=True, **SMALL)
    for task in TASKS[:2]:
        voting.begin_task(task)
    voting.load_state_dict(learner.state_dict())
    votes = Counter(number for row in choices(learner, images) for number in row)
    winners = sorted(votes, key=lambda number: (-votes[number], number))[:2]
    assert any(sorted(row) != sorted(winners) for row in choices(learner, images))

    seen = sequences(voting)
    output = voting(images, torch.full((7,), 2))
    prompts = (
        torch.cat([voting.pool.prompts[number] for number in winners]) + voting.backbone.vit.pos_embed[0, 0]
    )
    torch.testing.assert_close(seen[-1][:, 1:7], prompts.expand(7, -1, -1), atol=1e-6, rtol=0)
    expected = -0.1 * cosines(voting, images)[:, winners].sum(1)
    torch.testing.assert_close(output.auxiliary["pull"].double(), expected, atol=1e-6, rtol=0)
    assert voting(images[:0], torch.zeros(0, dtype=torch.long)).logits.shape == (0, 2)
    assert torch.equal(voting.predict(images), learner.predict(images))


def test_l2p__transfer_stops_where_the_pool_ends(
    build: Build, train: Train, caplog: pytest.LogCaptureFixture
) -> None:
    learner = build("l2p", num_tasks=4, pool_size=5, top_k=2, prompt_length=2, transfer_prompts=True)
    caplog.set_level(logging.INFO)
    for task in TASKS:
        before = learner.pool.prompts.detach().clone()
        keys = learner.pool.keys.detach().clone()
        learner.begin_task(task)
        if task.index == 1:
            before[2:4] = before[0:2]
        assert torch.equal(learner.pool.prompts, before)
        assert torch.equal(learner.pool.keys, keys)
        train(learner, task)
    assert caplog.messages == [
        f"task {task}: no prompts left in the pool of 5 to transfer to" for task in (3, 4)
    ]


def test_l2p__transfers_nothing_unless_asked_to(build: Build) -> None:
    learner = build("l2p", **SMALL)
    before = learner.pool.prompts.detach().clone()
    for task in TASKS[:3]:
        learner.begin_task(task)
    assert torch.equal(learner.pool.prompts, before)


@pytest.mark.parametrize("is_batchwise", [False, True])
def test_l2p__counts_in_training_how_often_each_prompt_is_given(
    build: Build, train: Train, is_batchwise: bool
) -> None:
    learner = build("l2p", **SMALL, batchwise_prompt=is_batchwise)
    learner.begin_task(TASKS[0])
    images = torch.randn(9, 3, 32, 32, generator=torch.Generator().manual_seed(6))
    labels = torch.zeros(9, dtype=torch.long)
    learner.eval()
    learner(images, labels)
    learner.predict(images)
    assert learner.tallies == {}
    learner.train()
    learner(images, labels)
    learner(images[:4], labels[:4])
    given = [choices(learner, part) for part in (images, images[:4])]
    if is_batchwise:  # all images of a step have the prompts that most of them chose
        votes = [Counter(number for row in rows for number in row) for rows in given]
        ranked = [
            sorted(range(6), key=lambda number, vote=vote: (-vote[number], number))[:2] for vote in votes
        ]
        given = [[winners] * len(rows) for winners, rows in zip(ranked, given, strict=True)]
    counts = Counter(number for rows in given for row in rows for number in row)
    assert learner.tallies["prompt_selections"].tolist() == [counts[number] for number in range(6)]
    assert sum(counts.values()) == 13 * 2
    learner.begin_task(TASKS[1])
    assert learner.tallies == {}


def test_l2p__backbone_is_the_same_before_and_after(build: Build, train: Train) -> None:
    learner = build("l2p", **SMALL)

    def digest() -> str:
        tensors = learner.backbone.state_dict().values()
        return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()

    before = digest()
    prompts = learner.pool.prompts.detach().clone()
    for task in TASKS[:2]:
        train(learner, task)
    assert digest() == before
    assert not torch.equal(learner.pool.prompts, prompts)


def test_l2p__drop_path_of_the_frozen_backbone_is_off(images: Tensor) -> None:
    with seeded(0):
        vit = VisionTransformer(
            img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=0, drop_path_rate=0.3
        )
        learner = create_learner("l2p", backbone=PromptableViT(vit), num_tasks=1)
        learner.begin_task(TASKS[0])
    learner.train()
    labels = torch.zeros(7, dtype=torch.long)
    assert torch.equal(learner.query(images), learner.query(images))
    assert torch.equal(learner(images, labels).logits, learner(images, labels).logits)
    learner.backbone.train()  # whatever the mode outside
    assert torch.equal(learner.query(images), learner.query(images))


def test_l2p__shares_its_heads_over_domains(build: Build, images: Tensor) -> None:
    learner = build("l2p", **SMALL)
    learner.begin_task(Task(0, (0, 1), (0, 1), 2, "photo"))
    learner.begin_task(Task(1, (1, 2), (2,), 3, "sketch"))
    output = learner(images, torch.full((7,), 1))
    assert output.columns.tolist() == [1, 2]
    torch.testing.assert_close(output.logits, learner.predict(images)[:, 1:], atol=1e-6, rtol=0)
    assert all(parameter.requires_grad for parameter in learner.heads.parameters())


def test_l2p__refuses_to_choose_more_prompts_than_there_are(build: Build) -> None:
    with pytest.raises(ValidationError, match="top_k 5 prompts cannot be chosen from pool_size 4"):
        build("l2p", pool_size=4)
