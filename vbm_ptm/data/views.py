"""The views of a step: each sample is decoded once, and V views of it are drawn.

Views are a tensor axis, so a group cannot be torn. Each view has its own seed: it is the same in any worker, on any
rank and with any V.
Shapes: G groups, V views, C colour channels, H x W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from vbm_ptm.data.view_batch import Integers, chunk
from vbm_ptm.randomness import seed_for, seeded

if TYPE_CHECKING:
    from vbm_ptm.data.image_split import ImageSplit
    from vbm_ptm.data.view_transforms import ViewTransforms


@dataclass(frozen=True)
class ViewBatch:
    """The groups of one step that belong to this rank.

    Attributes:
        images: (G,V,C,H,W) uint8, view 0 weak, the others strong.
        labels: (G,) int64 class indices.
        sample_ids: (G,) int64 row numbers in the whole training split.
        num_global_groups: Groups of the step over all ranks; the mean of a loss is taken over these.
        slots: (G,) int64, for a replay draw: where the buffer holds each sample; None for current samples.
        replays: Draws of past samples that the step has besides these current ones.
        exemplars: Samples of the same pass that have another number of views; None where all have V.
        strong_seeds: (G,V) int64, of weak views that the device makes strong; -1 for others. None: there are none.
    """

    images: Tensor
    labels: Tensor
    sample_ids: Tensor
    num_global_groups: int
    slots: Tensor | None = None
    replays: tuple[ViewBatch, ...] = ()
    exemplars: ViewBatch | None = None
    strong_seeds: Tensor | None = None

    @property
    def num_groups(self) -> int:
        """G on this rank."""
        return self.images.shape[0]

    @property
    def num_views(self) -> int:
        """V."""
        return self.images.shape[1]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ViewBatch:
        """Return the batch with images, labels and slots on a device; row numbers and seeds stay on the CPU."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ViewBatch:
        """Return the batch with images and labels in page-locked memory (a data loader calls this)."""
        return self._map(Tensor.pin_memory)

    def micro_batches(self, count: int) -> list[ViewBatch]:
        """Return parts of whole groups whose sizes differ by at most one; some may be empty."""
        return [self._micro_batch(number, count) for number in range(count)]

    def flattened(self, transforms: ViewTransforms) -> tuple[Tensor, ...]:
        """Return the input images (N,C,H,W), labels (N,) and, of a draw, slots (N,), a group's views side by side.

        Those of exemplars come last.
        """
        columns = (self.labels,) if self.slots is None else (self.labels, self.slots)
        views = transforms.strengthen(self.images, self.strong_seeds)
        images = transforms.normalization(views.flatten(0, 1))
        own = (images, *(column.repeat_interleave(self.num_views) for column in columns))
        if self.exemplars is None:
            return own
        return tuple(map(torch.cat, zip(own, self.exemplars.flattened(transforms), strict=True)))

    def _micro_batch(self, number: int, count: int) -> ViewBatch:
        own = slice(*chunk(self.num_groups, number, count))
        return ViewBatch(
            self.images[own],
            self.labels[own],
            self.sample_ids[own],
            self.num_global_groups,
            slots=None if self.slots is None else self.slots[own],
            replays=tuple(draw._micro_batch(number, count) for draw in self.replays),
            exemplars=None if self.exemplars is None else self.exemplars._micro_batch(number, count),
            strong_seeds=None if self.strong_seeds is None else self.strong_seeds[own],
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> ViewBatch:
        return replace(
            self,
            images=function(self.images),
            labels=function(self.labels),
            slots=None if self.slots is None else function(self.slots),
            replays=tuple(draw._map(function) for draw in self.replays),
            exemplars=None if self.exemplars is None else self.exemplars._map(function),
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
    """What one rank loads for one step; it is sent to the workers, which therefore always know the draw."""

    draw: int
    positions: list[int]
    num_global_groups: int
    replays: tuple[ReplayPart, ...] = ()
    exemplars: StepPart | None = None


@dataclass(eq=False)
class MultiViewDataset(Dataset[tuple[Tensor, int, int]]):
    """The samples of one task, each decoded once and shown in V views, seeded by (seed, task, draw, row, view).

    Attributes:
        split: The training split.
        rows: Row numbers of the task, one per position.
        class_indices: Class index of every row of the split.
        transforms: Weak and strong view.
        num_views: V, as the sampler has it.
        seed: Training seed.
        task_index: Index of the task.
        strong_share: Fraction of the images that are strong, with one view.
        num_own: Positions with V views; None for all.
        num_exemplar_views: Views at the positions after them.
    """

    split: ImageSplit
    _: KW_ONLY
    rows: Integers
    class_indices: Integers
    transforms: ViewTransforms
    num_views: int
    seed: int
    task_index: int
    strong_share: float = 0.0
    num_own: int | None = None
    num_exemplar_views: int = 1

    def __post_init__(self) -> None:
        check_class_indices(self.split, self.class_indices)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int, int]:
        """Return views (V,C,H,W), class index and row number for (draw, position)."""
        draw, position = key
        row = int(self.rows[position])
        image = self.split.image(row)
        is_own = self.num_own is None or position < self.num_own
        num_views = self.num_views if is_own else self.num_exemplar_views
        views = [self._view(image, draw=draw, row=row, view=view) for view in range(num_views)]
        return torch.stack(views), int(self.class_indices[row]), row

    def __getitems__(self, part: StepPart) -> ViewBatch:
        """Return all groups of one rank's part of a step; a data loader calls this with its part."""
        batch = self._groups(part, first=0)
        exemplars = None if part.exemplars is None else self._groups(part.exemplars, first=self.num_own or 0)
        replays = tuple(self._replay(replayed, like=batch.images) for replayed in part.replays)
        return replace(batch, replays=replays, exemplars=exemplars)

    def _groups(self, part: StepPart, *, first: int) -> ViewBatch:
        # A rank without groups runs on an empty batch: any sample of the kind gives its shape.
        samples = [self[part.draw, position] for position in part.positions or [first]]
        images = torch.stack([views for views, _, _ in samples])[: len(part.positions)]
        samples = samples[: len(part.positions)]
        rows = [row for _, _, row in samples]
        return ViewBatch(
            images,
            torch.tensor([label for _, label, _ in samples], dtype=torch.int64),
            torch.tensor(rows, dtype=torch.int64),
            part.num_global_groups,
            strong_seeds=self._strong_seeds(rows, "view", draw=part.draw, num_views=images.shape[1]),
        )

    def _replay(self, part: ReplayPart, *, like: Tensor) -> ViewBatch:
        """Return a draw of past samples; a row that comes back within an epoch has new views each time."""
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
            strong_seeds=self._strong_seeds(part.rows, purpose, draw=part.step, num_views=part.num_views),
        )

    def _view(self, image: Image.Image, purpose: str = "view", *, draw: int, row: int, view: int) -> Tensor:
        here = self._is_strong(row, draw, view) and not self.transforms.strong_on_device
        transform = self.transforms.strong if here else self.transforms.weak
        with seeded(self._seed(purpose, draw=draw, row=row, view=view)):
            return transform(image)

    def _seed(self, purpose: str, *, draw: int, row: int, view: int) -> int:
        return seed_for(purpose, seed=self.seed, task=self.task_index, epoch=draw, sample=row, view=view)

    def _strong_seeds(self, rows: list[int], purpose: str, *, draw: int, num_views: int) -> Tensor | None:
        """Return the seeds (G,V) of what the device adds to weak views, -1 where it adds nothing."""
        if not self.transforms.strong_on_device:
            return None
        seeds = [
            self._seed(f"strong {purpose}", draw=draw, row=row, view=view)
            if self._is_strong(row, draw, view)
            else -1
            for row in rows
            for view in range(num_views)
        ]
        return torch.tensor(seeds, dtype=torch.int64).view(len(rows), num_views)

    def _is_strong(self, row: int, draw: int, view: int = 0) -> bool:
        """Return whether a view is strong: all but the first are, and the first one in a share of the draws.

        Over any number of draws a sample keeps its share to within one image.
        """
        if view or not self.strong_share:
            return view > 0
        start = seed_for("strong_share", seed=self.seed, task=self.task_index, sample=row) / 2**63
        return math.floor(start + (draw + 1) * self.strong_share) > math.floor(
            start + draw * self.strong_share
        )


def check_class_indices(split: ImageSplit, class_indices: Integers) -> None:
    """Refuse class indices of a task in place of those of the whole split.

    Raises:
        ValueError: There is not exactly one for every row of the split.
    """
    if len(class_indices) != len(split):
        raise ValueError(
            f"{len(class_indices)} class indices for a split of {len(split)} rows: "
            "there must be one for every row of the split, not of the task"
        )
