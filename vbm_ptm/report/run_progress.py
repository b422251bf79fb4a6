"""How far a run has come, from the events of its log."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from vbm_ptm.storage.log_reader import ABOUT_A_STEP

# Steps over which the waiting time for images is averaged.
_LAST_STEPS = 50


class RunProgress:
    """The sum of the events so far.

    Attributes:
        num_tasks: Tasks of the run; None if the log does not say, as in earlier versions.
        num_epochs: Epochs of a task; likewise.
        planned_steps: Steps of each task by its index, as far as planned.
        task: Index of the task in progress, or of the last one; None before the first.
        is_task_open: Whether that task is in progress.
        epoch: Epoch of the last step, from 0.
        task_steps: Steps of the task in progress.
        num_steps: Steps of the run.
        num_images: Images in these steps.
        parts: Loss parts of every step of the task in progress, by name.
        learning_rates: Learning rates of the last step, by group.
        data_seconds: How long the last steps waited for their images; empty if the log does not say.
        accuracies: Accuracy over all seen classes after each finished task, in percent; None if not all were measured.
        lines: One line for each epoch and each finished task, oldest first.
    """

    def __init__(self) -> None:
        self.num_tasks: int | None = None
        self.num_epochs: int | None = None
        self.planned_steps: dict[int, int] = {}
        self.task: int | None = None
        self.is_task_open = False
        self.epoch = self.task_steps = self.num_steps = self.num_images = 0
        self.parts: dict[str, list[float]] = {}
        self.learning_rates: dict[str, float] = {}
        self.data_seconds: deque[float] = deque(maxlen=_LAST_STEPS)
        self.accuracies: list[float | None] = []
        self.lines: list[str] = []
        self._training_seconds = self._other_seconds = 0.0
        self._timed_steps = self._timed_images = 0
        self._epoch_start = 0

    @property
    def num_finished(self) -> int:
        """Tasks that have been trained and measured."""
        return len(self.accuracies)

    @property
    def is_complete(self) -> bool:
        """Whether all tasks are finished, if the log says how many there are."""
        return self.num_tasks is not None and self.num_finished >= self.num_tasks

    @property
    def is_between_steps(self) -> bool:
        """Whether the task in progress has taken all its steps, and is being ended or evaluated."""
        planned = None if self.task is None else self.planned_steps.get(self.task)
        return self.is_task_open and planned is not None and self.task_steps >= planned

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None if unknown."""
        if self.num_tasks is None:
            return None
        done = self.num_steps - (self.task_steps if self.is_task_open else 0)
        return done + sum(steps for task, steps in self.planned_steps.items() if task >= self.num_finished)

    @property
    def images_per_second(self) -> float | None:
        """Rate of training over the finished tasks; None before the first one."""
        return self._timed_images / self._training_seconds if self._training_seconds else None

    def seconds_left(self, images_per_second: float | None = None) -> float | None:
        """Estimate how long the rest takes.

        Args:
            images_per_second: The observed rate; None for that of the finished tasks.
        """
        rate, total = images_per_second or self.images_per_second, self.total_steps
        if not rate or total is None or self.num_tasks is None or not self.num_steps:
            return None
        images_left = (total - self.num_steps) * self.num_images / self.num_steps
        between = self._other_seconds / self.num_finished if self.num_finished else 0.0
        return images_left / rate + between * (self.num_tasks - self.num_finished)

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Add the next events of the log."""
        for event in events:
            kind = event["event"]
            if kind == "plan":
                self._plan(event)
            elif kind == "begin_task":
                self._begin_task(event["task"])
            elif kind == "step":
                self._step(event)
            elif kind == "task":
                self._end_task(event)

    def _plan(self, event: Mapping[str, Any]) -> None:
        first, steps = event["first_task"], event["steps"]
        self.num_tasks, self.num_epochs = first + len(steps), event["epochs"]
        self.planned_steps = dict(enumerate(steps, start=first))

    def _begin_task(self, task: int) -> None:
        self.task, self.is_task_open = task, True
        self.epoch = self.task_steps = self._epoch_start = 0
        self.parts = {}

    def _step(self, event: Mapping[str, Any]) -> None:
        if not self.is_task_open:
            self._begin_task(event["task"])
        if event["epoch"] != self.epoch and self.task_steps:
            self._end_epoch()
            self.epoch = event["epoch"]
        self.task_steps += 1
        self.num_steps += 1
        self.num_images += event.get("images", 0)
        self.learning_rates = dict(event.get("learning_rates", {}))
        if "data_seconds" in event:
            self.data_seconds.append(event["data_seconds"])
        for name, value in event.items():
            if name not in ABOUT_A_STEP and isinstance(value, int | float):
                self.parts.setdefault(name, []).append(float(value))

    def _end_epoch(self) -> None:
        means = {
            name: sum(values[self._epoch_start :]) / max(len(values) - self._epoch_start, 1)
            for name, values in self.parts.items()
        }
        self.lines.append(f"{self.where()} · {describe(means)}")
        self._epoch_start = self.task_steps

    def _end_task(self, event: Mapping[str, Any]) -> None:
        self.task = event["task_index"]
        if self.task_steps > self._epoch_start:
            self._end_epoch()
        self.is_task_open = False
        self.accuracies.append(event["accuracy"])
        self._training_seconds += event["training_seconds"]
        self._other_seconds += event["end_task_seconds"] + event["evaluation_seconds"]
        self._timed_images += event["num_images"]
        total = f"/{self.num_tasks}" if self.num_tasks else ""
        seconds = event["training_seconds"] + event["end_task_seconds"] + event["evaluation_seconds"]
        self.lines.append(
            f"task {self.task + 1}{total} done: {event['num_steps']} steps, {event['num_images']} images; "
            f"accuracy over all seen classes {percent(event['accuracy'])}; {seconds:.1f} s"
        )

    def where(self) -> str:
        """Say which task and epoch the run is in."""
        if self.task is None:
            return "no task has begun"
        tasks = f"/{self.num_tasks}" if self.num_tasks else ""
        epochs = f"/{self.num_epochs}" if self.num_epochs else ""
        return f"task {self.task + 1}{tasks} · epoch {self.epoch + 1}{epochs}"


def describe(values: Mapping[str, float]) -> str:
    """Return loss parts by name."""
    return " · ".join(f"{name.replace('_', ' ')} {shown(name, value)}" for name, value in values.items())


def shown(name: str, value: float) -> str:
    """Return the value of a loss part."""
    return f"{value:.1%}" if name == "accuracy" else f"{value:.4g}"


def percent(accuracy: float | None) -> str:
    """Return an accuracy, or that it is unknown."""
    return "n/a" if accuracy is None else f"{accuracy:.2f} %"
