"""InfLoRA against golden numbers, hand values and what its updates must leave alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners import create_learner
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.inf_lora import Directions, free_directions, kept_share, updated_directions

Build = Callable[..., Learner]
GOLDEN = Path(__file__).parents[1] / "golden2"
TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3), (2, 3), 4), Task(2, (4,), (4,), 5))


class GivenSums:
    """Sums over images (N,3,32,32) that the test gives."""

    def __init__(self, images: Tensor) -> None:
        self.images = images
        self.transforms: list[str] = []

    @torch.no_grad()
    def sum(
        self, function: Callable[[Tensor], dict[str, Tensor]], transform: str = "eval"
    ) -> dict[str, Tensor]:
        self.transforms.append(transform)
        parts = [function(part) for part in self.images.split(2)]
        return {name: torch.stack([part[name].double() for part in parts]).sum(0) for name in parts[0]}


def images_of(task: Task, count: int = 4) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(task.index))


def moments_of(eigenvalues: list[float], *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = len(eigenvalues)
    vectors = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    return vectors @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ vectors.T


def test_directions__equal_the_reference_over_six_tasks() -> None:
    golden = load_file(GOLDEN / "inflora.safetensors")
    known: Directions | None = None
    num_tasks, rank = int(golden["num_tasks"]), int(golden["rank"])
    for task in range(num_tasks):
        own = {name: golden[f"task{task}.{name}"] for name in ("moment_before", "moment_after", "down_gram")}
        rows = free_directions(own["moment_before"], known, rank=rank)
        torch.testing.assert_close(rows.T @ rows / 3, own["down_gram"], atol=1e-12, rtol=0)
        share = kept_share(task, num_tasks=num_tasks, first=float(golden["lambda_first"]))
        assert share == pytest.approx(float(golden[f"task{task}.threshold"]))
        known = updated_directions(own["moment_after"], known, share=share)
        assert known.basis.shape[1] == int(golden[f"task{task}.num_directions"])
        assert known.are_left == bool(golden[f"task{task}.is_retain"])
        projector = known.basis @ known.basis.T
        torch.testing.assert_close(projector, golden[f"task{task}.projector"], atol=1e-12, rtol=0)


def test_inf_lora__forward_equals_the_reference() -> None:
    """The reference has a pair of matrices each for keys and values; here one pair holds both."""
    golden, tiny = load_file(GOLDEN / "lora_forward.safetensors"), load_file(GOLDEN / "tiny2_vit.safetensors")
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0)
    vit.double()
    vit.load_state_dict({key[4:]: value for key, value in tiny.items() if key.startswith("vit.")})
    settings = {"rank": 4}
    learner = create_learner("inf_lora", backbone=PromptableViT(vit.eval()), num_tasks=3, settings=settings)
    for task, expected in zip(TASKS, (None, "cls_without_task_2", "cls"), strict=True):
        learner.begin_task(task)
        learner.double()
        for index, update in enumerate(learner.updates[task.index]):
            keys, values = (
                {half: golden[f"inflora.{index}.{site}.{task.index}.{half}"] for half in "AB"}
                for site in "kv"
            )
            update.down.data = torch.cat([keys["A"], values["A"]])
            update.up.data = torch.block_diag(keys["B"], values["B"])
        if expected:
            cls = learner.query(tiny["images"])
            torch.testing.assert_close(cls, golden[f"inflora.{expected}"], atol=1e-12, rtol=1e-10)


def test_kept_share__grows_by_equal_steps_and_ends_at_one() -> None:
    assert [kept_share(task, num_tasks=4, first=0.6) for task in (0, 1, 2, 4, 9)] == pytest.approx(
        [0.6, 0.7, 0.8, 1, 1]
    )


@pytest.mark.parametrize(("share", "count"), [(0.7, 1), (0.95, 1), (0.96, 2), (0.999, 2)])
def test_updated_directions__of_the_first_task_hold_a_share_of_squared_values(
    share: float, count: int
) -> None:
    """One, two and three hold 16, 20 and 21 of 21: as many as stay below the share are kept, and one at least."""
    moment = torch.diag(torch.tensor([4.0, 2, 1, 0, 0, 0], dtype=torch.float64))
    known = updated_directions(moment, None, share=share)
    assert not known.are_left
    expected = torch.zeros(6, 6, dtype=torch.float64)
    expected[range(count), range(count)] = 1
    torch.testing.assert_close(known.basis @ known.basis.T, expected)


def test_updated_directions__of_a_first_task_that_takes_more_than_half_are_those_left() -> None:
    moment = torch.diag(torch.tensor([5.0, 4, 3, 2, 0.1, 0.1], dtype=torch.float64))
    known = updated_directions(moment, None, share=0.9997)  # four hold 54 of 54.02: less
    assert known.are_left
    expected = torch.diag(torch.tensor([0.0, 0, 0, 0, 1, 1], dtype=torch.float64))
    torch.testing.assert_close(known.basis @ known.basis.T, expected)


def test_free_directions__leave_alone_what_is_kept() -> None:
    moment = moments_of([6, 5, 4, 3, 2, 1, 0.5, 0.25])
    basis = torch.linalg.qr(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)).double()).Q
    rows = free_directions(moment, Directions(basis, are_left=False), rank=2)
    torch.testing.assert_close(rows @ basis, torch.zeros(2, 3).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(rows @ rows.T, torch.eye(2).double(), atol=1e-12, rtol=0)
    rows = free_directions(moment, Directions(basis, are_left=True), rank=2)
    torch.testing.assert_close(rows @ basis @ basis.T, rows, atol=1e-12, rtol=0)


def test_free_directions__where_fewer_are_left_than_the_rank_are_zeros() -> None:
    basis = torch.eye(6, dtype=torch.float64)[:, :1]
    rows = free_directions(moments_of([3, 2, 1, 1, 1, 1]), Directions(basis, are_left=True), rank=3)
    torch.testing.assert_close(rows[0], basis[:, 0])
    assert not bool(rows[1:].any())
    none = free_directions(moments_of([3, 2, 1, 1, 1, 1]), Directions(basis[:, :0], are_left=True), rank=3)
    assert torch.equal(none, torch.zeros(3, 6, dtype=torch.float64))


def test_inf_lora__a_trained_update_leaves_inputs_alone_whose_directions_are_kept(
    build: Build, train: Any
) -> None:
    learner = build("inf_lora", rank=4, kept_share=0.9)
    features = GivenSums(images_of(TASKS[0]))
    learner.begin_task(TASKS[0])
    learner.prepare_task(TASKS[0], features)
    train(learner, TASKS[0])
    learner.end_task(TASKS[0], features)
    assert features.transforms == ["weak", "weak"]
    assert not bool(learner.are_left.any())
    learner.begin_task(TASKS[1])
    learner.prepare_task(TASKS[1], GivenSums(images_of(TASKS[1])))
    train(learner, TASKS[1])
    for index, update in enumerate(learner.updates[1]):
        count = int(learner.num_directions[index])
        kept = learner.bases[index, :, :count]
        assert 1 <= count <= 24
        assert float(update().detach().abs().max()) > 1e-3
        torch.testing.assert_close(update() @ kept, torch.zeros(96, count), atol=1e-6, rtol=0)
        torch.testing.assert_close(update.down @ update.down.T, torch.eye(4) / 3, atol=1e-6, rtol=0)


def test_inf_lora__looks_at_the_inputs_of_attention_of_the_network_as_it_is(build: Build, train: Any) -> None:
    learner = build("inf_lora", rank=4, moments_transform="eval")
    images = images_of(TASKS[0])
    features = GivenSums(images)
    learner.begin_task(TASKS[0])
    learner.prepare_task(TASKS[0], features)
    train(learner, TASKS[0])
    assert features.transforms == ["eval"]
    seen: list[Tensor] = []
    plain = copy.deepcopy(learner.backbone)
    with torch.no_grad():  # the sum of the updates, merged into the weights of a model of timm's
        for index, block in enumerate(plain.vit.blocks):
            block.attn.qkv.weight[48:] += learner.updates[0][index]()
            block.norm1.register_forward_hook(lambda module, inputs, output: seen.append(output))
        plain.vit(images)
    for moment, inputs in zip(learner._moments(features), seen, strict=True):
        rows = inputs.flatten(0, 1).double()
        torch.testing.assert_close(moment, rows.T @ rows / len(rows), atol=1e-5, rtol=1e-5)


def test_inf_lora__tells_how_many_directions_it_keeps(build: Build) -> None:
    learner = build("inf_lora", rank=2)
    learner.begin_task(TASKS[0])
    learner.num_directions.copy_(torch.tensor([3, 4]))
    learner.are_left.copy_(torch.tensor([False, True]))
    assert learner.report(TASKS[0]) == {"kept_directions": [3, 44]}
