"""Results as tables and sentences for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from rich.table import Table

from vbm_ptm.analysis.spread import Spread
from vbm_ptm.errors import Problem, advice_of
from vbm_ptm.metrics import AccuracyCell, AccuracyMatrix, Scope, TopK
from vbm_ptm.report.collect import Collected, Effect, Missing

NOT_AVAILABLE = "n/a"
TOPS: tuple[TopK, ...] = (1, 5)


# Columns of a study: heading -> key of a row, and number of digits.
_STUDY_COLUMNS = {
    "average": ("average_incremental_accuracy", 2),
    "last": ("last_accuracy", 2),
    "forgetting": ("forgetting", 2),
    "TIL last": ("task_incremental_last_accuracy", 2),
    "TIL forgetting": ("task_incremental_forgetting", 2),
    "Avg*": ("last_accuracy_of_both", 2),
    "last, own expert": ("task_expert_last_accuracy", 2),
    "average, task mean": ("average_incremental_accuracy_task_mean", 2),
    "last, task mean": ("last_accuracy_task_mean", 2),
    "top-5 average": ("average_incremental_accuracy_top5", 2),
    "top-5 last": ("last_accuracy_top5", 2),
    "seconds": ("seconds", 1),
    "images seen": ("num_images", 0),
}
_DETAILS = ("last, own expert", "average, task mean", "last, task mean", "top-5 average", "top-5 last")


def study_table(collected: Collected, *, details: bool = False) -> Table:
    """Return a line per label of a study: mean and standard deviation over its runs.

    Args:
        collected: What a study collected.
        details: Also show the other numbers: those of the task's own expert, means over tasks, and top-5.
    """
    table = Table(
        title="Accuracy over all seen classes, top-1, in percent (pooled over test images); TIL: among the classes of "
        "the task; Avg*: mean of last and TIL last"
    )
    table.add_column("run", no_wrap=True)
    columns = {
        heading: column for heading, column in _STUDY_COLUMNS.items() if (heading in _DETAILS) == details
    }
    for heading in (*columns, "runs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in collected.rows:
        cells = [spread(getattr(row, name), digits=digits) for name, digits in columns.values()]
        table.add_row(row.label, *cells, str(row.num_runs))
    return table


# Columns of the measures of a study: heading -> name, and number of digits.
_MEASURE_COLUMNS = {
    "recall interval / N": ("recall_interval", 2),
    "summed rate, max / min": ("summed_rate_spread", 2),
    "degree of forgetting, training": ("degree_of_forgetting_train", 2),
    "degree of forgetting, test": ("degree_of_forgetting_test", 2),
    "lost between visits": ("sample_forgetting", 2),
    "feature drift": ("feature_drift", 5),
}


_COST_COLUMNS = {
    "ms a step": ("step_milliseconds", 1),
    "peak memory, GB": ("peak_memory_gigabytes", 3),
}


def costs_table(collected: Collected) -> Table:
    """Return a line per label of a study: what its steps cost."""
    title = "Time of a step, with its wait for images, and peak memory of a task (of a GPU, or else of the process)"
    return _measures(collected, _COST_COLUMNS, title=title)


def measures_table(collected: Collected) -> Table:
    """Return a line per label of a study: what was measured while its tasks were trained."""
    return _measures(
        collected,
        _MEASURE_COLUMNS,
        title="While tasks were trained: images between two visits of a sample in passes over the task, learning rate "
        "summed over its visits, variance of accuracy over the second half of the epochs, points that a sample loses "
        "until it comes back, relative change of features",
    )


def _measures(collected: Collected, columns: Mapping[str, tuple[str, int]], *, title: str) -> Table:
    """Return a line per label: measures by heading, each with its digits."""
    table = Table(title=title)
    table.add_column("run", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right")
    nothing = Spread(None, None)
    for row in collected.rows:
        cells = [spread(row.measures.get(name, nothing), digits=digits) for name, digits in columns.values()]
        table.add_row(row.label, *cells)
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
    """Say what several planned runs cost together."""
    steps, images, hours = (
        sum(line[name] for line in lines) for name in ("num_steps", "num_images", "hours")
    )
    return f"{len(lines)} runs, {steps:,} steps, {images:,} images to train on, {hours:.1f} hours"


def missing_lines(missing: Sequence[Missing]) -> list[str]:
    """Return a sentence for each run of a study that failed, and one for each label that is not complete."""
    failed = [
        Problem(f"failed: {item.directory}: {item.problem}", advice_of(item.problem))
        for item in missing
        if item.problem
    ]
    seeds: dict[str, list[str]] = {}
    for item in missing:
        if not item.problem:
            seeds.setdefault(item.label, []).append(str(item.seeds))
    return failed + [
        f"not finished: {label}, seed and class-order seed {', '.join(pairs)}"
        for label, pairs in seeds.items()
    ]


def effect_lines(collected: Collected) -> list[str]:
    """Return a sentence per label on what the view batch changed, paired by seeds."""
    return [
        f"view batch in '{row.label}' against one view, {row.num_pairs} "
        f"pair{'s' if row.num_pairs > 1 else ''} of equal seeds: average "
        f"{effect(row.average_incremental_accuracy)}, last {effect(row.last_accuracy)}, "
        f"task-incremental {effect(row.task_incremental_last_accuracy)}, "
        f"forgetting {effect(row.forgetting)} points"
        for row in collected.view_batch_effects
    ]


def task_table(matrix: AccuracyMatrix, task_names: Sequence[str], *, after: int) -> Table:
    """Return a line per evaluated task of one row of the matrix, and one over all of them."""
    table = Table(title="Accuracy in percent")
    table.add_column("task", no_wrap=False)
    headings = {
        "class_incremental": "",
        "task_incremental": " in the task",
        "task_expert": " of its own expert",
    }
    cells = [cell for cell in matrix.rows[after] if cell]
    scopes = [scope for scope in get_args(Scope) if scope != "task_expert" or _has(cells, scope)]
    for heading in ("test images", *(f"top-{top}{headings[scope]}" for scope in scopes for top in TOPS)):
        table.add_column(heading, justify="right")
    for task, (name, cell) in enumerate(zip(task_names, matrix.rows[after], strict=True)):
        numbers = [matrix.accuracy(after, task, top=top, scope=scope) for scope in scopes for top in TOPS]
        table.add_row(
            f"{task + 1}: {name}", str(cell.total) if cell else NOT_AVAILABLE, *map(percent, numbers)
        )
    pooled = [matrix.curve(top=top, scope=scope)[after] for scope in scopes for top in TOPS]
    table.add_section()
    table.add_row("all seen", str(sum(cell.total for cell in cells)), *map(percent, pooled))
    return table


def class_table(rows: Iterable[tuple[str, Sequence[int], int, int, tuple[str, int] | None]]) -> Table:
    """Return a line per class.

    Args:
        rows: Name, numbers of its tasks, numbers of correct and of all test images, and the wrong class that they were
            most often assigned, with how often.
    """
    table = Table(title="Accuracy on each class, in percent, among all seen classes")
    for heading, is_number in (("class", False), ("task", True), ("test images", True), ("correct", True)):
        table.add_column(heading, justify="right" if is_number else "left")
    table.add_column("accuracy", justify="right")
    table.add_column("most often confused with")
    for name, tasks, num_correct, num_images, taken_for in rows:
        wrong = f"{taken_for[0]} ({taken_for[1]})" if taken_for else ""
        numbers = ", ".join(map(str, tasks)), str(num_images), str(num_correct)
        table.add_row(name, *numbers, percent(100 * num_correct / num_images), wrong)
    return table


def _has(cells: Sequence[AccuracyCell], scope: Scope) -> bool:
    return any(cell.correct(scope=scope) is not None for cell in cells)


def percent(value: float | None) -> str:
    """Format a percentage with two decimals."""
    return NOT_AVAILABLE if value is None else f"{value:.2f}"


def spread(values: Spread, *, digits: int = 2, sign: str = "") -> str:
    """Format a mean with its standard deviation, if there is one."""
    if values.mean is None:
        return NOT_AVAILABLE
    mean = round(values.mean, digits) + 0.0  # no -0.00
    return f"{mean:{sign}.{digits}f}" + ("" if values.std is None else f" ± {values.std:.{digits}f}")


def effect(values: Effect, *, digits: int = 2) -> str:
    """Format an effect: mean and standard deviation of the differences, 95 % interval of the mean, p-value."""
    words = spread(values, digits=digits, sign="+")
    if values.interval is None or values.p_value is None:
        return words
    low, high = values.interval
    p_value = f"p = {values.p_value:.2g}" if values.p_value >= 1e-4 else "p < 0.0001"
    return f"{words} (95 % interval {low:+.{digits}f} to {high:+.{digits}f}, {p_value})"
