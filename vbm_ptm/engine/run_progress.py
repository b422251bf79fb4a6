"""The progress of a run: what it has counted, what is saved, and where it continues or stops."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.engine.acceleration import wait_for_ranks
from vbm_ptm.engine.interruption import StopRequest
from vbm_ptm.engine.measures import TaskMeasures, without_measures
from vbm_ptm.engine.task_plans import TaskPlans
from vbm_ptm.engine.task_resuming import position_of, take_up
from vbm_ptm.engine.task_training import TaskTraining
from vbm_ptm.engine.tracking import RunLog
from vbm_ptm.learners.base import Learner
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.storage.checkpoint import CheckpointStore
from vbm_ptm.storage.checkpoint_state import RunState
from vbm_ptm.storage.save_schedule import SaveSchedule
from vbm_ptm.storage.task_position import TaskPosition
from vbm_ptm.storage.task_record import TaskRecord

logger = logging.getLogger(__name__)


class Resumption(NamedTuple):
    """Where a task in progress continues: a position, and the tensors of the optimizer and of measures."""

    position: TaskPosition
    tensors: Mapping[str, Tensor]


class _InTask(NamedTuple):
    """The task in progress; ``started`` is when its training would have begun without a stop."""

    training: TaskTraining
    measures: TaskMeasures
    frozen_sha256: str
    started: float


class RunProgress:
    """Keeps the progress of a run, in memory and in checkpoints.

    Args:
        learner: The learner.
        benchmark: Images and tasks.
        plans: Know the steps of a task.
        accelerator: Devices and ranks.
        log: Is written to the disk before a checkpoint that counts on it.
        log_every: Steps between two readings, where ranks meet anyway.
        store: Where checkpoints go; None on ranks other than 0.
        schedule: When to save inside a task.
        stop: Asks the run to end.

    Attributes:
        matrix: Accuracy counts of the finished tasks.
        records: What each of them took.
        resumption: Of a task that was interrupted, until its training continues.
        saved_steps: Steps of the task in progress that are saved.
    """

    def __init__(
        self,
        learner: Learner,
        benchmark: Benchmark,
        plans: TaskPlans,
        *,
        accelerator: Accelerator,
        log: RunLog,
        log_every: int,
        store: CheckpointStore | None,
        schedule: SaveSchedule,
        stop: StopRequest,
    ) -> None:
        self._learner = learner
        self._benchmark = benchmark
        self._plans = plans
        self._accelerator = accelerator
        self._log = log
        self._log_every = log_every
        self._store = store
        self._schedule = schedule
        self._stop = stop
        self.matrix = AccuracyMatrix()
        self.records: list[TaskRecord] = []
        self.resumption: Resumption | None = None
        self.saved_steps = 0
        self._in_task: _InTask | None = None

    @property
    def tracker_step(self) -> int:
        """Steps of finished tasks, each task counted as one more: trackers drop what does not rise."""
        return sum(record.num_steps for record in self.records) + len(self.records)

    def describe(self) -> str:
        """Describe the progress that is saved."""
        tasks = self._benchmark.scenario.tasks
        finished = f"{len(self.records)} of {len(tasks)} tasks are finished"
        if not self.saved_steps:
            return finished
        task = tasks[len(self.records)]
        return f"{finished}, task {task.index + 1} after {self.saved_steps} of {self._plans.num_steps(task)} steps"

    def begin_training(self, training: TaskTraining, measures: TaskMeasures, *, frozen_sha256: str) -> float:
        """Resume a task, or begin it; return when its training began on the monotonic clock.

        Args:
            training: Before its first step.
            measures: Of the task.
            frozen_sha256: Of the parameters that the task leaves as they are.
        """
        started = time.monotonic()
        if self.resumption is not None:
            position, tensors = self.resumption
            measures.load_state(position.measures, tensors)
            take_up(training, position, without_measures(tensors))
            started -= position.seconds
            self.resumption = None
        self._in_task = _InTask(training, measures, frozen_sha256, started)
        self._schedule.begin(num_steps=training.num_steps, now=time.monotonic())
        return started

    def between_steps(self) -> None:
        """Save and stop when it is time to; ranks agree on both where they wait for each other anyway.

        Raises:
            TrainingInterrupted: The run was asked to stop, and is saved.
        """
        assert self._in_task is not None
        training = self._in_task.training
        is_epoch_over = training.step == 0
        is_reading = training.num_steps % self._log_every == 0
        if self._accelerator.num_processes > 1 and not (is_reading or is_epoch_over or training.is_complete):
            return
        # The state after the last step is saved, so that the end of the task can be done again without training.
        is_due = training.is_complete or self._schedule.is_due(
            num_steps=training.num_steps, is_epoch_over=is_epoch_over, now=time.monotonic()
        )
        stop, must_save = self._agreed(self._stop.signal, int(is_due and self._accelerator.is_main_process))
        if must_save or stop:
            self._save_inside_task(self._in_task)
        self._stop.check(stop)

    def save_before_leaving(self) -> None:
        """Save a task that a stop request ends, if this has not been done: ranks cannot agree on it any more.

        An epoch whose measurement was broken off is done again.
        """
        task = self._in_task
        if not task or not task.measures.is_up_to_date or self._accelerator.num_processes > 1:
            return
        if self.saved_steps < task.training.num_steps:
            self._save_inside_task(task)

    def save_task(self) -> None:
        """Save the learner and the records after a task."""
        if self._store:
            self._log.sync()
            self._store.save(self._learner, self.state())
        self.saved_steps, self._in_task = 0, None
        wait_for_ranks(self._accelerator)

    def stop_if_asked(self) -> None:
        """Raise on all ranks if one of them received a signal: a rank that leaves alone would keep the others waiting.

        Raises:
            TrainingInterrupted: The run was asked to stop.
        """
        (stop,) = self._agreed(self._stop.signal)
        self._stop.check(stop)

    def state(self) -> RunState:
        """Return what ``load_state`` needs, except for the task in progress."""
        scaler, scenario = self._accelerator.scaler, self._benchmark.scenario
        return RunState(
            class_names=scenario.class_names,
            split_sha256=self._benchmark.datasets.split_sha256,
            held_out=self._benchmark.datasets.record.held_out,
            num_planned_tasks=self._learner.num_tasks,
            tasks=scenario.tasks,
            evaluation_tasks=scenario.evaluation_tasks,
            matrix=self.matrix.to_dict(),
            records=tuple(self.records),
            log_position=self._log.position,
            gradient_scaler=scaler.state_dict() if scaler else None,
            num_ranks=self._accelerator.num_processes,
            num_threads=torch.get_num_threads(),
        )

    def load_state(self, state: RunState, tensors: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint; warn if the run will not be the same to the last bit.

        Args:
            state: What ``state`` returned, with the position in the task in progress if there is one.
            tensors: What was stored with the position.
        """
        for name, then, now in (
            ("num_ranks", state.num_ranks, self._accelerator.num_processes),
            ("num_threads", state.num_threads, torch.get_num_threads()),
        ):
            if then != now:
                logger.warning(
                    "%s was %d and is %d now: steps stay the same, the last bits of the weights may not",
                    *(name, then, now),
                )
        self.matrix = state.accuracies
        self.records = list(state.records)
        if state.gradient_scaler and self._accelerator.scaler:
            self._accelerator.scaler.load_state_dict(state.gradient_scaler)
        if state.training is not None:
            self.resumption = Resumption(state.training, tensors)
            self.saved_steps = state.training.num_steps

    def _save_inside_task(self, task: _InTask) -> None:
        began, training = time.monotonic(), task.training
        position = position_of(
            training,
            measures=task.measures.state(),
            seconds=began - task.started,
            frozen_sha256=task.frozen_sha256,
        )
        if self._store:
            self._log.sync()
            self._store.save_inside_task(
                self._learner,
                self.state().model_copy(update={"training": position}),
                num_steps=sum(record.num_steps for record in self.records) + training.num_steps,
                optimizer={**training.optimizer_tensors(), **task.measures.tensors()},
            )
        self.saved_steps = training.num_steps
        self._schedule.saved(num_steps=training.num_steps, began=began, ended=time.monotonic())
        wait_for_ranks(self._accelerator)

    def _agreed(self, *numbers: int) -> list[int]:
        """Return the largest of each number over all ranks."""
        if self._accelerator.num_processes == 1:
            return list(numbers)
        mine = torch.tensor([numbers], device=self._accelerator.device)
        largest: list[int] = self._accelerator.gather(mine).amax(0).tolist()
        return largest
