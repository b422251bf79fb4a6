"""A followed run on a terminal: bars, small curves, and what can be said about it in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vbm_ptm.report.run_progress import RunProgress, percent, shown

RunState = Literal["not begun", "running", "quiet", "finished", "stopped", "failed", "dead"]

_COLOURS: dict[RunState, str] = {
    "running": "green",
    "finished": "green",
    "quiet": "yellow",
    "not begun": "yellow",
    "stopped": "yellow",
    "failed": "red",
    "dead": "red",
}

_BLOCKS, _PLAIN_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"


@dataclass(frozen=True)
class Snapshot:
    """The current state of a run.

    Attributes:
        title: Directory, learner and data set.
        progress: How far it has come.
        state: Whether it is progressing.
        note: What to do if it is not; otherwise empty.
        images_per_second: Rate of training as observed, or over the finished tasks; None if neither is known.
        quiet_seconds: Seconds since the log last grew; None without a log.
    """

    title: str
    progress: RunProgress
    state: RunState
    note: str
    images_per_second: float | None
    quiet_seconds: float | None


def live_view(snapshot: Snapshot, *, width: int = 40, is_plain: bool = False) -> RenderableType:
    """Return all that is known about a run as one panel.

    Args:
        snapshot: The state of the run.
        width: Width of bars and curves, in characters.
        is_plain: Draw curves in ASCII.
    """
    progress = snapshot.progress
    parts: list[RenderableType] = [_bars(progress, width=width)]
    if progress.parts:
        parts.append(_curves(progress, width=width, is_plain=is_plain))
    if progress.accuracies:
        parts.append(_accuracies(progress, width=width, is_plain=is_plain))
    parts.append(Text(describe_rate(snapshot), style="dim"))
    if snapshot.note:
        parts.append(Text(snapshot.note, style=_COLOURS[snapshot.state]))
    title = Text.assemble(f"{snapshot.title} · ", (snapshot.state, _COLOURS[snapshot.state]))
    return Panel(Group(*parts), title=title, title_align="left", padding=(0, 1), expand=False)


def describe_rate(snapshot: Snapshot) -> str:
    """Say how fast a run is, how much is left, and how long it has been quiet."""
    progress, rate = snapshot.progress, snapshot.images_per_second
    items = []
    if rate:
        items.append(f"{rate:.3g} images/s")
    if progress.data_seconds and snapshot.state != "finished":
        waiting = 1000 * sum(progress.data_seconds) / len(progress.data_seconds)
        items.append(f"{waiting:.3g} ms a step for images")
    left = progress.seconds_left(rate) if snapshot.state in ("running", "quiet") else None
    if left is not None and not progress.is_complete:
        items.append(f"about {duration(left)} left")
    if progress.learning_rates and snapshot.state != "finished":
        rates = ", ".join(f"{name} {value:.3g}" for name, value in progress.learning_rates.items())
        items.append(f"learning rate {rates}")
    if snapshot.quiet_seconds is not None and snapshot.state != "finished":
        items.append(f"last line {duration(snapshot.quiet_seconds)} ago")
    return " · ".join(items)


def duration(seconds: float) -> str:
    """Return a duration in readable form."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if hours < 1 else f"{hours:.1f} h"


def sparkline(values: Sequence[float], *, width: int, is_plain: bool = False) -> str:
    """Return values as a line of blocks, from the smallest to the largest; means if there are more than fit."""
    blocks = _PLAIN_BLOCKS if is_plain else _BLOCKS
    count = min(len(values), width)
    bounds = [len(values) * index // count for index in range(count + 1)] if count else [0]
    means = [sum(values[first:last]) / (last - first) for first, last in pairwise(bounds)]
    if not means:
        return ""
    low, high = min(means), max(means)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((mean - low) * scale)] for mean in means)


def _bars(progress: RunProgress, *, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    done = progress.num_finished
    rows: list[tuple[str, int, int | None]] = [("tasks done", done, progress.num_tasks)]
    if progress.task is not None and progress.is_task_open:
        rows.append((f"task {progress.task + 1}, epoch", progress.epoch + 1, progress.num_epochs))
        rows.append(("its steps", progress.task_steps, progress.planned_steps.get(progress.task)))
    rows.append(("all steps", progress.num_steps, progress.total_steps))
    for name, value, total in rows:
        bar: RenderableType = "" if total is None else ProgressBar(total or 1, value, width=width)
        table.add_row(name, str(value) if total is None else f"{value:,}/{total:,}", bar)
    if progress.is_between_steps:
        table.add_row("", "end of task, evaluation", "")
    return table


def _curves(progress: RunProgress, *, width: int, is_plain: bool) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, values in progress.parts.items():
        curve = sparkline(values, width=width, is_plain=is_plain)
        label = "accuracy in training" if name == "accuracy" else name.replace("_", " ")
        table.add_row(label, shown(name, values[-1]), curve)
    return table


def _accuracies(progress: RunProgress, *, width: int, is_plain: bool) -> Table:
    known = [accuracy for accuracy in progress.accuracies if accuracy is not None]
    table = Table.grid(padding=(0, 2))
    curve = sparkline(known, width=width, is_plain=is_plain)
    table.add_row("accuracy after tasks", percent(progress.accuracies[-1]), curve)
    last = list(enumerate(progress.accuracies, start=1))[-5:]
    numbers = ", ".join(f"{task}: {percent(accuracy)}" for task, accuracy in last)
    return _stacked(table, Text(f"over all seen classes, after task {numbers}", style="dim"))


def _stacked(*parts: RenderableType) -> Table:
    table = Table.grid()
    for part in parts:
        table.add_row(part)
    return table
