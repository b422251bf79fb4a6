"""TCIL: maps fused by a trained module, and distillation of answers and maps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.fusion import MapFusion, map_distance
from vbm_ptm.learners.teacher import softened_divergence
from vbm_ptm.randomness import seeded

TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3, 4), (2, 3, 4), 5))
IMAGES, LABELS = (
    torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)),
    torch.tensor([0, 2, 1, 4]),
)


def in_second_task(build: Callable[..., Learner], **settings: object) -> Learner:
    learner = build("tcil", capacity=0, **settings)
    learner.begin_task(TASKS[0])
    learner.end_task(TASKS[0], lambda: None)
    learner.begin_task(TASKS[1])
    learner.begin_epoch(25)
    return learner.train()


def test_map_distance__has_the_golden_value() -> None:
    maps = (torch.arange(16).double() / 16).reshape(1, 1, 4, 4)
    assert map_distance(maps, torch.zeros_like(maps)).item() == pytest.approx(0.286133, abs=1e-6)
    assert map_distance(maps[:, :, :1, :1], torch.zeros(1, 1, 1, 1).double()).item() == 0
    rounded = maps.bfloat16() / 3
    assert map_distance(rounded, torch.zeros_like(rounded)).item() == pytest.approx(0.286133 / 9, rel=1e-3)


def test_map_fusion__is_the_formula() -> None:
    with seeded(0):
        fusion, maps = MapFusion(32), torch.randn(3, 32, 5, 5)
    first, _, second = fusion.channels

    def squeeze(vectors: torch.Tensor) -> torch.Tensor:
        return (vectors @ first.weight.T).relu() @ second.weight.T

    strengths = (squeeze(maps.mean((2, 3))) + squeeze(maps.flatten(2).max(2).values)).sigmoid()
    attended = maps * strengths[:, :, None, None]
    summary = torch.cat([attended.mean(1, keepdim=True), attended.max(1, keepdim=True).values], dim=1)
    places = torch.nn.functional.conv2d(summary, fusion.places.weight, padding=3).sigmoid()
    torch.testing.assert_close(fusion(maps), (maps + attended * places).flatten(2).mean(2))
    assert torch.equal(fusion(maps), fusion(maps))  # nothing is drawn in a forward pass


def test_tcil__distils_answers_of_all_images_and_maps_of_old_classes(build: Callable[..., Learner]) -> None:
    learner = in_second_task(build)
    with torch.no_grad():
        for parameter in learner.backbone.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    output = learner(IMAGES, LABELS)
    old, new = learner.earlier[0].backbone.feature_map(IMAGES), learner.backbone.feature_map(IMAGES)
    expected = (
        0.5 * 0.5 * map_distance(new, old) * torch.tensor([1, 0, 1, 0])
    )  # half of the way to the full weight
    torch.testing.assert_close(output.auxiliary["maps"], expected)
    assert float(expected[0].detach()) > 0
    taught = learner.teacher(old)
    torch.testing.assert_close(
        output.auxiliary["answers"], 2 * softened_divergence(output.logits[:, :2], taught, temperature=2)
    )
    sum(value.sum() for value in output.auxiliary.values()).backward()
    assert all(
        parameter.grad is None for parameter in [*learner.teacher.parameters(), *learner.earlier.parameters()]
    )
    both = in_second_task(build, distils_new_maps=True)
    with torch.no_grad():
        next(iter(both.backbone.parameters())).add_(0.1)
    assert bool((both(IMAGES, LABELS).auxiliary["maps"] > 0).all())


def test_tcil__trains_its_fusion(build: Callable[..., Learner]) -> None:
    learner = in_second_task(build)
    learner(IMAGES, LABELS).logits.square().sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in learner.fusion.parameters())
    assert learner.query(IMAGES).shape == (4, 2 * learner.backbone.width)
    assert torch.equal(learner.predict(IMAGES), learner.predict(IMAGES))


def test_tcil__aligns_its_new_rows(build: Callable[..., Learner]) -> None:
    learner = in_second_task(build)
    learner.after_step()
    assert bool((learner.head.weight >= 0).all())
    learner.end_task(TASKS[1], lambda: None)
    lengths = torch.linalg.vector_norm(learner.head.weight.detach(), dim=1)
    assert float(lengths[2:].mean()) == pytest.approx(float(lengths[:2].mean()), rel=1e-5)
    assert not learner.teacher
