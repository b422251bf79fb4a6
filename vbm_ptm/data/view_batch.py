"""The view batch: which samples make a step, and their views.

A step has G groups = G samples = G * V images. An epoch is N image presentations in ceil(N / B) steps and
visits N / V samples; a cycle is V epochs and visits every sample once. Views are a tensor axis, so a group
cannot be torn. What a step holds depends on seed, task and epoch alone, never on workers or ranks.
Shapes: G groups, V views, N images, C colour channels, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor
from torch.utils.data import Dataset

from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seed_for, seeded
from vbm_ptm.settings import Settings

if TYPE_CHECKING:
    from vbm_ptm.data.image_split import ImageSplit
    from vbm_ptm.data.transforms import ViewTransforms

Integers = npt.NDArray[np.int64]


Share = Annotated[float, Field(ge=0, le=1)]


class ViewBatchConfig(Settings):
    """Settings of the view batch.

    Attributes:
        num_views: V; 1 is the plain baseline.
        allow_partial_cycle: Permit fewer epochs than views, which leaves samples without any training.
        order: What a view batch repeats. "sample": V views of each sample in one step (the paper's VBM-S). "class": the
            samples of a V-th of the classes, V times in an epoch, one view a time (VBM-C of its appendix, a control).
        views_for: Of learners that draw past samples beside each step: which samples have V views, "all", the "current"
            ones or those of the "buffer"; the others have one weak view, as in the baseline. A step has as many images
            in any case.
        strong_share: Part of the images that are strong where a sample has one view a time: the control without replay,
            which with (V - 1) / V shows as many strong images as V views do. Every sample keeps the share over time.
        query_view: What chooses prompts in training: each image's own query, or that of the weak view for its group.
        pull_view: What keys are pulled towards in training: each image's own query, or that of the weak view.
    """

    num_views: PositiveInt = 4
    allow_partial_cycle: bool = False
    order: Literal["sample", "class"] = "sample"
    views_for: Literal["all", "current", "buffer"] = "all"
    strong_share: Share = 0.0
    query_view: Literal["own", "weak"] = "own"
    pull_view: Literal["own", "weak"] = "own"

    @property
    def views_per_group(self) -> int:
        """Views of a current sample that stand side by side in a step."""
        if self.views_for != "all" and self.order == "class":
            raise ValueError(
                f"views_for is {self.views_for}, but with order 'class' no sample has views side by side"
            )
        return self.num_views if self.order == "sample" and self.views_for != "buffer" else 1

    @property
    def views_per_replay(self) -> int:
        """Views of a past sample that stand side by side in a draw."""
        return self.num_views if self.order == "sample" and self.views_for != "current" else 1

    @property
    def cycle_length(self) -> int:
        """Epochs in which every sample of a task is visited equally often, if it has enough of them."""
        return 1 if self.views_for == "buffer" else self.num_views

    @property
    def is_baseline(self) -> bool:
        """Whether every sample is shown once an epoch, in its weak view."""
        return self.num_views == 1 and not self.strong_share

    @model_validator(mode="after")
    def _check_share(self) -> ViewBatchConfig:
        if self.strong_share and self.views_per_group > 1:
            raise ValueError(
                f"strong_share is {self.strong_share:g}, but {self.num_views} views of a sample stand side by side, "
                "one weak and the others strong: give it with num_views 1 or order 'class'"
            )
        return self


def check_batch_arithmetic(batch_size: int, num_views: int) -> None:
    """Refuse a batch size that V does not divide or that leaves fewer than two groups a step.

    With one group a step, or torn ones, an epoch would not have ceil(N / B) steps.
    """
    if num_views < 1:
        raise UsageError(f"view_batch.num_views is {num_views}, but must be at least 1")
    num_groups, remainder = divmod(batch_size, num_views)
    if not remainder and num_groups >= 2:
        return
    below = max(num_groups, 2) * num_views
    raise UsageError(
        f"batch size {batch_size} (images per step over all ranks) does not hold at least two whole groups "
        f"of {num_views} views; the nearest batch sizes that do are {below} and {below + num_views}"
    )


def effective_views(num_samples: int, num_views: int) -> int:
    """Return the number of views of a task with this number of samples: at most one for each of them."""
    return max(1, min(num_samples, num_views))


class ViewBatchSampler:
    """Positions of the samples of every step of an epoch, over all ranks.

    One permutation serves a cycle of V epochs, each epoch a slice of it, cut into ceil(N / B) steps whose
    sizes differ by at most one. With V = 1 it is a seeded shuffle cut into batches, the last one short.

    Args:
        num_samples: Samples of the task.
        batch_size: B, images per step.
        num_views: V; a task with fewer samples uses ``effective_views``.
        seed: Training seed.
        task_index: Tasks of one size get orders of their own.
    """

    def __init__(
        self, num_samples: int, batch_size: int, num_views: int, seed: int, task_index: int = 0
    ) -> None:
        check_batch_arithmetic(batch_size, num_views)
        if num_samples < 1:
            raise UsageError(f"task {task_index} has no training images")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.num_views = effective_views(num_samples, num_views)
        self.seed = seed
        self.task_index = task_index
        self.epoch = 0

    @property
    def cycle_length(self) -> int:
        """Epochs after which every sample has been visited equally often."""
        return self.num_views

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, that ``steps`` describes."""
        self.epoch = epoch

    def draw_of(self, step: int) -> int:
        """Return the number under which the views of a step are drawn: a sample gets another one at each visit."""
        return self.epoch

    def __len__(self) -> int:
        """Return the number of steps in the epoch."""
        return math.ceil(self.num_samples / self.batch_size)

    def steps(self) -> list[list[int]]:
        """Return the distinct positions in 0..num_samples-1 of each step of the epoch."""
        cycle, phase = divmod(self.epoch, self.num_views)
        order = self._permutation(cycle)
        if self.num_views == 1:
            return [order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)]
        first, last = chunk(len(order), phase, self.num_views)
        visited = order[first:last]
        bounds = (chunk(len(visited), step, len(self)) for step in range(len(self)))
        return [visited[start:stop] for start, stop in bounds]

    def _permutation(self, cycle: int) -> list[int]:
        generator = torch.Generator()
        generator.manual_seed(seed_for("sampler", seed=self.seed, task=self.task_index, epoch=cycle))
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        return order


def chunk(length: int, index: int, num_chunks: int) -> tuple[int, int]:
    """Return the bounds of one of the contiguous chunks of 0..length-1, whose sizes differ by at most one."""
    return length * index // num_chunks, length * (index + 1) // num_chunks


@dataclass(frozen=True)
class ViewBatch:
    """The groups of one step that belong to this rank.

    Attributes:
        images: (G,V,C,H,W) uint8, view 0 weak, the others strong.
        labels: (G,) int64 class indices.
        sample_ids: (G,) int64 row numbers in the whole training split.
        num_global_groups: Groups of the step over all ranks; the mean of a loss is taken over these.
        slots: (G,) int64 of a replay draw: where the buffer holds each sample; None for current samples.
        replays: Draws of past samples that the step has beside these current ones.
    """

    images: Tensor
    labels: Tensor
    sample_ids: Tensor
    num_global_groups: int
    slots: Tensor | None = None
    replays: tuple[ViewBatch, ...] = ()

    @property
    def num_groups(self) -> int:
        """G of this rank."""
        return self.images.shape[0]

    @property
    def num_views(self) -> int:
        """V."""
        return self.images.shape[1]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ViewBatch:
        """Return the batch with images, labels and slots on a device; row numbers stay where they are read."""
        return self._map(
            lambda tensor: tensor.to(device, non_blocking=non_blocking),
            lambda replayed: replayed.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> ViewBatch:
        """Return the batch with images and labels in page-locked memory (a data loader calls this)."""
        return self._map(Tensor.pin_memory, ViewBatch.pin_memory)

    def groups(self, bounds: slice) -> ViewBatch:
        """Return some of the groups, without replays."""
        slots = None if self.slots is None else self.slots[bounds]
        return ViewBatch(
            self.images[bounds], self.labels[bounds], self.sample_ids[bounds], self.num_global_groups, slots
        )

    def _map(
        self, of_tensor: Callable[[Tensor], Tensor], of_replay: Callable[[ViewBatch], ViewBatch]
    ) -> ViewBatch:
        return replace(
            self,
            images=of_tensor(self.images),
            labels=of_tensor(self.labels),
            slots=None if self.slots is None else of_tensor(self.slots),
            replays=tuple(of_replay(replayed) for replayed in self.replays),
        )


class ReplayPart(NamedTuple):
    """One draw of past samples for a step, or one rank's part of it.

    Attributes:
        step: Step of the task, over all its epochs.
        draw: Which of the step's draws.
        rows: Row numbers in the training split.
        slots: Where the buffer holds them.
        num_views: Views of each.
        num_global_groups: Samples of the draw over all ranks.
    """

    step: int
    draw: int
    rows: list[int]
    slots: list[int]
    num_views: int
    num_global_groups: int

    def of_rank(self, rank: int, num_ranks: int) -> ReplayPart:
        """Return the part of one rank."""
        first, last = chunk(len(self.rows), rank, num_ranks)
        return self._replace(rows=self.rows[first:last], slots=self.slots[first:last])


class StepPart(NamedTuple):
    """What one rank loads for one step; travels to the workers, which therefore always know the draw."""

    draw: int
    positions: list[int]
    num_global_groups: int
    replays: tuple[ReplayPart, ...] = ()


class MultiViewDataset(Dataset[tuple[Tensor, int, int]]):
    """The samples of one task, decoded once and drawn as V views.

    Every view has a seed of its own from (seed, task, draw, row, view): it is the same in any worker, on
    any rank and with any V.

    Args:
        split: The training split.
        rows: Row numbers of the task, one per position.
        class_indices: Class index of every row of the split.
        transforms: Weak and strong view.
        num_views: V, as the sampler has it.
        seed: Training seed.
        task_index: Index of the task.
        strong_share: Part of the images that are strong, with one view.
    """

    def __init__(
        self,
        split: ImageSplit,
        *,
        rows: Integers,
        class_indices: Integers,
        transforms: ViewTransforms,
        num_views: int,
        seed: int,
        task_index: int,
        strong_share: float = 0.0,
    ) -> None:
        check_class_indices(split, class_indices)
        self.split = split
        self.rows = np.asarray(rows)
        self.class_indices = class_indices
        self.transforms = transforms
        self.num_views = num_views
        self.seed = seed
        self.task_index = task_index
        self.strong_share = strong_share

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int, int]:
        """Return views (V,C,H,W), class index and row number for (draw, position)."""
        draw, position = key
        row = int(self.rows[position])
        image = self.split.image(row)
        views = [self._view(image, draw=draw, row=row, view=view) for view in range(self.num_views)]
        return torch.stack(views), int(self.class_indices[row]), row

    def __getitems__(self, part: StepPart) -> ViewBatch:
        """Return all groups of one rank's part of a step; a data loader calls this with what it was told."""
        # A rank without groups runs on an empty batch: any sample tells its shape.
        samples = [self[part.draw, position] for position in part.positions or [0]]
        images = torch.stack([views for views, _, _ in samples])[: len(part.positions)]
        samples = samples[: len(part.positions)]
        return ViewBatch(
            images,
            torch.tensor([label for _, label, _ in samples], dtype=torch.int64),
            torch.tensor([row for _, _, row in samples], dtype=torch.int64),
            part.num_global_groups,
            replays=tuple(self._replay(replayed, like=images) for replayed in part.replays),
        )

    def _replay(self, part: ReplayPart, *, like: Tensor) -> ViewBatch:
        """Return a draw of past samples; a row that comes back within an epoch has other views each time."""
        purpose = f"replay view {part.draw}"
        groups = [
            torch.stack(
                [
                    self._view(image, purpose, draw=part.step, row=row, view=view)
                    for view in range(part.num_views)
                ]
            )
            for row, image in ((row, self.split.image(row)) for row in part.rows)
        ]
        return ViewBatch(
            torch.stack(groups) if groups else like.new_zeros(0, part.num_views, *like.shape[2:]),
            torch.tensor([int(self.class_indices[row]) for row in part.rows], dtype=torch.int64),
            torch.tensor(part.rows, dtype=torch.int64),
            part.num_global_groups,
            slots=torch.tensor(part.slots, dtype=torch.int64),
        )

    def _view(self, image: Image.Image, purpose: str = "view", *, draw: int, row: int, view: int) -> Tensor:
        is_strong = view > 0 or self._is_strong(row, draw)
        transform = self.transforms.strong if is_strong else self.transforms.weak
        with seeded(
            seed_for(purpose, seed=self.seed, task=self.task_index, epoch=draw, sample=row, view=view)
        ):
            return transform(image)

    def _is_strong(self, row: int, draw: int) -> bool:
        """Return whether a single view is strong: over any number of draws a sample keeps its share, to one image."""
        if not self.strong_share:
            return False
        start = seed_for("strong_share", seed=self.seed, task=self.task_index, sample=row) / 2**63
        return math.floor(start + (draw + 1) * self.strong_share) > math.floor(
            start + draw * self.strong_share
        )


def check_class_indices(split: ImageSplit, class_indices: Integers) -> None:
    """Refuse class indices of a task where those of the whole split are needed.

    Raises:
        ValueError: There is not one for every row of the split.
    """
    if len(class_indices) != len(split):
        raise ValueError(
            f"{len(class_indices)} class indices for a split of {len(split)} rows: "
            "there must be one for every row of the split, not of the task"
        )
