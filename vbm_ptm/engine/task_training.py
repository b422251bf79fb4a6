"""The training steps of one task, from a position that can be stored and resumed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from accelerate import Accelerator
from torch import Tensor

from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.data.views import ViewBatch
from vbm_ptm.engine.memory import forget_peak_memory
from vbm_ptm.engine.readings import Readings
from vbm_ptm.engine.recipe import Recipe
from vbm_ptm.engine.replay_memory import remember
from vbm_ptm.engine.replay_planner import ReplayPlanner, StepPlan, rows_to_train
from vbm_ptm.engine.schedule import learning_rate_at
from vbm_ptm.engine.training_step import TrainingStep
from vbm_ptm.engine.visits import VisitLog
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seed_for, seeded


class TaskTraining:
    """Trains a learner on one task; ``steps`` continues from the position, wherever it is.

    Args:
        learner: Has begun the task, and is on its device.
        task: What to train on.
        recipe: The loss, and how the task is trained.
        loaders: Bring the training images.
        accelerator: Devices, ranks and precision.
        readings: Receives the loss parts of every step.
        planner: Decides the draws of past samples; None for a learner without a stream.

    Attributes:
        epoch: Epoch of the next step, from 0.
        step: Next step in the epoch, from 0.
        visits: When each sample of the task was trained on.
        exemplar_visits: The same for exemplars, if they have another number of views; else they count as samples.
        num_steps: Steps done.
        num_images: Images that they had, over all ranks.
        data_seconds: How long this rank has waited for them.
        step_seconds: How long its steps have taken, this included.
        restored: What ``optimizer_tensors`` returned, if training is resumed.
    """

    def __init__(
        self,
        learner: Learner,
        task: Task,
        *,
        recipe: Recipe,
        loaders: Loaders,
        accelerator: Accelerator,
        readings: Readings,
        planner: ReplayPlanner | None = None,
    ) -> None:
        self.learner = learner
        self.task = task
        self.recipe = recipe
        self.loaders = loaders
        self.accelerator = accelerator
        self.readings = readings
        self.planner = planner
        benchmark = loaders.benchmark
        classes = benchmark.class_indices(benchmark.datasets.train)
        self.rows, num_exemplars = rows_to_train(learner, benchmark.training_rows(task), classes)
        self.sampler = recipe.sampler(classes[self.rows], num_exemplars, task_index=task.index)
        self.num_planned_steps = recipe.workload(self.sampler).num_steps if learner.parameter_groups() else 0
        self.epoch = self.step = self.num_steps = self.num_images = 0
        self.data_seconds = self.step_seconds = 0.0
        self.visits = VisitLog(self.sampler.num_own)
        self.exemplar_visits = VisitLog(len(self.rows) - self.sampler.num_own)
        self._taking: TrainingStep | None = None
        self.restored: Mapping[str, Tensor] = {}

    @property
    def num_views(self) -> int:
        """V of the task's own samples, fewer than asked for where there are fewer of them."""
        return self.sampler.num_views

    @property
    def is_complete(self) -> bool:
        """Whether no step is left."""
        return self.num_steps == self.num_planned_steps

    def steps(self) -> Iterator[int]:
        """Train to the end of the task; yield the epoch of each step after it, where a run may be stopped."""
        if self.is_complete:
            return
        loader = self.loaders.training(
            self.task, self.sampler, rows=self.rows, strong_share=self.recipe.view_batch.strong_share
        )
        self.learner.train()
        forget_peak_memory(self.accelerator.device)
        take = self._taking = TrainingStep(
            self.learner,
            self.task,
            recipe=self.recipe,
            benchmark=self.loaders.benchmark,
            accelerator=self.accelerator,
            num_views=self.num_views,
            restored=self.restored,
        )
        while not self.is_complete:
            epoch = self.epoch
            if not self.step:
                with seeded(
                    seed_for("begin_epoch", seed=self.recipe.seed, task=self.task.index, epoch=epoch)
                ):
                    self.learner.begin_epoch(epoch)
            self.sampler.set_epoch(epoch)
            steps = self.sampler.steps()[self.step :]
            plans = self.plan(steps[: self.num_planned_steps - self.num_steps])
            loader.set_epoch(epoch, start_step=self.step, replays=[plan.draws for plan in plans])
            take.set_epoch(epoch, cycle_length=self.sampler.cycle_length)
            began = time.monotonic()
            for number, (positions, batch) in enumerate(zip(steps, loader, strict=True)):
                self._take_step(take, positions, batch, loader.waited_seconds)
                if plans:
                    remember(self.learner, plans[number], take.weak_logits, len(positions), self.accelerator)
                self._advance(positions)
                self.step_seconds += time.monotonic() - began
                yield epoch
                began = time.monotonic()
                if self.is_complete:
                    break
        self._taking = None
        self.accelerator.free_memory()

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the state of the optimizer, as long as there are steps left."""
        return {} if self._taking is None or self.is_complete else self._taking.optimizer_tensors()

    def plan(self, steps: Sequence[Sequence[int]]) -> list[StepPlan]:
        """Decide the draws of the following steps; empty if the learner has no stream."""
        if self.planner is None:
            return []
        rows = [self.rows[list(positions)].tolist() for positions in steps]
        return self.planner.plan(rows, task=self.task.index, epoch=self.epoch, first_step=self.num_steps)

    def _take_step(self, take: TrainingStep, positions: list[int], batch: ViewBatch, waited: float) -> None:
        """Take a step and record it."""
        parts = take(batch, epoch=self.epoch, step=self.step, is_first=not self.num_steps)
        self.data_seconds += waited
        self.readings.add(
            parts,
            sample_ids=self.rows[positions],
            is_skipped=self.accelerator.optimizer_step_was_skipped,
            epoch=self.epoch,
            step=self.step,
            images=self.sampler.num_images(positions),
            groups=len(positions),
            views=self.num_views,
            data_seconds=round(waited, 6),
            learning_rates=take.learning_rates,
        )

    def _advance(self, positions: list[int]) -> None:
        """Count a step that has been taken."""
        self.count(positions, self.epoch)
        self.step += 1
        if self.step == len(self.sampler):
            self.epoch, self.step = self.epoch + 1, 0

    def count(self, positions: list[int], epoch: int) -> None:
        """Count a step of an epoch that showed these positions."""
        first, cycle_length = self.sampler.num_own, self.sampler.cycle_length
        rate = learning_rate_at(self.recipe.optimization, epoch, cycle_length=cycle_length)
        own = [position for position in positions if position < first]
        exemplars = [position - first for position in positions if position >= first]
        self.visits.add(own, num_images=self.num_images, rate=rate)
        self.exemplar_visits.add(exemplars, num_images=self.num_images, rate=rate)
        self.num_steps += 1
        self.num_images += self.sampler.num_images(positions)
