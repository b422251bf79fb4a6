"""InfLoRA: low-rank updates of keys and values, in subspaces that do not affect old tasks.

Liang, Li: "InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning", CVPR 2024 (section 3; repository
liangyanshuo/InfLoRA). Before a task is trained, its images show which directions the inputs of each attention take;
what earlier tasks need is projected out, and the leading directions that are left become the frozen half of the task's
update. Training moves the other half and the task's head. After it, the directions of the task join those to be kept
(DualGPM: Liang, Li, "Adaptive Plasticity Improvement for Continual Learning", CVPR 2023).

Differs from the official code in:
  - If the first task alone takes more than half of the directions, those that it leaves are stored; the official code
    stores the leading ones but treats them as those left.
  - A direction that does not exist, where fewer are left than the rank, is a row of zeros, not an arbitrary vector.
  - Heads start from a truncated normal with std 0.02 and bias 0, as with the other learners here.
  - Updates of all tasks are summed when they are used; nothing is merged into the weights.
  - In the domain-incremental scenario, which the paper does not treat, heads are shared.
Like the official code, it weighs a direction by squared singular values of a second moment, the fourth power
of the inputs: fewer directions are kept than gradient projection memory keeps for the same threshold.

Shapes: N images, T tokens, D width, R rank, B blocks, k directions.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones import PromptableViT, evaluating
from vbm_ptm.backbones.adaptations import Adaptation, LowRank
from vbm_ptm.backbones.blocks import BlockChange, TokenMap
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput, ParameterGroup


class InfLoRAConfig(LearnerConfig):
    """Settings of InfLoRA; the defaults are the official ones for CIFAR-100.

    Attributes:
        rank: Rank of a task's update.
        kept_share: Of what the inputs hold, the share whose directions are kept after the first task; it grows by equal
            steps with the tasks planned and would reach 1 after the last.
        head_learning_rate_scale: Learning rate of the heads over that of the updates.
        moments_transform: How images are prepared when their directions are looked for: "weak", as for training with
            one view (official), or "eval".
    """

    feature_passes: ClassVar[int] = 2
    name: str = "inf_lora"
    rank: int = Field(default=10, ge=1)
    kept_share: float = Field(default=0.95, gt=0, le=1)
    head_learning_rate_scale: float = Field(default=1.0, gt=0)
    moments_transform: Literal["weak", "eval"] = "weak"


class Directions(NamedTuple):
    """Orthonormal directions of the inputs of one block.

    Attributes:
        basis: (D,k) with k <= D / 2.
        are_left: Whether they are those that no task has needed, and all others are to be kept; else they are to be
            kept.
    """

    basis: Tensor
    are_left: bool


class InfLoRA(Learner):
    """Frozen backbone, a low-rank update and a head for each task, directions that are to be kept."""

    config_class = InfLoRAConfig
    trained_parts = "a low-rank update per task, heads"
    backbone: PromptableViT
    bases: Tensor
    num_directions: Tensor
    are_left: Tensor

    def __init__(self, backbone: PromptableViT, config: InfLoRAConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        depth, width = backbone.depth, backbone.width
        self.updates = nn.ModuleList()
        self.heads = TaskHeads(backbone.width)
        # Of each block the directions in the first columns, and zeros: the size is the same after every task.
        self.register_buffer("bases", torch.zeros(depth, width, width // 2))
        self.register_buffer("num_directions", torch.zeros(depth, dtype=torch.long))
        self.register_buffer("are_left", torch.zeros(depth, dtype=torch.bool))

    def begin_task(self, task: Task) -> None:
        """Add an update, which changes nothing so far, and a head; freeze what belongs to finished tasks alone."""
        super().begin_task(task)
        self.updates.requires_grad_(False)
        width = self.backbone.width
        both = torch.empty(2 * width, width, device="meta")  # of keys and values, one under the other
        updates = [LowRank(both, self.config.rank) for _ in range(self.backbone.depth)]
        for update in updates:
            update.down.requires_grad_(False)
        self.updates.append(nn.ModuleList(updates))
        self.heads.append(len(task.new_classes))
        self.heads.train_only(task.classes)

    def prepare_task(self, task: Task, features: Features) -> None:
        """Give the task's updates the leading directions of its inputs that are free."""
        moments = self._moments(features)
        for index, update in enumerate(self._newest()):
            known = self._directions(index) if task.index else None
            rows = free_directions(moments[index], known, rank=self.config.rank) / math.sqrt(3)
            update.down.data.copy_(rows)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the halves of the task's updates that are trained, and the heads that hold its classes."""
        return [
            ParameterGroup("updates", [update.up for update in self._newest()]),
            ParameterGroup("heads", self.heads.trainable_parameters(), self.config.head_learning_rate_scale),
        ]

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) over the task's classes."""
        return LearnerOutput(self.heads(self._encode(images))[:, self.task_columns], self.task_columns, {})

    def query(self, images: Tensor) -> Tensor:
        """Return the class token (N, D) of the updated backbone, without gradient and in eval mode."""
        with evaluating(self):
            return self._encode(images)

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return logits (N, seen)."""
        scores: Tensor = self.heads(self.query(images) if query is None else query)
        return scores

    def end_task(self, task: Task, features: Features) -> None:
        """Keep the directions of the task's inputs, as the trained network has them."""
        moments = self._moments(features)
        share = kept_share(task.index, num_tasks=self.num_tasks, first=self.config.kept_share)
        for index in range(self.backbone.depth):
            known = self._directions(index) if task.index else None
            basis, are_left = updated_directions(moments[index], known, share=share)
            self.bases[index].zero_()
            self.bases[index, :, : basis.shape[1]] = basis
            self.num_directions[index] = basis.shape[1]
            self.are_left[index] = are_left

    def report(self, task: Task) -> dict[str, Any]:
        """Return how many directions each block keeps for the tasks so far."""
        width = self.backbone.width
        counts = zip(self.num_directions.tolist(), self.are_left.tolist(), strict=True)
        return {"kept_directions": [width - count if is_left else count for count, is_left in counts]}

    def _directions(self, index: int) -> Directions:
        """Return the directions of a block, float64 on the CPU."""
        basis = self.bases[index, :, : int(self.num_directions[index])]
        return Directions(basis.to("cpu", torch.float64), bool(self.are_left[index]))

    def _moments(self, features: Features) -> list[Tensor]:
        """Return for every block the mean of x x' (D,D) over the inputs x of its attention, all images and tokens."""
        sums = features.sum(self._input_moments, self.config.moments_transform)
        return [sums[str(index)] / sums["tokens"] for index in range(self.backbone.depth)]

    def _input_moments(self, images: Tensor) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}

        def watch(index: int) -> TokenMap:
            def look(tokens: Tensor) -> Tensor:
                with torch.autocast(tokens.device.type, enabled=False):
                    rows = tokens.flatten(0, 1).to(torch.promote_types(tokens.dtype, torch.float32))
                    sums[str(index)] = rows.T @ rows
                sums["tokens"] = torch.tensor(float(len(rows)))
                return tokens

            return look

        watching = {
            index: BlockChange(affines={"norm1": watch(index)}) for index in range(self.backbone.depth)
        }
        with evaluating(self):
            self.backbone.encode(images, adaptation=self._adaptation() | Adaptation(watching))
        return sums

    def _encode(self, images: Tensor) -> Tensor:
        return self.backbone.encode(images, adaptation=self._adaptation())[:, 0]

    def _adaptation(self) -> Adaptation:
        """Return the sum of all tasks' updates of keys and values; the rows of queries (the first D) stay."""
        width = self.backbone.width
        changes = {}
        for index in range(self.backbone.depth):
            total: Any = sum(updates[index]() for updates in self._by_task())
            changes[index] = BlockChange(updates={"qkv": F.pad(total, (0, 0, width, 0))})
        return Adaptation(changes)

    def _by_task(self) -> list[Any]:
        return list(self.updates)

    def _newest(self) -> list[Any]:
        return list(self._by_task()[-1])


def kept_share(task_index: int, *, num_tasks: int, first: float) -> float:
    """Return the share of what the inputs hold whose directions are kept; at most 1, beyond the tasks planned too."""
    return first + (1 - first) * min(task_index / num_tasks, 1.0)


def free_directions(moment: Tensor, known: Directions | None, *, rank: int) -> Tensor:
    """Return the leading directions (R,D) of a second moment (D,D) among those that are free; zeros where none is left.

    Args:
        moment: The mean of x x' over the inputs of the new task, symmetric.
        known: From the tasks before; None for the first task, to which all directions are free.
        rank: R.
    """
    if known is None:
        free = moment
    else:
        inside = known.basis @ (known.basis.T @ moment)
        free = inside if known.are_left else moment - inside
    left, _ = _leading(free, rank)
    rows: Tensor = F.pad(left.T, (0, 0, 0, rank - left.shape[1]))
    return rows


def updated_directions(moment: Tensor, known: Directions | None, *, share: float) -> Directions:
    """Return the directions after a task.

    Args:
        moment: The mean of x x' (D,D) over the inputs of the task, from the trained network.
        known: From the tasks before; None after the first task.
        share: Part of the sum of squared singular values of the moment that the kept directions hold at least, up to
            the last direction.
    """
    scales = torch.linalg.svdvals(moment).square()
    total = scales.sum()
    width = len(moment)
    if known is None:
        count = max(int((scales.cumsum(0) / total < share).sum()), 1)
        kept = _leading(moment, count)[0]
        return Directions(kept, are_left=False) if 2 * count <= width else _without(kept)
    inside = known.basis @ (known.basis.T @ moment)
    if known.are_left:
        # What the directions hold that are left; the leading ones are given away until that is little enough.
        leading, held = _leading(inside, known.basis.shape[1])
        count = _first_at_most(held.square() / total, 1 - share, strictly=True)
        remaining = known.basis - leading[:, :count] @ (leading[:, :count].T @ known.basis)
        return Directions(_leading(remaining, known.basis.shape[1] - count)[0], are_left=True)
    leading, missing = _leading(moment - inside, width - known.basis.shape[1])
    count = _first_at_most(missing.square() / total, 1 - share, strictly=False)
    kept = torch.cat([known.basis, leading[:, :count]], dim=1)
    return Directions(kept, are_left=False) if 2 * kept.shape[1] <= width else _without(kept)


def _first_at_most(parts: Tensor, limit: float, *, strictly: bool) -> int:
    """Return how many leading parts (k,) must go until the sum of the others is at most, or below, the limit."""
    remaining = parts.sum() - torch.cat([parts.new_zeros(1), parts.cumsum(0)])
    too_much = remaining >= limit if strictly else remaining > limit
    return min(int(too_much.sum()), len(parts))


def _leading(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return at most this many left singular vectors (D,k) and singular values (k,), those above rounding errors.

    The largest component of each vector is positive, so that the last bit of the matrix does not decide its sign.
    """
    vectors, scales, _ = torch.linalg.svd(matrix, full_matrices=False)
    floor = max(matrix.shape) * torch.finfo(matrix.dtype).eps * float(scales.amax()) if len(scales) else 0.0
    count = min(count, int((scales > floor).sum()))
    vectors = vectors[:, :count]
    if count:
        vectors = vectors * vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True)).sign()
    return vectors, scales[:count]


def _without(basis: Tensor) -> Directions:
    """Return the directions that a basis (D,k) leaves."""
    vectors = torch.linalg.svd(basis, full_matrices=True).U[:, basis.shape[1] :]
    return Directions(vectors, are_left=True)
