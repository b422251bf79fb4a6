"""The view batch: which samples make a step.

A step has G groups = G samples = G * V images. An epoch is N image presentations in ceil(N / B) steps and
visits N / V samples; a cycle is V epochs and visits every sample once. What a step holds depends on seed, task and
epoch alone, never on workers or ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seed_for

Integers = npt.NDArray[np.int64]


def check_batch_arithmetic(batch_size: int, num_views: int) -> None:
    """Refuse a batch size that V does not divide or that leaves fewer than two groups per step.

    With one group per step, or torn groups, an epoch would not have ceil(N / B) steps.
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
    """Return the number of views of a task with this number of samples: at most one for each sample."""
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
        task_index: Index of the task; tasks of equal size get orders of their own.
    """

    purpose: ClassVar[str] = "sampler"

    def __init__(
        self, num_samples: int, batch_size: int, num_views: int, seed: int, task_index: int = 0
    ) -> None:
        check_batch_arithmetic(batch_size, num_views)
        if num_samples < 1:
            raise UsageError(f"task {task_index + 1} has no training images")
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.num_views = effective_views(num_samples, num_views)
        # Exemplars, at positions after the task's own samples, may have another number of views.
        self.num_own, self.num_exemplar_views = num_samples, self.num_views
        self.seed = seed
        self.task_index = task_index
        self.epoch = 0

    @property
    def cycle_length(self) -> int:
        """Epochs after which every sample has been visited equally often."""
        return self.num_views

    def num_images(self, positions: Sequence[int]) -> int:
        """Return the number of images of a step with these samples."""
        num_own = sum(position < self.num_own for position in positions)
        return num_own * self.num_views + (len(positions) - num_own) * self.num_exemplar_views

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0, that ``steps`` describes."""
        self.epoch = epoch

    def draw_of(self, step: int) -> int:
        """Return the number that seeds the views of a step: a sample gets another one at each visit."""
        return self.epoch

    def __len__(self) -> int:
        """Return the number of steps in the epoch."""
        return math.ceil(self.num_samples / self.batch_size)

    def steps(self) -> list[list[int]]:
        """Return the distinct positions in 0..num_samples-1 of each step of the epoch."""
        visited = self.visited()
        if self.num_views == 1:
            starts = range(0, len(visited), self.batch_size)
            return [visited[first : first + self.batch_size] for first in starts]
        bounds = (chunk(len(visited), step, len(self)) for step in range(len(self)))
        return [visited[start:stop] for start, stop in bounds]

    def visited(self) -> list[int]:
        """Return the positions that the epoch visits, in order: its slice of the cycle's permutation."""
        cycle, phase = divmod(self.epoch, self.num_views)
        generator = torch.Generator()
        generator.manual_seed(seed_for(self.purpose, seed=self.seed, task=self.task_index, epoch=cycle))
        order: list[int] = torch.randperm(self.num_samples, generator=generator).tolist()
        first, last = chunk(len(order), phase, self.num_views)
        return order[first:last]


def chunk(length: int, index: int, num_chunks: int) -> tuple[int, int]:
    """Return the bounds of one of the contiguous chunks of 0..length-1, whose sizes differ by at most one."""
    return length * index // num_chunks, length * (index + 1) // num_chunks
