"""Sections on what was reached, remembered, forgotten and confused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vbm_ptm.analysis import confusion, forgetting_curve, retention
from vbm_ptm.analysis.spread import Spread, spreads
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.report.collect import Collected
from vbm_ptm.report.page import Cell, PageFigure, PageTable, Section
from vbm_ptm.report.page_parts import (
    ReportRun,
    alternative,
    first_lines,
    matrices_of,
    mean_text,
    number,
    records_of,
    rows_table,
    task_table,
    which_lines,
)
from vbm_ptm.report.tables import NOT_AVAILABLE, effect

_COLUMNS = {
    "average": ("average_incremental_accuracy", 2),
    "last": ("last_accuracy", 2),
    "forgetting": ("forgetting", 2),
    "task-incremental last": ("task_incremental_last_accuracy", 2),
    "seconds": ("seconds", 1),
    "images": ("num_images", 0),
}


def summary(collected: Collected) -> Section | None:
    """Means over the runs of each line, and what the view batch changes; None if no run is finished."""
    if not collected.rows:
        return None
    rows = [
        [
            row.label,
            *(mean_text(getattr(row, name), digits) for name, digits in _COLUMNS.values()),
            str(row.num_runs),
        ]
        for row in collected.rows
    ]
    table = PageTable.of(("line", *_COLUMNS, "runs"), rows)
    tables = [table]
    effects = collected.view_batch_effects
    if effects:
        names = (
            "average_incremental_accuracy",
            "last_accuracy",
            "forgetting",
            "task_incremental_last_accuracy",
        )
        tables.append(
            PageTable.of(
                ("line", "average", "last", "forgetting", "task-incremental last", "pairs"),
                [
                    [row.label, *(_effect(getattr(row, name)) for name in names), str(row.num_pairs)]
                    for row in effects
                ],
                "What the view batch changes, in points, against one view with the same seeds and settings",
            )
        )
    return Section(
        "summary",
        "Summary",
        "Top-1 accuracy in percent over all seen classes, pooled over test images: mean ± standard deviation.",
        tables=tuple(tables),
        copies=table,
    )


def _effect(values: Any) -> str:
    return NOT_AVAILABLE if values.mean is None else effect(values)


def all_runs(runs: Sequence[ReportRun]) -> Section:
    """Every run, finished or not."""
    rows: list[list[Cell | str]] = []
    for position, run in enumerate(runs):
        result = run.result
        if result is None:
            rows.append([run.label, NOT_AVAILABLE, run.state, *[NOT_AVAILABLE] * 5])
            continue
        numbers = (
            result.metrics["class_incremental"]["top1"] if result.metrics.get("class_incremental") else {}
        )
        cells = [
            Cell(number(numbers.get(name)), f"{position}/metrics/class_incremental/top1/{name}")
            if numbers
            else Cell(NOT_AVAILABLE)
            for name in ("average_incremental_accuracy", "last_accuracy", "forgetting")
        ]
        rows.append(
            [
                run.label,
                Cell(f"{result.seed}, {result.class_order_seed}"),
                run.state,
                *cells,
                Cell(str(result.num_steps), f"{position}/num_steps"),
                Cell(str(result.num_images), f"{position}/num_images"),
            ]
        )
    headings = ("line", "seed, class order", "state", "average", "last", "forgetting", "steps", "images")
    return Section("runs", "Runs", tables=(PageTable.of(headings, rows),))


def accuracy(runs: Sequence[ReportRun]) -> Section | None:
    """Accuracy over all seen classes after each task."""
    lines = matrices_of(runs)
    if not lines:
        return None
    columns = {label: spreads([each.curve() for each in several]) for label, several in lines.items()}
    rows: list[list[Cell | str]] = [
        [
            run.label,
            *(
                Cell(number(value), f"{position}/metrics/class_incremental/top1/curve/{task}")
                for task, value in enumerate(run.result.matrix.curve())
            ),
        ]
        for position, run in enumerate(runs)
        if run.measured and run.result and run.result.metrics.get("class_incremental")
    ]
    count = max(map(len, columns.values()))
    each_run = PageTable.of(
        ("line", *(str(task + 1) for task in range(count))),
        [[*row, *[NOT_AVAILABLE] * (count + 1 - len(row))] for row in rows],
        "Every run, after each task",
    )
    return Section(
        "accuracy",
        "Accuracy over tasks",
        "Accuracy over the test images of all seen classes after each task. Bands: one standard deviation.",
        figures=(
            PageFigure(
                "accuracy",
                "",
                alternative("Accuracy over all seen classes after each task", columns),
                retention.evolution_figure(lines),
                (task_table(columns, caption="Mean ± standard deviation after each task"), each_run),
            ),
        ),
    )


def matrices(runs: Sequence[ReportRun]) -> Section | None:
    """Accuracy on each task after each task."""
    lines = matrices_of(runs)
    if not lines:
        return None
    tables = [
        rows_table(
            retention.mean_accuracies(several),
            corner="after",
            caption=f"{label}, mean over runs, in percent",
            digits=2,
        )
        for label, several in first_lines(lines).items()
    ]
    return Section(
        "matrix",
        "Accuracy on each task",
        "Accuracy on the test images of each task (across) after each task (down), over all seen classes, in percent."
        + which_lines(lines),
        figures=(
            PageFigure(
                "accuracy_matrix",
                "",
                "Heat maps of the accuracy on each task after each task; the numbers are in the table.",
                retention.matrix_figure(first_lines(lines)),
                tuple(tables),
            ),
        ),
    )


def _lines_with_history(runs: Sequence[ReportRun]) -> dict[str, list[AccuracyMatrix]]:
    """Return the accuracies of lines with a run of more than one task."""
    return {
        label: several
        for label, several in matrices_of(runs).items()
        if any(len(each.rows) > 1 for each in several)
    }


def forgetting(runs: Sequence[ReportRun]) -> Section | None:
    """What was forgotten of each task."""
    lines = _lines_with_history(runs)
    if not lines:
        return None
    columns = {
        label: spreads([retention.known_values(retention.forgetting_of_tasks(each)) for each in several])
        for label, several in lines.items()
    }
    return Section(
        "forgetting",
        "Forgetting",
        "Points between the best accuracy on a task before the last task and the accuracy after it. Their mean is the "
        "paper's forgetting.",
        figures=(
            PageFigure(
                "forgetting",
                "",
                alternative("Points forgotten of each task at the end", columns),
                retention.forgetting_figure(lines),
                (task_table(columns, caption="Points forgotten of each task: mean ± standard deviation"),),
            ),
        ),
    )


def confusion_of_tasks(runs: Sequence[ReportRun]) -> Section | None:
    """Which task takes over; None for runs that have not counted it."""
    lines = {label: rows for label, rows in records_of(runs).items() if confusion.mean_confusion(rows)}
    if not lines:
        return None
    tables = [
        rows_table(
            confusion.mean_confusion(several),
            corner="image of",
            caption=f"{label}, in percent of each task's images",
        )
        for label, several in first_lines(lines).items()
    ]
    taken = {label: _taken_over(several) for label, several in lines.items()}
    tables.append(
        task_table(taken, digits=1, caption="Images of each task that later tasks take over, in percent")
    )
    return Section(
        "confusion",
        "Confusion between tasks",
        "Which task's classes the test images of each task are assigned after the last task. To the right of the "
        "diagonal, later tasks take over." + which_lines(lines),
        figures=(
            PageFigure(
                "confusion",
                "",
                "Heat maps of the task of the image against that of the predicted class; numbers are in the table.",
                confusion.confusion_figure(first_lines(lines)),
                tuple(tables),
            ),
        ),
    )


def _taken_over(runs: Sequence[Any]) -> list[Spread]:
    found = [taken for taken in map(confusion.taken_over, runs) if taken is not None]
    return spreads([retention.known_values(taken) for taken in found])


def curves(runs: Sequence[ReportRun]) -> Section | None:
    """Retention, and the forgetting curves fitted to it."""
    lines = _lines_with_history(runs)
    if not lines:
        return None
    retained = {
        label: spreads([retention.known_values(retention.mean_retention(each)) for each in several])
        for label, several in lines.items()
    }
    fits = forgetting_curve.fit_lines(lines)
    rows = []
    for label, fit in fits.items():
        values = [
            f"{value:.3g} ± {half:.2g}" if fit.is_decided else NOT_AVAILABLE
            for value, half in zip(fit.values, fit.half_width, strict=True)
        ]
        rows.append([label, *values, fit.problem or "the data decide"])
    fitted = PageTable.of(
        ("line", "A", "b", "S", "verdict"),
        rows,
        "R(t) = A (b t + 1)^(-S), ± half the 95 % interval",
    )
    by_task = retention.retention_figure(lines)
    first = {
        label: spreads(
            [retention.known_values(retention.retention(each)[0]) for each in several if each.rows]
        )
        for label, several in lines.items()
    }
    return Section(
        "retention",
        "Retention and forgetting curves",
        "How much of a task is left when later ones have been learned. A forgetting curve with its 95 % band is drawn "
        "if the data decide it; if they do not, only the measured means are drawn, dotted.",
        figures=(
            PageFigure(
                "retention",
                "The first tasks",
                alternative("Accuracy on the first task while later ones are learned", first),
                by_task,
                (
                    task_table(
                        first, caption="Task 1, after each task that follows: mean ± standard deviation"
                    ),
                ),
            ),
            PageFigure(
                "forgetting_curve",
                "All tasks, by the number of tasks learned since",
                alternative("Mean retention by the number of tasks learned since", retained),
                forgetting_curve.forgetting_curve_figure(lines, fits),
                (
                    fitted,
                    task_table(retained, caption="Measured retention; column 1 is right after the task"),
                ),
            ),
        ),
    )


def _forgotten_classes(runs: Sequence[ReportRun]) -> dict[str, float]:
    """Return the mean over finished runs of what was forgotten of each class, by name."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run.measured and run.result:
            names = run.result.class_names
            for name, value in zip(names, confusion.class_forgetting(run.result.task_records), strict=False):
                if not np.isnan(value):
                    found.setdefault(name, []).append(float(value))
    return {name: float(np.mean(values)) for name, values in found.items()}


def classes(runs: Sequence[ReportRun]) -> Section | None:
    """The classes that were forgotten most."""
    forgotten = _forgotten_classes(runs)
    if not forgotten:
        return None
    rows = [[name, number(value)] for name, value in sorted(forgotten.items(), key=lambda item: -item[1])]
    return Section(
        "classes",
        "Forgotten classes",
        "Best accuracy on a class before the last task, minus the accuracy after it, averaged over all finished runs.",
        figures=(
            PageFigure(
                "classes",
                "",
                f"Bars of the classes that were forgotten most, {rows[0][0]} first with {rows[0][1]} points.",
                confusion.class_forgetting_figure(forgotten),
                (PageTable.of(("class", "points"), rows),),
            ),
        ),
    )
