"""The view batch: which samples make a step.

A step has G groups = G samples = G * V images. An epoch is N image presentations in ceil(N / B) steps and
visits N / V samples; a cycle is V epochs and visits every sample once. What a step holds depends on seed, task and
epoch alone, never on workers or ranks.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, PositiveInt, model_validator

from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seed_for
from vbm_ptm.settings import Settings

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
