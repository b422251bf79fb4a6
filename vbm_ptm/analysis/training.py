"""Loss parts, learning rates and gradient norms over a run's steps, from ``log.jsonl``; and where time went."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vbm_ptm.analysis.drawing import SERIES, Lines, add_legend, line_styles, new_figure, styled
from vbm_ptm.analysis.spread import Spread, mean_and_std
from vbm_ptm.storage.log_reader import ABOUT_A_STEP
from vbm_ptm.storage.task_record import TaskTimings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_POINTS = 160


@dataclass
class TrainingLog:
    """The content of a run's log.

    Attributes:
        readings: Steps of the whole run and their values, by name ("loss", …, "learning rate: heads").
        task_of_step: Index of the task of each step.
        predictions: The class assigned to each test image, in the order of the evaluation, by the task it followed.
        num_tasks: Number of finished tasks.
        num_torn: Number of lines that cannot be read; the last one may be torn if a run was cut off.
    """

    readings: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)
    task_of_step: list[int] = field(default_factory=list)
    predictions: dict[int, list[int]] = field(default_factory=dict)
    num_tasks: int = 0
    num_torn: int = 0


def read_log(lines: Iterable[str]) -> TrainingLog:
    """Read the lines of a log."""
    log = TrainingLog()
    for line in lines:
        try:
            event: dict[str, Any] = json.loads(line)
            kind = event["event"]
        except (ValueError, KeyError, TypeError):
            log.num_torn += 1
            continue
        if kind == "step":
            rates = {f"learning rate: {name}": rate for name, rate in event.get("learning_rates", {}).items()}
            readings = {name: value for name, value in event.items() if name not in ABOUT_A_STEP}
            for name, value in (readings | rates).items():
                steps, values = log.readings.setdefault(name, ([], []))
                steps.append(len(log.task_of_step))
                values.append(float(value))
            log.task_of_step.append(event["task"])
        elif kind == "evaluation":
            log.predictions[event["task"]] = event["predictions"]
        elif kind == "task":
            log.num_tasks += 1
    return log


def read_log_file(file: Path) -> TrainingLog:
    """Read ``log.jsonl``; empty if there is no file."""
    if not file.is_file():
        return TrainingLog()
    with file.open(encoding="utf-8", errors="replace") as lines:
        return read_log(lines)


def thinned(steps: Sequence[int], values: Sequence[float], *, width: int) -> dict[int, float]:
    """Return the mean value of each stretch of ``width`` steps, by the stretch's number, where there is one.

    Args:
        steps: (n,) positions in the run.
        values: (n,) readings.
        width: Steps of a stretch; runs are averaged by number, so it is one for all of them.
    """
    stretches, where = np.unique(np.asarray(steps) // width, return_inverse=True)
    means = np.bincount(where, weights=np.asarray(values, dtype=float)) / np.bincount(where)
    return dict(zip(stretches.tolist(), means.tolist(), strict=True))


def reading_names(lines: Lines[TrainingLog]) -> list[str]:
    """Return the names of all readings, losses first, learning rates last."""
    names = dict.fromkeys(name for logs in lines.values() for log in logs for name in log.readings)
    return sorted(names, key=lambda name: (name.startswith("learning rate"), name != "loss"))


def task_means(log: TrainingLog, name: str) -> dict[int, float]:
    """Return the mean of a reading in each task."""
    steps, values = log.readings.get(name, ([], []))
    found: dict[int, list[float]] = defaultdict(list)
    for step, value in zip(steps, values, strict=True):
        found[log.task_of_step[step]].append(value)
    return {task: float(np.mean(several)) for task, several in found.items()}


def readings_figure(lines: Lines[TrainingLog]) -> Figure:
    """Draw every reading over the steps of the run, one panel each: means over stretches and a line's runs."""
    with styled():
        names = reading_names(lines)
        figure, panels = new_figure(max(len(names), 1), columns=2, height=2.3)
        styles = line_styles(list(lines))
        for name, axes in zip(names, panels, strict=False):
            for label, logs in lines.items():
                width = max(1, -(-max(len(log.task_of_step) for log in logs) // MAX_POINTS))
                curves = [thinned(*log.readings[name], width=width) for log in logs if name in log.readings]
                if not curves:
                    continue
                stretches = np.unique([stretch for curve in curves for stretch in curve])
                places = stretches * width + (width - 1) / 2
                means, _ = mean_and_std(
                    [Spread.of(curve.get(each) for curve in curves) for each in stretches]
                )
                axes.plot(
                    places,
                    means,
                    color=styles[label].color,
                    linestyle=styles[label].linestyle,
                    linewidth=1.2,
                    label=label,
                )
            axes.set(title=name.replace("_", " "), xlabel="step")
            if name.startswith("learning rate"):
                axes.set_ylim(bottom=0)
        add_legend(figure, panels[0], lines)
    return figure


PARTS = {
    "training": "training_seconds",
    "end of task": "end_task_seconds",
    "evaluation": "evaluation_seconds",
}


def seconds_by_part(timings: Sequence[TaskTimings]) -> dict[str, float]:
    """Return the seconds that training, ends of tasks and evaluation took, over all tasks."""
    return {part: sum(getattr(each, name) for each in timings) for part, name in PARTS.items()}


def time_figure(lines: Lines[Sequence[TaskTimings]]) -> Figure:
    """Draw where the time of each line went, the mean over its runs."""
    with styled():
        figure, (axes,) = new_figure(height=max(1.5, 0.36 * len(lines) + 0.9))
        left = np.zeros(len(lines))
        split = {label: [seconds_by_part(timings) for timings in runs] for label, runs in lines.items()}
        for number, part in enumerate(PARTS):
            widths = np.array([Spread.of(each[part] for each in runs).mean or 0.0 for runs in split.values()])
            axes.barh(np.arange(len(lines)), widths, left=left, height=0.6, color=SERIES[number], label=part)
            left = left + widths
        axes.set_yticks(np.arange(len(lines)), labels=list(lines))
        axes.invert_yaxis()
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("seconds")
        add_legend(figure, axes, PARTS)
    return figure
