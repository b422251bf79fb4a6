"""What is shown of a task while it is trained, and what is kept of it afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.fingerprint import TaskFingerprints
from vbm_ptm.engine.memory import peak_memory
from vbm_ptm.engine.task_training import TaskTraining
from vbm_ptm.engine.tracking import ProgressDisplay
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.storage.task_record import TaskRecord


class TaskDisplay:
    """Shows where a run is in one of its tasks.

    Args:
        display: Of the whole run.
        task: The task.
        num_tasks: Tasks of the run.
        num_epochs: Epochs of each.
        log_every: Steps between two readings of the losses.
    """

    def __init__(
        self, display: ProgressDisplay, task: Task, *, num_tasks: int, num_epochs: int, log_every: int
    ) -> None:
        self._display = display
        self._where = f"task {task.index + 1}/{num_tasks}"
        self._num_epochs = num_epochs
        self._log_every = log_every

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self._display.line(text)

    def stage(self, name: str) -> None:
        """Show what is done outside of training steps."""
        self._display.show(f"{self._where} · {name}")

    def skip(self, num_steps: int) -> None:
        """Count steps that were planned before it was known that there is nothing to train."""
        self._display.advance(num_steps)

    def epoch(self, epoch: int) -> str:
        """Show which epoch is trained, counted from 0; return it in words."""
        where = f"{self._where} · epoch {epoch + 1}/{self._num_epochs}"
        self._display.show(where)
        return where

    def step(self, training: TaskTraining, epoch: int) -> None:
        """Show what is known of the step that was taken last, in this epoch."""
        where = f"{self._where} · epoch {epoch + 1}/{self._num_epochs}"
        self._display.advance()
        if training.num_steps % self._log_every == 0:
            self._display.show(where, training.readings.read())
        if training.step == 0 or training.is_complete:
            self._display.end_epoch(where, training.readings.end_epoch())


def task_record(
    task: Task,
    training: TaskTraining,
    *,
    parameters: dict[str, int],
    prints: TaskFingerprints,
    num_test_images: int,
    learner_report: dict[str, Any],
    measured: Mapping[str, Any],
    seconds: Mapping[str, Any],
) -> TaskRecord:
    """Return what is kept of a finished task.

    Args:
        task: The task.
        training: After its last step.
        parameters: Trained and frozen ones, by group.
        prints: Fingerprints of the learner at the end.
        num_test_images: Images that accuracy was measured on, over all ranks.
        learner_report: What the learner and its buffer say; exemplars with another number of views are added.
        measured: Other fields of the record.
        seconds: Its fields of time, not rounded.
    """
    counts = training.visits.counts
    return TaskRecord(
        task_index=task.index,
        num_samples=len(training.rows),
        num_views=training.num_views,
        num_steps=training.num_steps,
        num_images=training.num_images,
        num_skipped_steps=training.readings.num_skipped,
        num_test_images=num_test_images,
        min_visits=int(counts.min(initial=training.num_steps)),
        max_visits=int(counts.max(initial=0)),
        recall_interval=training.visits.recall_interval(),
        summed_rate=training.visits.summed_rate(),
        learner_report=learner_report | _exemplars(training),
        parameters=parameters,
        frozen_sha256=prints.frozen_sha256,
        trained_sha256=prints.trained_sha256,
        peak_memory_bytes=peak_memory(training.accelerator.device),
        data_seconds=round(training.data_seconds, 3),
        step_seconds=round(training.step_seconds, 3),
        **measured,
        **{name: round(value, 3) for name, value in seconds.items()},
    )


def _exemplars(training: TaskTraining) -> dict[str, Any]:
    """Return how exemplars were shown that have another number of views than the task's own samples."""
    visits = training.exemplar_visits
    if not len(visits.counts):
        return {}
    return {
        "exemplars": {
            "num_views": training.sampler.num_exemplar_views,
            "min_visits": int(visits.counts.min()),
            "max_visits": int(visits.counts.max()),
            "recall_interval": visits.recall_interval(),
        }
    }


def task_line(
    task: Task, record: TaskRecord, matrix: AccuracyMatrix, *, num_tasks: int, first_task: int
) -> str:
    """Return a line on a finished task.

    Args:
        task: The task.
        record: What is kept of it.
        matrix: The accuracies up to this task.
        num_tasks: Tasks of the run.
        first_task: The test images of the tasks before this one are not here.
    """
    accuracy, own = matrix.curve()[-1], matrix.accuracy(-1, -1)
    shown = "n/a" if accuracy is None else f"{accuracy:.2f} %"
    if first_task and own is not None:
        shown += f", on its own test images {own:.2f} %"
    visits = f"{record.min_visits}"
    if record.max_visits > record.min_visits:
        visits += f" to {record.max_visits}"
    trained = (
        f"{record.num_steps} step{'s' * (record.num_steps > 1)}, {record.num_images} images, "
        f"{visits} visit{'s' * (visits != '1')} of "
        f"{record.num_views} view{'s' * (record.num_views > 1)}"
    )
    return (
        f"task {task.index + 1}/{num_tasks} done: {len(task.classes)} classes, {record.num_samples} samples, "
        f"{trained if record.num_steps else 'nothing to train'}; accuracy over all seen classes {shown}; "
        f"{record.seconds:.1f} s"
    )
