"""How every task of a run is trained; with the data and the learner, it determines all steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from vbm_ptm.data.class_order import ClassOrderSampler
from vbm_ptm.data.mixed_views import MixedViewSampler
from vbm_ptm.data.scenario import Task
from vbm_ptm.data.view_batch import Integers, ViewBatchSampler
from vbm_ptm.data.view_batch_config import ViewBatchConfig
from vbm_ptm.engine.optimization import OptimizationConfig
from vbm_ptm.engine.schedule import summed_rates


class Workload(NamedTuple):
    """Optimizer steps of a task and the images in them, over all ranks."""

    num_steps: int
    num_images: int


# From this spread of the summed learning rate on, and below this number of visits, a run says so.
SPREAD_TO_MENTION, VISITS_TO_MENTION = 1.5, 4


@dataclass(frozen=True)
class Recipe:
    """How each task of a run is trained.

    Attributes:
        objective: The loss, called as a ``vbm_ptm.engine.objective.ViewBatchObjective``.
        optimization: Epochs, batch size, optimizer and schedule.
        view_batch: Settings of views and queries.
        seed: Training seed.
        max_steps: Steps after which a smoke run leaves each task; None for all epochs.
    """

    objective: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    optimization: OptimizationConfig
    view_batch: ViewBatchConfig
    seed: int
    max_steps: int | None = None

    def sampler(
        self, class_indices: Integers, num_exemplars: int = 0, *, task_index: int
    ) -> ViewBatchSampler:
        """Return what decides the steps of a task.

        Args:
            class_indices: Class of each training image of the task.
            num_exemplars: How many of them, the last ones, are exemplars of earlier tasks.
            task_index: Index of the task.
        """
        config, batch_size = self.view_batch, self.optimization.batch_size
        if config.order == "class":
            return ClassOrderSampler(class_indices, batch_size, config.num_views, self.seed, task_index)
        if num_exemplars and config.num_views > 1 and config.views_for != "all":
            num_own = len(class_indices) - num_exemplars
            return MixedViewSampler(
                *(num_own, num_exemplars, batch_size, config.num_views, self.seed, task_index),
                views_for=config.views_for,
            )
        return ViewBatchSampler(len(class_indices), batch_size, config.views_per_group, self.seed, task_index)

    def workload(self, sampler: ViewBatchSampler) -> Workload:
        """Return what training on a task takes, counted before any step is done.

        Args:
            sampler: The steps of the task; left at one of its epochs.
        """
        epochs = self.optimization.epochs
        # Step sizes repeat with every cycle, so one cycle is enough.
        cycle = []
        for epoch in range(min(sampler.cycle_length, epochs)):
            sampler.set_epoch(epoch)
            cycle.append([sampler.num_images(positions) for positions in sampler.steps()])
        all_epochs = (cycle[epoch % sampler.cycle_length] for epoch in range(epochs))
        sizes = list(itertools.islice(itertools.chain.from_iterable(all_epochs), self.max_steps))
        return Workload(len(sizes), sum(sizes))

    def task_notes(self, task: Task, sampler: ViewBatchSampler) -> list[str]:
        """Return warnings about a task that is trained.

        Args:
            task: The task.
            sampler: Its steps.
        """
        notes, num_views = [], self.view_batch.cycle_length
        if sampler.cycle_length < num_views:
            is_by_class = self.view_batch.order == "class"
            has = f"{len(task.classes)} classes" if is_by_class else f"{sampler.num_own} samples"
            parts = "parts" if is_by_class else "views"
            notes.append(
                f"task {task.index + 1} has {has}: {sampler.cycle_length} {parts} in place of {num_views}"
            )
        if len(task.classes) == 1:
            notes.append(
                f"task {task.index + 1} has one class: a learner whose loss is over the classes of the task alone has "
                "nothing to distinguish, and learns from the end of the task at most"
            )
        return notes

    def notes(self) -> list[str]:
        """Return warnings about this recipe for comparisons of numbers of views."""
        num_views, epochs = self.view_batch.cycle_length, self.optimization.epochs
        notes = []
        if epochs % num_views:
            notes.append(
                f"{epochs} epochs are not a whole number of cycles of {num_views} epochs: the number of visits "
                "will differ by one between samples"
            )
        if num_views > 1 and epochs / num_views < VISITS_TO_MENTION:
            returns = math.ceil(epochs / num_views) - 1
            how_often = (
                f"comes back {returns} time{'s' * (returns > 1)} at most" if returns else "never comes back"
            )
            notes.append(
                f"with {epochs} epochs and {num_views} views a sample {how_often}, which is too little to show an "
                "effect of rest"
            )
        sums = summed_rates(self.optimization, cycle_length=num_views)
        if min(sums) and max(sums) / min(sums) > SPREAD_TO_MENTION:
            notes.append(
                f"the learning rate, summed over the visits of a sample, differs between samples by a factor of "
                f"{max(sums) / min(sums):.1f}; optimization.schedule_unit=cycle gives all of them about the same"
            )
        return notes
