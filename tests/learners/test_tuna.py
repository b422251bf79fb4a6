"""TUNA against golden numbers, hand values and plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.tuna import combined_scores, fused
from vbm_ptm.randomness import seeded

Build = Callable[..., Learner]
GOLDEN = Path(__file__).parents[1] / "golden2" / "tuna.safetensors"
TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3), (2, 3), 4), Task(2, (4,), (4,), 5))


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def finish(learner: Learner, task: Task, given_features: Any) -> None:
    labels = [class_index for class_index in task.classes for _ in range(4)]
    noise = torch.randn(len(labels), 48, generator=torch.Generator().manual_seed(task.index))
    with seeded(task.index):
        learner.end_task(task, given_features(F.one_hot(torch.tensor(labels), 48) * 5 + noise, labels))


def live_through(learner: Learner, train: Any, given_features: Any, *, until: int = 3) -> Learner:
    for task in TASKS[:until]:
        train(learner, task)
        finish(learner, task, given_features)
    return learner


def test_fused__equals_the_reference_and_hand_values() -> None:
    golden = load_file(GOLDEN)
    torch.testing.assert_close(fused(golden["experts"]), golden["fused"])
    values = torch.tensor([[1.0, 1.0, 0.0], [-2.0, 0.0, 0.0], [0.5, -1.0, 0.0]])
    assert fused(values).tolist() == [-2, -1, 0]


def test_fused__of_equal_experts_is_the_expert() -> None:
    expert = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    expert[1, 2] = 0
    for count in (1, 2, 5):
        assert torch.equal(fused(expert.expand(count, 3, 4)), expert)


def test_combined_scores__equal_the_reference() -> None:
    golden = load_file(GOLDEN)
    scores, chosen = combined_scores(golden["logits"], golden["universal"])
    torch.testing.assert_close(scores, golden["scores"])
    assert torch.equal(chosen, golden["selected"])
    probabilities = golden["logits"].softmax(2)
    entropy = -(probabilities * (probabilities + 1e-10).log()).sum(2)
    torch.testing.assert_close(entropy, golden["entropy"])


def test_tuna__an_expert_starts_from_the_one_before_and_leaves_it_alone(build: Build, train: Any) -> None:
    learner = build("tuna")
    train(learner, TASKS[0])
    first = {name: tensor.clone() for name, tensor in learner.experts[0].state_dict().items()}
    learner.begin_task(TASKS[1])
    for name, tensor in learner.experts[1].state_dict().items():
        assert torch.equal(tensor, first[name])
    assert not any(parameter.requires_grad for parameter in learner.experts[0].parameters())
    train(learner, TASKS[1])
    assert all(torch.equal(tensor, first[name]) for name, tensor in learner.experts[0].state_dict().items())
    assert not torch.equal(learner.experts[1].blocks[0].up.weight, first["blocks.0.up.weight"])


def test_tuna__logits_are_scaled_cosines_under_the_newest_expert(
    build: Build, train: Any, images: Tensor
) -> None:
    learner = build("tuna")
    train(learner, TASKS[0])
    rows = learner.heads.tasks[0].weight
    expected = 20 * F.cosine_similarity(learner.query(images)[:, None], rows, dim=2)
    torch.testing.assert_close(learner(images, torch.zeros(5).long()).logits, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(learner.predict(images), expected, atol=1e-5, rtol=0)


def test_tuna__prediction_is_the_sum_of_the_universal_and_the_most_certain_expert(
    build: Build, train: Any, given_features: Any, images: Tensor
) -> None:
    learner = live_through(build("tuna"), train, given_features).eval()
    with torch.no_grad():
        rows = torch.cat([head.weight for head in learner.heads.tasks])
        universal = learner.universal_expert()
        for name, tensor in universal.state_dict().items():
            stack = torch.stack([expert.state_dict()[name] for expert in learner.experts])
            assert torch.equal(tensor, fused(stack))
        logits = [
            20 * F.cosine_similarity(learner.backbone.encode(images, adaptation=each())[:, :1], rows, dim=2)
            for each in (*learner.experts, universal)
        ]
        for row, scores in enumerate(learner.predict(images)):
            probabilities = [each[row].softmax(0) for each in logits]
            certain = min(probabilities[:-1], key=lambda p: -sum(float(x) * math.log(x + 1e-10) for x in p))
            torch.testing.assert_close(scores, certain + probabilities[-1], atol=1e-5, rtol=0)


def test_tuna__a_task_has_its_own_expert(
    build: Build, train: Any, given_features: Any, images: Tensor
) -> None:
    learner = live_through(build("tuna"), train, given_features).eval()
    for task in TASKS:
        with torch.no_grad():
            features = learner.backbone.encode(images, adaptation=learner.experts[task.index]())[:, 0]
            expected = 20 * learner.heads(features)[:, list(task.classes)]
        torch.testing.assert_close(learner.predict_task(images, task), expected)


def test_tuna__alignment_teaches_heads_to_tell_old_classes_from_new(
    build: Build, train: Any, given_features: Any
) -> None:
    aligned, plain = (
        live_through(build("tuna", alignment_epochs=epochs), train, given_features, until=2)
        for epochs in (30, 0)
    )
    queries = F.one_hot(torch.arange(4), 48) * 5.0
    losses = [
        F.cross_entropy(20 * learner.heads(queries), torch.arange(4)).item() for learner in (aligned, plain)
    ]
    assert losses[0] < losses[1] / 2
    for one, two in zip(aligned.experts.parameters(), plain.experts.parameters(), strict=True):
        assert torch.equal(one, two)


def test_tuna__orthogonality_is_the_formula_of_the_reference(
    build: Build, train: Any, given_features: Any
) -> None:
    learner = live_through(build("tuna", orthogonality_weight=1e-3), train, given_features, until=2)
    learner.begin_task(TASKS[2])
    train(learner, TASKS[2])
    learner.zero_grad()
    term = learner(torch.zeros(1, 3, 32, 32), torch.tensor([4])).auxiliary["orthogonality"]
    newest, total = learner.experts[2], 0.0
    for earlier in list(learner.experts)[:2]:
        per_block: list[Tensor] = []
        for one, two in zip(newest.blocks, earlier.blocks, strict=True):
            rows = [F.normalize(block.up.weight.double(), dim=1) for block in (one, two)]
            per_block.append((rows[0] @ rows[1].T).mean().abs())
        total += torch.stack(per_block).mean().item()
    assert term.item() == pytest.approx(1e-3 * math.exp(-3) * total, rel=1e-4)
    term.backward()
    assert all(block.up.weight.grad is None for block in learner.experts[0].blocks)
    assert (
        "orthogonality" not in build_and_begin(build)(torch.zeros(1, 3, 32, 32), torch.tensor([0])).auxiliary
    )


def build_and_begin(build: Build) -> Learner:
    learner = build("tuna", orthogonality_weight=1e-3)
    learner.begin_task(TASKS[0])
    return learner


def test_tuna__two_predictions_are_equal_with_dropout_in_either_mode(
    build: Build, train: Any, given_features: Any, images: Tensor
) -> None:
    learner = live_through(build("tuna", adapter_dropout=0.5), train, given_features)
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    scores = []
    for is_training in (True, False):
        learner.train(is_training)
        scores += [learner.predict(images), learner.predict(images)]
        assert torch.equal(learner.query(images), learner.query(images))
    assert all(torch.equal(scores[0], each) for each in scores[1:])
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.state_dict().items())
