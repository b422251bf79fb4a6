"""Result dictionaries as tables for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from vbm_ptm.metrics import AccuracyMatrix

NOT_AVAILABLE = "n/a"


# Columns of a study: heading -> key of a row, and its digits.
_STUDY_COLUMNS = {
    "average": ("average_incremental_accuracy", 2),
    "last": ("last_accuracy", 2),
    "forgetting": ("forgetting", 2),
    "average, task mean": ("average_incremental_accuracy_task_mean", 2),
    "last, task mean": ("last_accuracy_task_mean", 2),
    "top-5 average": ("average_incremental_accuracy_top5", 2),
    "top-5 last": ("last_accuracy_top5", 2),
    "seconds": ("seconds", 1),
    "images seen": ("num_images", 0),
}
_DETAILS = ("average, task mean", "last, task mean", "top-5 average", "top-5 last")


def study_table(collected: Mapping[str, Any], *, details: bool = False) -> Table:
    """Return a line per label of a study: mean and standard deviation over its runs.

    Args:
        collected: What a study collected.
        details: Show the means over tasks and top-5 as well.
    """
    table = Table(title="Accuracy over all seen classes, top-1, in percent (pooled over test images)")
    table.add_column("run", no_wrap=True)
    columns = {
        heading: column for heading, column in _STUDY_COLUMNS.items() if details or heading not in _DETAILS
    }
    for heading in (*columns, "runs"):
        table.add_column(heading, justify="right", no_wrap=not details)
    for row in collected["rows"]:
        cells = [spread(row[key], digits=digits) for key, digits in columns.values()]
        table.add_row(row["label"], *cells, str(row["num_runs"]))
    return table


def plan_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each planned run: label, seeds, num_tasks, num_steps, num_images, hours and state."""
    table = Table(title=f"{len(lines)} runs")
    headings = ("run", "seed, order", "tasks", "steps", "images to train on", "hours", "state")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("run", "state") else "right", no_wrap=True)
    for line in lines:
        counts = (f"{line[name]:,}" for name in ("num_tasks", "num_steps", "num_images"))
        seeds = ", ".join(map(str, line["seeds"]))
        table.add_row(line["label"], seeds, *counts, f"{line['hours']:.2f}", line["state"])
    return table


def plan_totals(lines: Sequence[Mapping[str, Any]]) -> str:
    """Word what several planned runs take together."""
    steps, images, hours = (
        sum(line[name] for line in lines) for name in ("num_steps", "num_images", "hours")
    )
    return f"{len(lines)} runs, {steps:,} steps, {images:,} images to train on, {hours:.1f} hours"


def missing_lines(collected: Mapping[str, Any]) -> list[str]:
    """Return a sentence per run of a study that failed, and one for each label that is not complete."""
    failed = [f"failed: {item['directory']}: {item['problem']}" for item in collected.get("failed", ())]
    missing: dict[str, list[str]] = {}
    for item in collected.get("missing", ()):
        missing.setdefault(item["label"], []).append(str(tuple(item["seeds"])))
    return failed + [
        f"not finished: {label}, seed and class-order seed {', '.join(seeds)}"
        for label, seeds in missing.items()
    ]


def effect_lines(collected: Mapping[str, Any]) -> list[str]:
    """Return a sentence per label on what the view batch changed, paired by seeds."""
    return [
        f"view batch in '{row['label']}' against one view, {row['num_pairs']} "
        f"pair{'s' if row['num_pairs'] > 1 else ''} of equal seeds: average "
        f"{spread(row['average_incremental_accuracy'], sign='+')}, last {spread(row['last_accuracy'], sign='+')}, "
        f"forgetting {spread(row['forgetting'], sign='+')} points"
        for row in collected["view_batch_effects"]
    ]


def task_table(matrix: AccuracyMatrix, task_names: Sequence[str], *, after: int) -> Table:
    """Return a line per evaluated task of one row of the matrix, and one over all of them."""
    table = Table(title="Accuracy in percent")
    table.add_column("task", no_wrap=False)
    for heading in ("test images", "top-1", "top-5", "top-1 in the task", "top-5 in the task"):
        table.add_column(heading, justify="right")
    for task, (name, cell) in enumerate(zip(task_names, matrix.rows[after], strict=True)):
        numbers = [
            matrix.accuracy(after, task, top=top, scope=scope)
            for scope in ("class_incremental", "task_incremental")
            for top in (1, 5)
        ]
        table.add_row(
            f"{task + 1}: {name}", str(cell.total) if cell else NOT_AVAILABLE, *map(percent, numbers)
        )
    pooled = [
        matrix.curve(top=top, scope=scope)[after]
        for scope in ("class_incremental", "task_incremental")
        for top in (1, 5)
    ]
    table.add_section()
    table.add_row(
        "all seen", str(sum(cell.total for cell in matrix.rows[after] if cell)), *map(percent, pooled)
    )
    return table


def percent(value: float | None) -> str:
    """Word a percentage with two decimals."""
    return NOT_AVAILABLE if value is None else f"{value:.2f}"


def spread(values: Mapping[str, float | None], *, digits: int = 2, sign: str = "") -> str:
    """Word a mean with its standard deviation, if there is one."""
    mean, std = values["mean"], values["std"]
    if mean is None:
        return NOT_AVAILABLE
    mean = round(mean, digits) + 0.0  # no -0.00
    return f"{mean:{sign}.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def mean_and_deviation(values: Iterable[float | None]) -> dict[str, float | None]:
    """Return mean and sample standard deviation of the numbers that exist."""
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else None,
    }
