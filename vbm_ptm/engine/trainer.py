"""The training loop: every learner, with one view or many, on one rank or several.

Per task: begin_task -> device -> prepare_task -> training steps -> end_task -> evaluate -> checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import Field, field_validator
from torch import Tensor

from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.acceleration import Tracker, wait_for_ranks
from vbm_ptm.engine.contract import check_parameters
from vbm_ptm.engine.evaluator import Evaluator, confusion_facts
from vbm_ptm.engine.features import TaskFeatures
from vbm_ptm.engine.fingerprint import TaskFingerprints
from vbm_ptm.engine.interruption import STOP_SIGNALS, StopRequest, StopSignal
from vbm_ptm.engine.measures import TaskMeasures, without_measures
from vbm_ptm.engine.readings import Readings
from vbm_ptm.engine.recipe import Recipe
from vbm_ptm.engine.replay_planner import ReplayPlanner, buffer_bytes, buffer_report
from vbm_ptm.engine.task_training import TaskTraining
from vbm_ptm.engine.tracker_figures import log_figures
from vbm_ptm.engine.tracking import ProgressDisplay, RunLog
from vbm_ptm.errors import TrainingInterrupted
from vbm_ptm.learners.base import Features, Learner
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.randomness import seed_for, seeded
from vbm_ptm.replay import cells_of, trained_classes
from vbm_ptm.settings import PrecisionSetting, Settings
from vbm_ptm.storage.checkpoint import CheckpointStore
from vbm_ptm.storage.checkpoint_state import RunState
from vbm_ptm.storage.save_schedule import SaveSchedule
from vbm_ptm.storage.task_record import TaskRecord

logger = logging.getLogger(__name__)


class TrainerConfig(Settings):
    """How the loop runs.

    Attributes:
        max_steps_per_task: Stop each task after so many steps (a smoke run); null for all epochs.
        log_every: Steps between two readings of the losses, which stay on the device until then.
        mixed_precision: "no", "bf16" or "fp16" through Accelerate. "auto" is bf16 where the device has units for it
            (GPUs with bf16, CPUs with AMX or AVX512-BF16), else "no"; a run stores which of the two, and keeps it.
        rank_timeout_minutes: How long a rank waits for the others, at the start and in every exchange.
        trackers: "tensorboard", "wandb" or both, through Accelerate, beside ``log.jsonl``.
        stop_signals: Signals that save the run and end it, besides SIGINT and SIGTERM: what batch systems send before
            time is up, and what a closed terminal sends.
        evaluate_every_epoch: After every epoch, measure the accuracy on training and test images of the task, and from
            it the paper's degree of forgetting and what samples lose between two visits. Weights stay what they are.
        feature_drift: Measure how far each task moves the features of the test images.
    """

    max_steps_per_task: int | None = Field(default=None, ge=1)
    log_every: int = Field(default=10, ge=1)
    mixed_precision: PrecisionSetting = "auto"
    rank_timeout_minutes: float = Field(default=10.0, gt=0)
    trackers: tuple[Tracker, ...] = ()
    stop_signals: tuple[StopSignal, ...] = STOP_SIGNALS
    evaluate_every_epoch: bool = False
    feature_drift: bool = False

    @field_validator("trackers", mode="before")
    @classmethod
    def _take_one_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class Trainer:
    """Trains a learner on the tasks of a benchmark and measures it after each.

    Args:
        learner: Fresh, or restored to a checkpoint, of which ``load_state`` gets the state.
        recipe: The loss, and how each task is trained.
        loaders: Bring the images of the benchmark.
        config: How the loop runs.
        accelerator: Devices, ranks and precision.
        log: Receives an event for each reading, task and evaluation.
        store: Where checkpoints go; None on ranks other than 0.
        schedule: When to save inside a task.
        stop: Asks the run to end between two steps.
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
        self.store = store
        self.schedule = schedule
        self.stop = stop
        self.evaluator = Evaluator(accelerator, loaders)
        rehearsal = learner.rehearsal
        self.planner = (
            ReplayPlanner(rehearsal, num_views=recipe.view_batch.views_per_replay, seed=recipe.seed)
            if rehearsal is not None and rehearsal.mode == "stream"
            else None
        )
        self.matrix = AccuracyMatrix()
        self.records: list[TaskRecord] = []
        self._has_shown_parameters = False
        self._frozen_sha256 = ""
        # Of the task in progress: what it goes on from, and the position that was saved last.
        self._resumed: tuple[dict[str, Any], Mapping[str, Tensor]] | None = None
        self._saved_steps = 0

    def fit(self) -> None:
        """Train on all tasks that are not finished; ``matrix`` and ``records`` hold the outcome.

        Raises:
            TrainingInterrupted: The stop request came; ``progress`` says what is saved.
        """
        remaining = self.benchmark.scenario.tasks[len(self.records) :]
        steps = [self._steps_of(task) for task in remaining]
        if self._resumed is None and len(self.records) == self.benchmark.first_task:
            epochs = self.recipe.optimization.epochs
            self.log.write("plan", first_task=self.benchmark.first_task, epochs=epochs, steps=steps)
        if self.records and remaining:
            self.stop.check_after_task(len(self.records) - 1)
        with ProgressDisplay(
            sum(steps) - self._saved_steps, is_silent=not self.accelerator.is_main_process
        ) as display:
            for task in remaining:
                self._fit_task(task, display)
                self._stop_if_asked()
                self.stop.check_after_task(task.index)

    def progress(self) -> str:
        """Say how far a stopped run has come in what it has saved."""
        finished = f"{len(self.records)} of {len(self.benchmark.scenario.tasks)} tasks are finished"
        if not self._saved_steps:
            return finished
        task = self.benchmark.scenario.tasks[len(self.records)]
        return f"{finished}, task {task.index + 1} after {self._saved_steps} of {self._steps_of(task)} steps"

    def _fit_task(self, task: Task, display: ProgressDisplay) -> None:
        if self._resumed is None:
            with seeded(seed_for("begin_task", seed=self.recipe.seed, task=task.index)):
                self.learner.begin_task(task)
        self.learner.to(self.accelerator.device)
        check_parameters(self.learner)
        preparation_seconds = self._prepare_task(task, display)
        parameters = parameter_counts(self.learner)
        prints = TaskFingerprints(self.learner, task.index, self.accelerator)
        self._frozen_sha256 = prints.frozen_sha256
        if self._resumed is not None:
            prints.check_resumed(self._resumed[0]["frozen_sha256"])
        if not self._has_shown_parameters:
            display.line(describe_parameters(self.learner))
            self._has_shown_parameters = True
        self._measures = TaskMeasures(
            self.learner,
            task,
            accelerator=self.accelerator,
            loaders=self.loaders,
            every_epoch=self.config.evaluate_every_epoch,
            feature_drift=self.config.feature_drift,
        )
        if self._resumed is None:
            self.log.write("begin_task", task=task.index, classes=len(task.classes), parameters=parameters)
            self._measures.begin()
        training, training_seconds = self._train(task, display)
        self._measures.end()
        prints.check_training()
        trained = time.monotonic()
        # Alone, a rank need not finish what will be done again; several would wait for the one that has left.
        with self.stop.at_once() if self.accelerator.num_processes == 1 else nullcontext():
            display.show(f"task {task.index + 1}/{len(self.benchmark.scenario.tasks)} · end of task")
            self._with_features("end_task", self.learner.end_task, task)
            prints.check_end()
            self._stop_if_asked()
            ended = time.monotonic()
            display.show(f"task {task.index + 1}/{len(self.benchmark.scenario.tasks)} · evaluation")
            num_gaps = self.benchmark.first_task
            seen = self.benchmark.scenario.seen_after(task.index)
            judged = self.evaluator.judge(self.learner, seen[num_gaps:])
        evaluated = time.monotonic()

        self.matrix.add_row(judged.cells, first_task=num_gaps)
        self.log.write("evaluation", task=task.index, predictions=judged.predictions.tolist())
        record = TaskRecord(
            task_index=task.index,
            num_samples=len(training.rows),
            num_views=training.num_views,
            num_steps=training.num_steps,
            num_images=training.num_images,
            num_skipped_steps=training.readings.num_skipped,
            num_test_images=sum(cell.total for cell in judged.cells),
            min_visits=int(training.visits.counts.min(initial=training.num_steps)),
            max_visits=int(training.visits.counts.max(initial=0)),
            recall_interval=training.visits.recall_interval(),
            summed_rate=training.visits.summed_rate(),
            **self._measures.facts(),
            **confusion_facts(judged, seen=seen, first_task=num_gaps),
            learner_report=self.learner.report(task) | training.tallies() | self._rehearsal_report(),
            parameters=parameters,
            frozen_sha256=prints.frozen_sha256,
            trained_sha256=prints.trained_sha256,
            training_seconds=round(preparation_seconds + training_seconds, 3),
            **training.costs(),
            end_task_seconds=round(ended - trained, 3),
            evaluation_seconds=round(evaluated - ended, 3),
        )
        self.records.append(record)
        accuracy = self.matrix.curve()[-1]
        self.log.write("task", accuracy=accuracy, **asdict(record))
        if accuracy is not None:
            self.accelerator.log({"accuracy_over_seen_classes": accuracy}, step=self._tracker_step())
        log_figures(self.accelerator, self.matrix, step=self._tracker_step())
        display.line(self._task_line(task, record, accuracy))
        if self.store:
            self.log.sync()
            self.store.save(self.learner, self.state())
        self._saved_steps = 0
        wait_for_ranks(self.accelerator)

    def _train(self, task: Task, display: ProgressDisplay) -> tuple[TaskTraining, float]:
        """Run the task's epochs, or what is left of them; return the seconds that they took in all."""
        readings = Readings(
            self.accelerator, self.log, task_index=task.index, first_step=self._tracker_step()
        )
        training = TaskTraining(
            self.learner,
            task,
            recipe=self.recipe,
            loaders=self.loaders,
            accelerator=self.accelerator,
            readings=readings,
            planner=self._planner_before(task),
        )
        if not training.num_planned_steps:
            display.advance(self._steps_of(task))  # planned before anybody could know
        else:
            for note in (
                *self.recipe.task_notes(task, training.sampler),
                *self.learner.config.task_notes(task),
            ):
                logger.warning("%s", note)
        started = time.monotonic()
        if self._resumed is not None:
            position, optimizer = self._resumed
            self._measures.load_state(position["measures"], optimizer)
            training.load_state(position, without_measures(optimizer))
            started -= position["seconds"]
            self._resumed = None
        self.schedule.begin(num_steps=training.num_steps, now=time.monotonic())
        if not training.is_complete:
            display.show(self._where(task, training.epoch))
        try:
            for epoch in training.steps():
                self._show_step(training, self._where(task, epoch), display)
                if training.step == 0:
                    self._measures.after_epoch(training, epoch, self.log)
                self._between_steps(training, started)
        except TrainingInterrupted:
            # Also raised while workers let the run wait; several ranks cannot agree there on what to save.
            if self._saved_steps < training.num_steps and self.accelerator.num_processes == 1:
                self._save_inside_task(training, started)
            raise
        return training, time.monotonic() - started

    def _planner_before(self, task: Task) -> ReplayPlanner | None:
        """Return what decides the draws, after it has seen the steps of all tasks before this one."""
        planner = self.planner
        if planner is None:
            return None
        for record in self.records[planner.num_tasks : task.index]:
            earlier = self.benchmark.scenario.tasks[record.task_index]
            rows = self.benchmark.training_rows(earlier)
            classes = self.benchmark.training_classes(earlier)
            sampler = self.recipe.sampler(classes, task_index=earlier.index)
            planner.walk(sampler, rows, task=earlier.index, num_steps=record.num_steps)
        planner.choose(self.learner.rehearsed_rows().tolist())
        return planner

    def _rehearsal_report(self) -> dict[str, Any]:
        """Return what the buffer holds, for the record of the task."""
        if self.learner.rehearsal is None:
            return {}
        classes = self.benchmark.class_indices(self.benchmark.datasets.train)
        rows = self.learner.rehearsed_rows().tolist()
        if self.planner is None:
            report = buffer_report(rows, classes, capacity=self.learner.rehearsal.capacity)
        else:
            report = self.planner.report(classes, chosen=rows)
            self.planner.finish_task()
        return {"buffer": report | buffer_bytes(self.learner, num_images=report["stored"])}

    def _show_step(self, training: TaskTraining, where: str, display: ProgressDisplay) -> None:
        """Show what is known of the step that was taken last."""
        display.advance()
        if training.num_steps % self.config.log_every == 0:
            display.show(where, training.readings.read())
        if training.step == 0 or training.is_complete:
            display.end_epoch(where, training.readings.end_epoch())

    def _where(self, task: Task, epoch: int) -> str:
        num_tasks, num_epochs = len(self.benchmark.scenario.tasks), self.recipe.optimization.epochs
        return f"task {task.index + 1}/{num_tasks} · epoch {epoch + 1}/{num_epochs}"

    def _between_steps(self, training: TaskTraining, started: float) -> None:
        """Save and stop where it is time to; ranks agree on both where they wait for each other anyway."""
        is_epoch_over = training.step == 0
        is_reading = training.num_steps % self.config.log_every == 0
        if self.accelerator.num_processes > 1 and not (is_reading or is_epoch_over or training.is_complete):
            return
        # The state after the last step is saved, so that the end of the task can be done again without training.
        is_due = training.is_complete or self.schedule.is_due(
            num_steps=training.num_steps, is_epoch_over=is_epoch_over, now=time.monotonic()
        )
        stop, must_save = self._agreed(self.stop.signal, int(is_due and self.accelerator.is_main_process))
        if must_save or stop:
            self._save_inside_task(training, started)
        self.stop.check(stop)

    def _save_inside_task(self, training: TaskTraining, started: float) -> None:
        began = time.monotonic()
        position = {
            **training.state(),
            "measures": self._measures.state(),
            "seconds": began - started,
            "frozen_sha256": self._frozen_sha256,
        }
        if self.store:
            self.log.sync()
            self.store.save_inside_task(
                self.learner,
                self.state().model_copy(update={"training": position}),
                num_steps=sum(record.num_steps for record in self.records) + training.num_steps,
                optimizer={**training.optimizer_tensors(), **self._measures.tensors()},
            )
        self._saved_steps = training.num_steps
        self.schedule.saved(num_steps=training.num_steps, began=began, ended=time.monotonic())
        wait_for_ranks(self.accelerator)

    def _prepare_task(self, task: Task, display: ProgressDisplay) -> float:
        """Let the learner see the task's images before training, if it wants to; return the seconds that it took."""
        if self._resumed is not None or type(self.learner).prepare_task is Learner.prepare_task:
            return 0.0
        began = time.monotonic()
        display.show(f"task {task.index + 1}/{len(self.benchmark.scenario.tasks)} · preparation")
        # Until the first step is saved the whole task is done again, so that a single rank may stop anywhere.
        with self.stop.at_once() if self.accelerator.num_processes == 1 else nullcontext():
            self._with_features("prepare_task", self.learner.prepare_task, task)
        self._stop_if_asked()
        return time.monotonic() - began

    def _with_features(self, purpose: str, function: Callable[[Task, Features], None], task: Task) -> None:
        """Let the learner do something with the task's images."""
        self.learner.eval()
        features = TaskFeatures(self.learner, task, accelerator=self.accelerator, loaders=self.loaders)
        with seeded(seed_for(purpose, seed=self.recipe.seed, task=task.index)):
            function(task, features)
        self.learner.to(self.accelerator.device)  # what is made of features lies on the CPU
        self._broadcast_state()

    def _stop_if_asked(self) -> None:
        """Raise on all ranks if a signal has come to one: a rank that left alone would leave the others waiting."""
        (stop,) = self._agreed(self.stop.signal)
        self.stop.check(stop)

    def _agreed(self, *numbers: int) -> list[int]:
        """Return the largest of each number over all ranks."""
        if self.accelerator.num_processes == 1:
            return list(numbers)
        mine = torch.tensor([numbers], device=self.accelerator.device)
        largest: list[int] = self.accelerator.gather(mine).amax(0).tolist()
        return largest

    def _steps_of(self, task: Task) -> int:
        if not self.learner.config.trains(task.index):
            return 0
        classes = self.benchmark.training_classes(task)
        earlier = self.benchmark.scenario.tasks[: task.index]
        cells = [cell for each in earlier for cell in cells_of(self.benchmark.training_classes(each))]
        together = trained_classes(self.learner.rehearsal, classes, cells)
        return self.recipe.workload(self.recipe.sampler(together, task_index=task.index)).num_steps

    def _tracker_step(self) -> int:
        """Return the steps of finished tasks, each task counted as one more: trackers drop what does not rise."""
        return sum(record.num_steps for record in self.records) + len(self.records)

    def _broadcast_state(self) -> None:
        """Make every rank continue with rank 0's tensors, bit for bit."""
        if self.accelerator.num_processes > 1:
            for tensor in self.learner.state_dict().values():
                torch.distributed.broadcast(tensor, src=0)

    def state(self) -> RunState:
        """Return what ``load_state`` needs, but for the task in progress."""
        scaler = self.accelerator.scaler
        return RunState(
            class_names=self.benchmark.scenario.class_names,
            split_sha256=self.benchmark.datasets.split_sha256,
            held_out=self.benchmark.datasets.record.held_out,
            num_planned_tasks=self.learner.num_tasks,
            tasks=self.benchmark.scenario.tasks,
            evaluation_tasks=self.benchmark.scenario.evaluation_tasks,
            matrix=self.matrix.to_dict(),
            records=tuple(self.records),
            log_position=self.log.position,
            gradient_scaler=scaler.state_dict() if scaler else None,
            num_ranks=self.accelerator.num_processes,
            num_threads=torch.get_num_threads(),
        )

    def load_state(self, state: RunState, optimizer: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint; say where the run will not be the same to the last bit.

        Args:
            state: What ``state`` returned, with the position in the task in progress if there is one.
            optimizer: What the optimizer kept there.
        """
        for name, then, now in (
            ("num_ranks", state.num_ranks, self.accelerator.num_processes),
            ("num_threads", state.num_threads, torch.get_num_threads()),
        ):
            if then != now:
                logger.warning(
                    "%s was %d and is %d now: steps stay the same, the last bits of the weights may not",
                    name,
                    then,
                    now,
                )
        self.matrix = state.accuracies
        self.records = list(state.records)
        if state.gradient_scaler and self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state.gradient_scaler)
        if state.training is not None:
            self._resumed = state.training, optimizer
            self._saved_steps = state.training["num_steps"]

    def _task_line(self, task: Task, record: TaskRecord, accuracy: float | None) -> str:
        own = self.matrix.accuracy(-1, -1)
        shown = "n/a" if accuracy is None else f"{accuracy:.2f} %"
        if self.benchmark.first_task and own is not None:
            shown += f", on its own test images {own:.2f} %"
        visits = f"{record.min_visits}"
        if record.max_visits > record.min_visits:
            visits += f" to {record.max_visits}"
        trained = f"{record.num_steps} steps, {record.num_images} images, {visits} visits of {record.num_views} views"
        return (
            f"task {task.index + 1}/{len(self.benchmark.scenario.tasks)} done: {len(task.classes)} classes, "
            f"{record.num_samples} samples, {trained if record.num_steps else 'nothing to train'}; "
            f"accuracy over all seen classes {shown}; {record.seconds:.1f} s"
        )


def parameter_counts(learner: Learner) -> dict[str, int]:
    """Return the trainable parameters by group, and the frozen ones."""
    counts = {
        group.name: sum(parameter.numel() for parameter in group.parameters)
        for group in learner.parameter_groups()
    }
    frozen = sum(parameter.numel() for parameter in learner.parameters() if not parameter.requires_grad)
    return counts | {"frozen": frozen}


def describe_parameters(learner: Learner) -> str:
    """Say what the current task trains, group by group, and what stays frozen, part by part."""
    trained = {name: count for name, count in parameter_counts(learner).items() if name != "frozen"}
    frozen: Counter[str] = Counter()
    for name, parameter in learner.named_parameters():
        if not parameter.requires_grad:
            frozen[name.partition(".")[0]] += parameter.numel()
    return "parameters: " + "; ".join(
        f"{name} {sum(counts.values()):,}"
        + (f" ({', '.join(f'{part} {count:,}' for part, count in counts.items())})" if counts else "")
        for name, counts in (("trained", trained), ("frozen", frozen))
    )
