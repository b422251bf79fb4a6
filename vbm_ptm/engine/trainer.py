"""The training loop: every learner, with one view or many, on one rank or several.

Per task: begin_task -> device -> prepare_task -> training steps -> end_task -> evaluate -> checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

import torch
from accelerate import Accelerator

from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.confusion import confusion_facts
from vbm_ptm.engine.contract import check_parameters
from vbm_ptm.engine.evaluator import Evaluator
from vbm_ptm.engine.features import TaskFeatures
from vbm_ptm.engine.fingerprint import TaskFingerprints
from vbm_ptm.engine.interruption import StopRequest
from vbm_ptm.engine.measures import TaskMeasures
from vbm_ptm.engine.parameters import describe_parameters, parameter_counts
from vbm_ptm.engine.readings import Readings
from vbm_ptm.engine.recipe import Recipe
from vbm_ptm.engine.run_progress import RunProgress
from vbm_ptm.engine.task_plans import TaskPlans
from vbm_ptm.engine.task_report import TaskDisplay, task_line, task_record
from vbm_ptm.engine.task_resuming import tallies_of
from vbm_ptm.engine.task_training import TaskTraining
from vbm_ptm.engine.tracker_figures import log_figures
from vbm_ptm.engine.tracking import ProgressDisplay, RunLog
from vbm_ptm.engine.trainer_config import TrainerConfig
from vbm_ptm.errors import TrainingInterrupted
from vbm_ptm.learners.base import Features, Learner
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.randomness import seed_for, seeded
from vbm_ptm.storage.checkpoint import CheckpointStore
from vbm_ptm.storage.save_schedule import SaveSchedule
from vbm_ptm.storage.task_record import TaskRecord

logger = logging.getLogger(__name__)


class Trainer:
    """Trains a learner on the tasks of a benchmark and measures it after each.

    Args:
        learner: Fresh, or restored to a checkpoint, of which ``progress.load_state`` gets the state.
        recipe: The loss, and how each task is trained.
        loaders: Bring the images of the benchmark.
        config: How the loop runs.
        accelerator: Devices, ranks and precision.
        log: Receives an event for each reading, task and evaluation.
        store: Where checkpoints go; None on ranks other than 0.
        schedule: When to save inside a task.
        stop: Asks the run to end between two steps.

    Attributes:
        plans: What is decided of a task before its first step.
        progress: What the run has reached, and what of it is saved.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        recipe: Recipe,
        loaders: Loaders,
        config: TrainerConfig,
        accelerator: Accelerator,
        log: RunLog,
        store: CheckpointStore | None,
        schedule: SaveSchedule,
        stop: StopRequest,
    ) -> None:
        self.learner = learner
        self.recipe = recipe
        self.loaders = loaders
        self.benchmark = loaders.benchmark
        self.config = config
        self.accelerator = accelerator
        self.log = log
        self.stop = stop
        self.evaluator = Evaluator(accelerator, loaders)
        self.plans = TaskPlans(learner, recipe, self.benchmark)
        self.progress = RunProgress(
            learner,
            self.benchmark,
            self.plans,
            accelerator=accelerator,
            log=log,
            log_every=config.log_every,
            store=store,
            schedule=schedule,
            stop=stop,
        )

    @property
    def matrix(self) -> AccuracyMatrix:
        """Accuracy counts of the finished tasks."""
        return self.progress.matrix

    @property
    def records(self) -> list[TaskRecord]:
        """What each finished task took."""
        return self.progress.records

    def fit(self) -> None:
        """Train on all tasks that are not finished; ``matrix`` and ``records`` hold the outcome.

        Raises:
            TrainingInterrupted: The run was asked to stop; ``progress`` says what is saved.
        """
        progress, tasks = self.progress, self.benchmark.scenario.tasks
        remaining = tasks[len(progress.records) :]
        steps = [self.plans.num_steps(task) for task in remaining]
        first_task = self.benchmark.first_task
        if progress.resumption is None and len(progress.records) == first_task:
            self.log.write("plan", first_task=first_task, epochs=self.recipe.optimization.epochs, steps=steps)
        if progress.records and remaining:
            self.stop.check_after_task(len(progress.records) - 1)
        num_steps = sum(steps) - progress.saved_steps
        with ProgressDisplay(num_steps, is_silent=not self.accelerator.is_main_process) as display:
            for task in remaining:
                shown = TaskDisplay(
                    display,
                    task,
                    num_tasks=len(tasks),
                    num_epochs=self.recipe.optimization.epochs,
                    log_every=self.config.log_every,
                )
                self._fit_task(task, shown, is_first=task is remaining[0])
                if task is not tasks[-1]:
                    progress.stop_if_asked()
                    self.stop.check_after_task(task.index)

    def _fit_task(self, task: Task, shown: TaskDisplay, *, is_first: bool) -> None:
        resumption = self.progress.resumption
        if resumption is None:
            with self._seeded("begin_task", task):
                self.learner.begin_task(task)
        self.learner.to(self.accelerator.device)
        check_parameters(self.learner)
        preparation_seconds = self._prepare_task(task, shown)
        parameters = parameter_counts(self.learner)
        prints = TaskFingerprints(self.learner, task.index, self.accelerator)
        if resumption is not None:
            prints.check_resumed(resumption.position.frozen_sha256)
        if is_first:
            shown.line(describe_parameters(self.learner))
        measures = TaskMeasures(
            self.learner,
            task,
            accelerator=self.accelerator,
            images=self.evaluator.images.images,
            every_epoch=self.config.evaluate_every_epoch,
            feature_drift=self.config.feature_drift,
        )
        if resumption is None:
            self.log.write("begin_task", task=task.index, classes=len(task.classes), parameters=parameters)
            measures.begin()

        training, training_seconds = self._train(task, measures, shown, frozen_sha256=prints.frozen_sha256)
        measures.end()
        prints.check_training()
        trained = time.monotonic()
        with self._interruptible():
            shown.stage("end of task")
            self._with_features("end_task", self.learner.end_task, task)
            prints.check_end()
            self.progress.stop_if_asked()
            ended = time.monotonic()
            shown.stage("evaluation")
            num_gaps, seen = self.benchmark.first_task, self.benchmark.scenario.seen_after(task.index)
            judged = self.evaluator.judge(self.learner, seen[num_gaps:])
        evaluated = time.monotonic()

        self.matrix.add_row(judged.cells, first_task=num_gaps)
        self.log.write("evaluation", task=task.index, predictions=judged.predictions.tolist())
        record = task_record(
            task,
            training,
            parameters=parameters,
            prints=prints,
            num_test_images=sum(cell.total for cell in judged.cells),
            learner_report=self.learner.report(task) | tallies_of(training) | self.plans.buffer_report(),
            measured=measures.facts() | confusion_facts(judged, seen=seen, first_task=num_gaps),
            seconds={
                "training_seconds": preparation_seconds + training_seconds,
                "end_task_seconds": ended - trained,
                "evaluation_seconds": evaluated - ended,
            },
        )
        self.records.append(record)
        accuracy = self.matrix.curve()[-1]
        self.log.write("task", accuracy=accuracy, **asdict(record))
        if accuracy is not None:
            self.accelerator.log({"accuracy_over_seen_classes": accuracy}, step=self.progress.tracker_step)
        log_figures(self.accelerator, self.matrix, step=self.progress.tracker_step)
        num_tasks = len(self.benchmark.scenario.tasks)
        shown.line(task_line(task, record, self.matrix, num_tasks=num_tasks, first_task=num_gaps))
        self.progress.save_task()

    def _train(
        self, task: Task, measures: TaskMeasures, shown: TaskDisplay, *, frozen_sha256: str
    ) -> tuple[TaskTraining, float]:
        """Run the task's epochs, or what is left of them; return the seconds that they took in all."""
        training = TaskTraining(
            self.learner,
            task,
            recipe=self.recipe,
            loaders=self.loaders,
            accelerator=self.accelerator,
            readings=Readings(
                self.accelerator, self.log, task_index=task.index, first_step=self.progress.tracker_step
            ),
            planner=self.plans.planner_before(task, self.records),
        )
        if training.num_planned_steps:
            notes = self.recipe.task_notes(task, training.sampler) + self.learner.config.task_notes(task)
            for note in notes:
                logger.warning("%s", note)
        else:
            shown.skip(self.plans.num_steps(task))
        started = self.progress.begin_training(training, measures, frozen_sha256=frozen_sha256)
        if not training.is_complete:
            shown.epoch(training.epoch)
        try:
            for epoch in training.steps():
                shown.step(training, epoch)
                if training.step == 0:
                    measures.after_epoch(training, epoch, self.log)
                self.progress.between_steps()
        except TrainingInterrupted:  # also raised while workers let the run wait
            self.progress.save_before_leaving()
            raise
        return training, time.monotonic() - started

    def _prepare_task(self, task: Task, shown: TaskDisplay) -> float:
        """Let the learner see the task's images before training, if it wants to; return the seconds that it took."""
        if self.progress.resumption is not None or type(self.learner).prepare_task is Learner.prepare_task:
            return 0.0
        began = time.monotonic()
        shown.stage("preparation")
        with self._interruptible():
            self._with_features("prepare_task", self.learner.prepare_task, task)
        self.progress.stop_if_asked()
        return time.monotonic() - began

    def _with_features(self, purpose: str, function: Callable[[Task, Features], None], task: Task) -> None:
        """Let the learner work on the task's images; every rank continues with rank 0's tensors."""
        self.learner.eval()
        features = TaskFeatures(self.learner, task, accelerator=self.accelerator, loaders=self.loaders)
        with self._seeded(purpose, task):
            function(task, features)
        self.learner.to(self.accelerator.device)  # what is made of features lies on the CPU
        if self.accelerator.num_processes > 1:
            for tensor in self.learner.state_dict().values():
                torch.distributed.broadcast(tensor, src=0)

    def _interruptible(self) -> AbstractContextManager[None]:
        """Let a signal end at once what will be done again; several ranks would wait for the one that has left."""
        return self.stop.at_once() if self.accelerator.num_processes == 1 else nullcontext()

    def _seeded(self, purpose: str, task: Task) -> AbstractContextManager[None]:
        return seeded(seed_for(purpose, seed=self.recipe.seed, task=task.index))
