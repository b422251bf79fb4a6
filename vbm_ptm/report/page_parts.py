"""What the sections of a report share: the runs on the page, and tables of numbers by line and task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vbm_ptm.analysis.spread import Spread
from vbm_ptm.analysis.training import TrainingLog
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.report.collect import MeasuredRun
from vbm_ptm.report.page import PageTable, Picture
from vbm_ptm.report.tables import NOT_AVAILABLE, spread
from vbm_ptm.storage.run_result import RunResult

# Heat maps and distributions over prompts are drawn for this many lines; tables show all.
MAX_PANELS = 8


@dataclass(frozen=True)
class ReportRun:
    """A run on the page, finished or not.

    Attributes:
        label: The line that it belongs to.
        directory: Its run directory.
        state: In words: "finished", "2 of 5 tasks are finished", ….
        result: What ``result.json`` holds, if there is one.
        measured: What is collected from it; None unless it is finished.
        log: What ``log.jsonl`` holds.
    """

    label: str
    directory: str
    state: str
    result: RunResult | None = None
    measured: MeasuredRun | None = None
    log: TrainingLog = field(default_factory=TrainingLog)


@dataclass(frozen=True)
class Findings:
    """What is known besides the runs' own records.

    Attributes:
        differences: Rows of what differs between runs: section, setting, values.
        shared: Rows of what is the same in all runs: section, setting, value.
        hardest: Test images that most runs get wrong.
        forgotten: Test images that were right before and are wrong at the end.
        notes: What could not be shown, in sentences.
    """

    differences: tuple[tuple[str, str, str], ...] = ()
    shared: tuple[tuple[str, str, str], ...] = ()
    hardest: tuple[Picture, ...] = ()
    forgotten: tuple[Picture, ...] = ()
    notes: tuple[str, ...] = ()


def number(value: float | None, digits: int = 2) -> str:
    """Format a number."""
    return NOT_AVAILABLE if value is None or np.isnan(value) else f"{value + 0.0:.{digits}f}"


def mean_text(values: Spread, digits: int) -> str:
    """Format a mean with its standard deviation."""
    return NOT_AVAILABLE if values.mean is None else spread(values, digits=digits)


def lines_of(runs: Sequence[ReportRun], of: Callable[[RunResult], Any]) -> dict[str, list[Any]]:
    """Return, by label, what is collected from each finished run."""
    lines: dict[str, list[Any]] = {}
    for run in runs:
        if run.measured and run.result:
            lines.setdefault(run.label, []).append(of(run.result))
    return lines


def matrices_of(runs: Sequence[ReportRun]) -> dict[str, list[AccuracyMatrix]]:
    """Return, by label, the accuracies of each finished run."""
    return lines_of(runs, lambda result: result.matrix)


def records_of(runs: Sequence[ReportRun]) -> dict[str, list[Any]]:
    """Return, by label, the task records of each finished run."""
    return lines_of(runs, lambda result: result.task_records)


def first_lines(lines: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return as many lines as there are heat maps."""
    return dict(list(lines.items())[:MAX_PANELS])


def which_lines(lines: Mapping[str, Any]) -> str:
    """Say so if these are not all lines."""
    return f" The first {MAX_PANELS} of {len(lines)} lines." if len(lines) > MAX_PANELS else ""


def task_table(columns: Mapping[str, Sequence[Spread]], *, digits: int = 2, caption: str = "") -> PageTable:
    """Return a row for each line, a column for each task."""
    count = max(map(len, columns.values()), default=0)
    rows = [
        [label, *(mean_text(each, digits) for each in values), *[NOT_AVAILABLE] * (count - len(values))]
        for label, values in columns.items()
    ]
    return PageTable.of(("line", *(str(task + 1) for task in range(count))), rows, caption)


def rows_table(
    rows: Sequence[Sequence[float | None]], *, corner: str, caption: str, digits: int = 1
) -> PageTable:
    """Return a table of numbers whose rows and columns are counted from 1."""
    count = max(map(len, rows), default=0)
    return PageTable.of(
        (corner, *(str(column + 1) for column in range(count))),
        [
            [str(place), *(number(value, digits) for value in row), *[""] * (count - len(row))]
            for place, row in enumerate(rows, start=1)
        ],
        caption,
    )


def alternative(what: str, columns: Mapping[str, Sequence[Spread]]) -> str:
    """Describe a figure of lines: where each of them begins and ends."""
    ends = [
        f"{label} from {number(values[0].mean)} to {number(values[-1].mean)}"
        for label, values in columns.items()
        if values
    ]
    return f"{what}: {'; '.join(ends[:8])}{'; and more' if len(ends) > 8 else ''}."
