"""The view batch: which samples make a step, their views, and the loaders that bring them.

A step has G groups = G samples = G * V images. An epoch is N image presentations in ceil(N / B) steps and
visits N / V samples; a cycle is V epochs and visits every sample once. Views are a tensor axis, so a group
cannot be torn. What a step holds depends on seed, task and epoch alone, never on workers or ranks.
Shapes: G groups, V views, N images, C colour channels, H x W pixels.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seed_for, seeded
from vbm_ptm.settings import Settings

if TYPE_CHECKING:
    from vbm_ptm.data.reading.datasets import ImageSplit
    from vbm_ptm.data.transforms import ViewTransforms

Integers = npt.NDArray[np.int64]
Context = Literal["fork", "spawn", "forkserver"]


class ViewBatchConfig(Settings):
    """Settings of the view batch.

    Attributes:
        num_views: V; 1 is the plain baseline.
        allow_partial_cycle: Permit fewer epochs than views, which leaves samples without any training.
    """

    num_views: PositiveInt = 4
    allow_partial_cycle: bool = False


class LoaderConfig(Settings):
    """Settings of the loaders; none of them changes what is loaded.

    Attributes:
        num_workers: Processes that decode and augment; 0 does it in the main process. Without a number: none
            when the CPU also trains, else up to 8.
        evaluation_batch_size: Images per batch in evaluation and feature extraction.
        multiprocessing_context: How worker processes start; the platform's default without it.
    """

    num_workers: NonNegativeInt | None = None
    evaluation_batch_size: PositiveInt = 128
    multiprocessing_context: Context | None = None

    def for_device(self, device_type: str) -> LoaderConfig:
        """Return settings that name a number of workers, chosen by the device that trains ("cpu", "cuda", …)."""
        if self.num_workers is not None:
            return self
        return self.model_copy(
            update={"num_workers": 0 if device_type == "cpu" else min(8, os.cpu_count() or 1)}
        )


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
    """Return the number of views that a task of so many samples uses: never more than it has samples."""
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

    drop_last = False

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

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, that ``steps`` describes."""
        self.epoch = epoch

    def __len__(self) -> int:
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

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.steps())

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
        images: (G,V,C,H,W) float32, view 0 weak, the others strong.
        labels: (G,) int64 class indices.
        sample_ids: (G,) int64 row numbers in the whole training split.
        num_global_groups: Groups of the step over all ranks; the mean of a loss is taken over these.
    """

    images: Tensor
    labels: Tensor
    sample_ids: Tensor
    num_global_groups: int

    @property
    def num_groups(self) -> int:
        """G of this rank."""
        return self.images.shape[0]

    @property
    def num_views(self) -> int:
        """V."""
        return self.images.shape[1]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ViewBatch:
        """Return the batch on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ViewBatch:
        """Return the batch in page-locked memory (a data loader calls this)."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> ViewBatch:
        return ViewBatch(
            function(self.images), function(self.labels), function(self.sample_ids), self.num_global_groups
        )


class StepPart(NamedTuple):
    """What one rank loads for one step; travels to the workers, which therefore always know the epoch."""

    epoch: int
    positions: list[int]
    num_global_groups: int


class MultiViewDataset(Dataset[tuple[Tensor, int, int]]):
    """The samples of one task, decoded once and drawn as V views.

    Every view has a seed of its own from (seed, task, epoch, row, view): it is the same in any worker, on
    any rank and with any V.

    Args:
        split: The training split.
        rows: Row numbers of the task, one per position.
        class_indices: Class index of every row of the split.
        transforms: Weak and strong view.
        num_views: V; a task with fewer samples uses ``effective_views``.
        seed: Training seed.
        task_index: Index of the task.
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
    ) -> None:
        _check_class_indices(split, class_indices)
        self.split = split
        self.rows = np.asarray(rows)
        self.class_indices = class_indices
        self.transforms = transforms
        self.num_views = effective_views(len(self.rows), num_views)
        self.seed = seed
        self.task_index = task_index

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int, int]:
        """Return views (V,C,H,W), class index and row number for (epoch, position)."""
        epoch, position = key
        row = int(self.rows[position])
        image = self.split.image(row)
        views = [self._view(image, epoch=epoch, row=row, view=view) for view in range(self.num_views)]
        return torch.stack(views), int(self.class_indices[row]), row

    def __getitems__(self, part: StepPart) -> ViewBatch:
        """Return all groups of one rank's part of a step; a data loader calls this with what it was told."""
        # A rank without groups runs on an empty batch: any sample tells its shape.
        samples = [self[part.epoch, position] for position in part.positions or [0]]
        images = torch.stack([views for views, _, _ in samples])[: len(part.positions)]
        samples = samples[: len(part.positions)]
        return ViewBatch(
            images,
            torch.tensor([label for _, label, _ in samples], dtype=torch.int64),
            torch.tensor([row for _, _, row in samples], dtype=torch.int64),
            part.num_global_groups,
        )

    def _view(self, image: Image.Image, *, epoch: int, row: int, view: int) -> Tensor:
        draw = self.transforms.strong if view else self.transforms.weak
        with seeded(
            seed_for("view", seed=self.seed, task=self.task_index, epoch=epoch, sample=row, view=view)
        ):
            return draw(image)


class TrainLoader:
    """The steps of one task on one rank; one loader serves all epochs, so that its workers stay.

    Args:
        dataset: The task's samples.
        sampler: Decides the steps; its positions are those of the data set.
        config: Worker settings.
        rank: This process.
        num_ranks: Processes that share each step.
        pin_memory: Put batches into page-locked memory.
    """

    def __init__(
        self,
        dataset: MultiViewDataset,
        *,
        sampler: ViewBatchSampler,
        config: LoaderConfig,
        rank: int = 0,
        num_ranks: int = 1,
        pin_memory: bool = False,
    ) -> None:
        if sampler.num_samples != len(dataset) or sampler.num_views != dataset.num_views:
            raise ValueError(
                f"the sampler ({sampler.num_samples} samples, {sampler.num_views} views) does not fit the "
                f"data set ({len(dataset)} samples, {dataset.num_views} views)"
            )
        self._parts = _RankParts(sampler, rank=rank, num_ranks=num_ranks)
        self._loader: DataLoader[ViewBatch] = _data_loader(
            dataset, parts=self._parts, config=config, pin_memory=pin_memory, persistent=True
        )

    def set_epoch(self, epoch: int, *, start_step: int = 0) -> None:
        """Choose the epoch, from 0, and its first step to load (other than 0 when a run goes on)."""
        self._parts.set_epoch(epoch, start_step=start_step)

    def __len__(self) -> int:
        """Return the number of steps that are left in the epoch."""
        return len(self._parts)

    def __iter__(self) -> Iterator[ViewBatch]:
        return iter(self._loader)


class _RankParts:
    """The batch sampler of one rank: its contiguous chunk of every step's list of positions."""

    def __init__(self, sampler: ViewBatchSampler, *, rank: int, num_ranks: int) -> None:
        self._sampler = sampler
        self._rank = rank
        self._num_ranks = num_ranks
        self._start_step = 0

    def set_epoch(self, epoch: int, *, start_step: int) -> None:
        self._sampler.set_epoch(epoch)
        self._start_step = start_step

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._start_step)

    def __iter__(self) -> Iterator[StepPart]:
        epoch, steps = self._sampler.epoch, self._sampler.steps()[self._start_step :]
        for positions in steps:
            first, last = chunk(len(positions), self._rank, self._num_ranks)
            yield StepPart(epoch, positions[first:last], len(positions))


class EvaluationBatch(NamedTuple):
    """Images of one view each.

    Attributes:
        images: (N,C,H,W) float32.
        labels: (N,) int64 class indices.
        sample_ids: (N,) int64 row numbers in the whole split.
    """

    images: Tensor
    labels: Tensor
    sample_ids: Tensor


class SingleViewDataset(Dataset[Tensor]):
    """Rows of a split in one fixed view each.

    Args:
        split: Training or test split.
        class_indices: Class index of every row of the split.
        transforms: Evaluation and weak view.
        transform: "weak" draws once per row, always the same draw for the same seed and task.
        seed: Training seed.
        task_index: Index of the task.
    """

    def __init__(
        self,
        split: ImageSplit,
        *,
        class_indices: Integers,
        transforms: ViewTransforms,
        transform: Literal["eval", "weak"],
        seed: int,
        task_index: int,
    ) -> None:
        _check_class_indices(split, class_indices)
        self.split = split
        self.class_indices = class_indices
        self.transforms = transforms
        self.transform = transform
        self.seed = seed
        self.task_index = task_index

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, row: int) -> Tensor:
        """Return the view (C,H,W) of a row."""
        image = self.split.image(row)
        if self.transform == "eval":
            return self.transforms.evaluate(image)
        with seeded(seed_for("features", seed=self.seed, task=self.task_index, sample=row)):
            return self.transforms.weak(image)

    def __getitems__(self, rows: Sequence[int]) -> EvaluationBatch:
        """Return a batch of rows; a data loader calls this."""
        return EvaluationBatch(
            torch.stack([self[row] for row in rows]),
            torch.tensor([int(self.class_indices[row]) for row in rows], dtype=torch.int64),
            torch.tensor(rows, dtype=torch.int64),
        )


def evaluation_loader(
    split: ImageSplit,
    *,
    rows: Integers,
    class_indices: Integers,
    transforms: ViewTransforms,
    config: LoaderConfig,
    transform: Literal["eval", "weak"] = "eval",
    seed: int = 0,
    task_index: int = 0,
    rank: int = 0,
    num_ranks: int = 1,
    pin_memory: bool = False,
) -> DataLoader[EvaluationBatch]:
    """Return a loader of one rank's share of the rows: each row on exactly one rank, none padded.

    The ranks' shares put one after the other are ``rows`` in order; a share may be empty.

    Args:
        split: Training or test split.
        rows: Row numbers to load.
        class_indices: Class index of every row of the split.
        transforms: Evaluation and weak view.
        config: Batch size and worker settings.
        transform: Which of the two views.
        seed: Training seed, for the weak view.
        task_index: Index of the task, for the weak view.
        rank: This process.
        num_ranks: Processes that share the rows.
        pin_memory: Put batches into page-locked memory.
    """
    dataset = SingleViewDataset(
        split,
        class_indices=class_indices,
        transforms=transforms,
        transform=transform,
        seed=seed,
        task_index=task_index,
    )
    first, last = chunk(len(rows), rank, num_ranks)
    own = np.asarray(rows)[first:last].tolist()
    size = config.evaluation_batch_size
    parts = [own[start : start + size] for start in range(0, len(own), size)]
    return _data_loader(dataset, parts=parts, config=config, pin_memory=pin_memory, persistent=False)


def _data_loader(
    dataset: Dataset[Any],
    *,
    parts: Any,
    config: LoaderConfig,
    pin_memory: bool,
    persistent: bool,
) -> DataLoader[Any]:
    """Return a loader that hands each part to the data set's ``__getitems__`` and passes its batch on."""
    num_workers = min(config.num_workers or 0, len(parts))
    return _Loader(
        dataset,
        batch_sampler=parts,
        collate_fn=_as_it_is,
        num_workers=num_workers,
        multiprocessing_context=config.multiprocessing_context if num_workers else None,
        persistent_workers=persistent and num_workers > 0,
        # A loader draws a base seed when it is iterated; a generator of its own spares the global one.
        generator=torch.Generator(),
        pin_memory=pin_memory,
    )


def _as_it_is(batch: Any) -> Any:
    return batch


class _Loader(DataLoader[Any]):
    """A loader whose workers never see Ctrl-C or SIGTERM, which terminals and batch systems send to them as well.

    They inherit the blocked signal, so that there is no moment at which one could be interrupted.
    """

    def __iter__(self) -> Any:
        if not self.num_workers or sys.platform == "win32":  # where signals cannot be blocked
            return super().__iter__()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _check_class_indices(split: ImageSplit, class_indices: Integers) -> None:
    if len(class_indices) != len(split):
        raise ValueError(
            f"{len(class_indices)} class indices for a split of {len(split)} rows: "
            "there must be one for every row of the split, not of the task"
        )
