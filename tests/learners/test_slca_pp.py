"""SLCA++ against golden numbers and hand values."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners import create_learner, slca_pp
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.slca_pp import (
    SLCAPlusPlusConfig,
    draw_factors,
    leading_directions,
    scaled_logits,
)
from vbm_ptm.randomness import seeded

Build = Callable[..., Learner]
GOLDEN = Path(__file__).parents[1] / "golden2"
TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3), (2, 3), 4), Task(2, (4,), (4,), 5))


def finish(learner: Learner, task: Task, given_features: Any) -> None:
    labels = [class_index for class_index in task.classes for _ in range(4)]
    noise = torch.randn(len(labels), 48, generator=torch.Generator().manual_seed(task.index))
    with seeded(task.index):
        learner.end_task(task, given_features(F.one_hot(torch.tensor(labels), 48) * 5 + noise, labels))


def test_slca_pp__updates_start_and_act_as_the_reference() -> None:
    golden, tiny = load_file(GOLDEN / "lora_forward.safetensors"), load_file(GOLDEN / "tiny2_vit.safetensors")
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0)
    vit.load_state_dict({key[4:]: value.float() for key, value in tiny.items() if key.startswith("vit.")})
    learner = create_learner("slca_pp", backbone=PromptableViT(vit.eval()), num_tasks=1)
    for index, updates in enumerate(learner.updates.blocks):
        for site, update in updates.items():
            prefix = f"slcapp.{index}.{site}"
            projector = update.down.double().T @ update.down.double()
            torch.testing.assert_close(projector, golden[f"{prefix}.initial_projector"], atol=1e-5, rtol=0)
            assert not bool(update.up.any())
            update.down.data.copy_(golden[f"{prefix}.A"])
            update.up.data.copy_(golden[f"{prefix}.B"])
    cls = learner.query(tiny["images"].float())
    torch.testing.assert_close(cls.double(), golden["slcapp.cls"], atol=2e-6, rtol=1e-5)


def test_leading_directions__are_those_of_the_decomposition() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((12, 5), (5, 12), (6, 6)):
        weight = torch.randn(shape, generator=generator)
        expected = torch.linalg.svd(weight.double()).Vh[:3]
        found = leading_directions(weight, 3).double()
        torch.testing.assert_close(found.abs(), expected.abs(), atol=1e-5, rtol=0)


def test_draw_factors__equal_the_reference() -> None:
    golden = load_file(GOLDEN / "slcapp.safetensors")
    factors = draw_factors(golden["draw.uniform"], golden["draw.age"], scale=0.02)
    torch.testing.assert_close(factors, golden["draw.factor"])


def test_scaled_logits__equal_the_reference() -> None:
    golden = load_file(GOLDEN / "slcapp.safetensors")
    heads = TaskHeads(4).double()
    for index in range(3):
        heads.append(2)
        heads.tasks[index].double().load_state_dict(
            {name: golden[f"scale.head{index}.{name}"] for name in ("weight", "bias")}
        )
    logits = scaled_logits(heads, golden["scale.features"], scale=golden["scale.mu"].item())
    torch.testing.assert_close(logits, golden["scale.logits"])


def test_slca_pp__trains_updates_norms_biases_class_token_and_heads(build: Build) -> None:
    learner = build("slca_pp")
    learner.begin_task(TASKS[0])
    groups = {group.name: group for group in learner.parameter_groups()}
    assert [group.learning_rate_scale for group in groups.values()] == [0.5, 0.1, 1.0]
    for name, parameter in learner.backbone.vit.named_parameters():
        is_slow = "norm" in name or name.endswith("bias") or name == "cls_token"
        assert parameter.requires_grad == is_slow, name
    learner.begin_task(TASKS[1])
    assert [group.learning_rate_scale for group in learner.parameter_groups()] == [0.1, 0.1, 1.0]


def test_slca_pp__factors_multiply_weights_and_not_biases(
    build: Build, train: Any, given_features: Any
) -> None:
    learner = build("slca_pp", alignment_epochs=2)
    query = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    for task in TASKS:
        train(learner, task)
        torch.testing.assert_close(learner.predict(torch.zeros(3, 3, 32, 32), query), learner.heads(query))
        finish(learner, task, given_features)
    scores = learner.predict(torch.zeros(3, 3, 32, 32), query)
    parts = [
        (1 + 0.02 * (2 - index)) * query @ head.weight.T + head.bias
        for index, head in enumerate(learner.aligned_heads.tasks)
    ]
    torch.testing.assert_close(scores, torch.cat(parts, dim=1))
    first, aligned = learner.heads.tasks[0].weight, learner.aligned_heads.tasks[0].weight
    assert not torch.equal(first, aligned)


def test_slca_pp__domains_have_no_age(build: Build, train: Any, given_features: Any) -> None:
    learner = build("slca_pp", alignment_epochs=2)
    query = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    for task in (Task(0, (0, 1), (0, 1), 2, "photo"), Task(1, (0, 1), (), 2, "sketch")):
        train(learner, task)
        finish(learner, task, given_features)
    torch.testing.assert_close(
        learner.predict(torch.zeros(3, 3, 32, 32), query), learner.aligned_heads(query)
    )


def test_slca_pp__heads_that_are_not_aligned_see_features_as_they_are(
    build: Build, train: Any, given_features: Any
) -> None:
    learner = build("slca_pp", alignment_epochs=0)
    query = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    for task in TASKS:
        train(learner, task)
        finish(learner, task, given_features)
        assert torch.equal(learner.predict(torch.zeros(3, 3, 32, 32), query), learner.heads(query))


def test_slca_pp__a_class_is_as_old_as_its_head(
    build: Build, train: Any, given_features: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Class 0 comes back in the third task: its draws are scaled down as long as its head's features are scaled up."""
    ages = []

    def watched(uniform: Tensor, own: Tensor, *, scale: float) -> Tensor:
        ages.append(own[:, 0].tolist())
        return draw_factors(uniform, own, scale=scale)

    monkeypatch.setattr(slca_pp, "draw_factors", watched)
    learner = build("slca_pp", alignment_epochs=1)
    for task in (*TASKS[:2], Task(2, (0, 4), (4,), 5)):
        train(learner, task)
        finish(learner, task, given_features)
    assert ages == [[1, 1, 0, 0], [2, 2, 1, 1, 2, 0]]  # in the order of tasks and their classes


def test_slca_pp__refuses_a_rank_above_the_width(build: Build) -> None:
    build("slca_pp", rank=48)
    with pytest.raises(UsageError, match=r"learner\.rank is 49.* at most 48"):
        build("slca_pp", rank=49)


@pytest.mark.parametrize(("plain", "reverse"), [(0.5, 0.5), (1.0, 0.1)])
def test_slca_pp__loss_is_the_symmetric_cross_entropy(build: Build, plain: float, reverse: float) -> None:
    learner = build("slca_pp", cross_entropy_weight=plain, reverse_weight=reverse)
    learner.begin_task(TASKS[0])
    images, labels = (
        torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 1, 1, 0]),
    )
    output = learner(images, labels)
    wrong = 1 - output.logits.softmax(1).gather(1, labels[:, None])[:, 0]
    expected = (
        plain * F.cross_entropy(output.logits, labels, reduction="none") - reverse * math.log(1e-4) * wrong
    )
    total = F.cross_entropy(output.logits, labels, reduction="none") + sum(output.auxiliary.values())
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)


def test_task_notes__tell_of_normalised_logits_with_one_class_a_task() -> None:
    one, two = Task(3, (6,), (6,), 7), Task(3, (6, 7), (6, 7), 8)
    (note,) = SLCAPlusPlusConfig().task_notes(one)
    assert note.startswith("task 4 adds one class")
    assert SLCAPlusPlusConfig().task_notes(two) == []
    assert SLCAPlusPlusConfig(logit_normalization_temperature=1).task_notes(one) == []
