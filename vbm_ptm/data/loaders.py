"""Loaders: each rank's part of every training step, and of every row that is measured.

Shapes: G groups, V views, N images, C colour channels, H x W pixels.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor
from torch.utils.data import Dataset

from vbm_ptm.data.view_batch import (
    MultiViewDataset,
    ReplayPart,
    StepPart,
    ViewBatch,
    ViewBatchSampler,
    check_class_indices,
    chunk,
)
from vbm_ptm.data.workers import ImageLoader
from vbm_ptm.randomness import seed_for, seeded
from vbm_ptm.settings import Settings

if TYPE_CHECKING:
    from vbm_ptm.data.benchmark import Benchmark
    from vbm_ptm.data.image_split import ImageSplit
    from vbm_ptm.data.scenario import Task
    from vbm_ptm.data.transforms import ViewTransforms

Integers = npt.NDArray[np.int64]


Context = Literal["fork", "spawn", "forkserver"]


class LoaderConfig(Settings):
    """Settings of the loaders; none of them changes what is loaded.

    Attributes:
        num_workers: Processes that decode and augment; 0 does it in the main process. Without a number: none
            when the CPU also trains, else up to 8.
        evaluation_batch_size: Images per batch in evaluation and feature extraction.
        multiprocessing_context: How worker processes start; the platform's default without it.
        worker_timeout_minutes: How long the workers may take for a batch before the run ends.
    """

    num_workers: NonNegativeInt | None = None
    evaluation_batch_size: PositiveInt = 128
    multiprocessing_context: Context | None = None
    worker_timeout_minutes: float = Field(default=10.0, gt=0)

    def for_device(self, device_type: str) -> LoaderConfig:
        """Return settings that name a number of workers, chosen by the device that trains ("cpu", "cuda", …)."""
        if self.num_workers is not None:
            return self
        return self.model_copy(
            update={"num_workers": 0 if device_type == "cpu" else min(8, os.cpu_count() or 1)}
        )


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Loaders:
    """Brings the images of a benchmark: to each rank its own part of them.

    Attributes:
        benchmark: Images, tasks and transforms.
        config: Workers and the batch size of evaluation.
        seed: Training seed, for views that are drawn.
        rank: This process.
        num_ranks: Processes that share the images.
        pin_memory: Put batches into page-locked memory.
        on_wait: Called every few seconds while workers let this rank wait; may raise.
    """

    benchmark: Benchmark
    config: LoaderConfig
    seed: int = 0
    rank: int = 0
    num_ranks: int = 1
    pin_memory: bool = False
    on_wait: Callable[[], None] = _nothing

    def training(
        self,
        task: Task,
        sampler: ViewBatchSampler,
        *,
        rows: Integers | None = None,
        strong_share: float = 0.0,
    ) -> TrainLoader:
        """Return a loader of this rank's part of every step of a task, for all its epochs.

        Args:
            task: What to train on.
            sampler: Decides the steps; its positions count the training rows.
            rows: Training rows; None for those of the task alone.
            strong_share: Part of the images that are strong, with one view.
        """
        train = self.benchmark.datasets.train
        dataset = MultiViewDataset(
            train,
            rows=self.benchmark.training_rows(task) if rows is None else rows,
            class_indices=self.benchmark.class_indices(train),
            transforms=self.benchmark.transforms,
            num_views=sampler.num_views,
            seed=self.seed,
            task_index=task.index,
            strong_share=strong_share,
        )
        if sampler.num_samples != len(dataset):
            raise ValueError(
                f"the sampler has {sampler.num_samples} samples, but task {task.index} has {len(dataset)} of them"
            )
        parts = _RankParts(sampler, rank=self.rank, num_ranks=self.num_ranks)
        return TrainLoader(parts, self._over(dataset, parts, persistent=True))

    def parts_of_rank(self, rows: Integers) -> list[list[int]]:
        """Return the rows of this rank's batches: each row on exactly one rank, none padded.

        The ranks' shares put one after the other are ``rows`` in order; a share may be empty.
        """
        first, last = chunk(len(rows), self.rank, self.num_ranks)
        own = np.asarray(rows)[first:last].tolist()
        size = self.config.evaluation_batch_size
        return [own[start : start + size] for start in range(0, len(own), size)]

    def evaluation(
        self,
        split: ImageSplit,
        parts: Sequence[Sequence[int]],
        *,
        transform: Literal["eval", "flip", "weak"] = "eval",
        task_index: int = 0,
        draw: int = 0,
    ) -> Iterable[EvaluationBatch]:
        """Return a loader of one batch for each part.

        Args:
            split: Training or test split of the benchmark.
            parts: Row numbers of each batch, e.g. of ``parts_of_rank``.
            transform: Which view.
            task_index: Index of the task, for the weak view.
            draw: Which of the weak view's draws.
        """
        dataset = SingleViewDataset(
            split,
            class_indices=self.benchmark.class_indices(split),
            transforms=self.benchmark.transforms,
            transform=transform,
            seed=self.seed,
            task_index=task_index,
            draw=draw,
        )
        return self._over(dataset, parts, persistent=False)

    def _over(self, dataset: Dataset[Any], parts: Any, *, persistent: bool) -> ImageLoader:
        return ImageLoader(
            dataset,
            parts,
            num_workers=min(self.config.num_workers or 0, len(parts)),
            context=self.config.multiprocessing_context,
            is_persistent=persistent,
            pin_memory=self.pin_memory,
            limit_seconds=60 * self.config.worker_timeout_minutes,
            on_wait=self.on_wait,
        )


class TrainLoader:
    """The steps of one task on one rank; one loader serves all epochs, so that its workers stay.

    Attributes:
        waited_seconds: How long the batch that came last was waited for; without workers, how long it took to load.
    """

    def __init__(self, parts: _RankParts, loader: ImageLoader) -> None:
        self._parts = parts
        self._loader = loader
        self.waited_seconds = 0.0

    def set_epoch(
        self, epoch: int, *, start_step: int = 0, replays: Sequence[tuple[ReplayPart, ...]] = ()
    ) -> None:
        """Choose what to load.

        Args:
            epoch: From 0.
            start_step: First step, other than 0 when a run goes on.
            replays: Draws of past samples for every step from the first one on, over all ranks; none if empty. Steps
                behind the last one are not loaded.
        """
        self._parts.set_epoch(epoch, start_step=start_step, replays=replays)

    def __len__(self) -> int:
        """Return the number of steps that are left in the epoch."""
        return len(self._parts)

    def __iter__(self) -> Iterator[ViewBatch]:
        return self._timed(iter(self._loader))  # workers start at once

    def _timed(self, batches: Iterator[ViewBatch]) -> Iterator[ViewBatch]:
        asked = time.perf_counter()
        for batch in batches:
            self.waited_seconds = time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()


class _RankParts:
    """The batch sampler of one rank: its contiguous chunk of every step's list of positions."""

    def __init__(self, sampler: ViewBatchSampler, *, rank: int, num_ranks: int) -> None:
        self._sampler = sampler
        self._rank = rank
        self._num_ranks = num_ranks
        self._start_step = 0
        self._replays: Sequence[tuple[ReplayPart, ...]] = ()

    def set_epoch(self, epoch: int, *, start_step: int, replays: Sequence[tuple[ReplayPart, ...]]) -> None:
        self._sampler.set_epoch(epoch)
        self._start_step = start_step
        self._replays = replays

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._start_step)

    def __iter__(self) -> Iterator[StepPart]:
        steps = [
            (self._sampler.draw_of(step), positions) for step, positions in enumerate(self._sampler.steps())
        ]
        replays = self._replays or itertools.repeat(())
        for (draw, positions), replayed in zip(steps[self._start_step :], replays, strict=False):
            first, last = chunk(len(positions), self._rank, self._num_ranks)
            own = tuple(part.of_rank(self._rank, self._num_ranks) for part in replayed)
            yield StepPart(draw, positions[first:last], len(positions), own)


class EvaluationBatch(NamedTuple):
    """Images of one view each.

    Attributes:
        images: (N,C,H,W) uint8.
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
        transform: "flip" is the mirror image of "eval"; "weak" draws once per row, always the same for the same
            seed, task and draw.
        seed: Training seed.
        task_index: Index of the task.
        draw: Which of the weak view's draws.
    """

    def __init__(
        self,
        split: ImageSplit,
        *,
        class_indices: Integers,
        transforms: ViewTransforms,
        transform: Literal["eval", "flip", "weak"],
        seed: int,
        task_index: int,
        draw: int = 0,
    ) -> None:
        check_class_indices(split, class_indices)
        self.split = split
        self.class_indices = class_indices
        self.transforms = transforms
        self.transform = transform
        self.draw = draw
        self.seed = seed
        self.task_index = task_index

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, row: int) -> Tensor:
        """Return the view (C,H,W) of a row."""
        image = self.split.image(row)
        if self.transform == "eval":
            return self.transforms.evaluate(image)
        if self.transform == "flip":
            return self.transforms.evaluate(image).flip(-1)
        with seeded(seed_for("features", seed=self.seed, task=self.task_index, epoch=self.draw, sample=row)):
            return self.transforms.weak(image)

    def __getitems__(self, rows: Sequence[int]) -> EvaluationBatch:
        """Return a batch of rows; a data loader calls this."""
        return EvaluationBatch(
            torch.stack([self[row] for row in rows]),
            torch.tensor([int(self.class_indices[row]) for row in rows], dtype=torch.int64),
            torch.tensor(rows, dtype=torch.int64),
        )
