"""How every task of a run is trained: with the data and the learner it decides each step, and how many there are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from vbm_ptm.data.view_batch import ViewBatchSampler
from vbm_ptm.engine.optimization import OptimizationConfig


class Workload(NamedTuple):
    """Optimizer steps of a task and the images in them, over all ranks."""

    num_steps: int
    num_images: int


@dataclass(frozen=True)
class Recipe:
    """How each task of a run is trained.

    Attributes:
        objective: The loss, called as a ``vbm_ptm.engine.objective.ViewBatchObjective``.
        optimization: Epochs, batch size, optimizer and schedule.
        num_views: V.
        seed: Training seed.
        max_steps: Steps after which a smoke run leaves each task; None for all epochs.
    """

    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    optimization: OptimizationConfig
    num_views: int
    seed: int
    max_steps: int | None = None

    def sampler(self, num_samples: int, *, task_index: int) -> ViewBatchSampler:
        """Return what decides the steps of a task with this number of training images."""
        return ViewBatchSampler(
            num_samples, self.optimization.batch_size, self.num_views, self.seed, task_index
        )

    def workload(self, sampler: ViewBatchSampler) -> Workload:
        """Return what training on a task takes, counted before any step is done.

        Args:
            sampler: The steps of the task; left at one of its epochs.
        """
        epochs = self.optimization.epochs
        # Step sizes come back with every cycle, so that one cycle of V epochs tells all.
        cycle = []
        for epoch in range(min(sampler.num_views, epochs)):
            sampler.set_epoch(epoch)
            cycle.append([len(positions) for positions in sampler.steps()])
        all_epochs = (cycle[epoch % sampler.num_views] for epoch in range(epochs))
        sizes = list(itertools.islice(itertools.chain.from_iterable(all_epochs), self.max_steps))
        return Workload(len(sizes), sum(sizes) * sampler.num_views)
