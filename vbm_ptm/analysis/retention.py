"""How accuracy evolves, and how long each task is remembered.

View-Batch Model (CVPR 2025): task evolution (appendix, "Results on Task Evolution") is the accuracy over all seen
classes after each task; memory-retention decay (figure "Experimental results on memory retention decay") the accuracy
on one task after it and after later ones. a[j][t] is the accuracy in percent on task t after task j, T the number of
tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vbm_ptm.analysis.drawing import (
    ACCENT,
    INK,
    PAPER,
    Lines,
    add_legend,
    draw_line,
    line_styles,
    new_figure,
    styled,
    whole_ticks,
)
from vbm_ptm.analysis.spread import Floats, spreads
from vbm_ptm.metrics import AccuracyMatrix, Scope

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def evolution(matrix: AccuracyMatrix, *, scope: Scope = "class_incremental") -> Floats:
    """Return (T,) the accuracy over all seen test images after each task, in percent; NaN where unknown."""
    return np.array([np.nan if value is None else value for value in matrix.curve(scope=scope)])


def accuracies(matrix: AccuracyMatrix, *, scope: Scope = "class_incremental") -> Floats:
    """Return (T, evaluated tasks) a[j][t], in percent; NaN where nothing was measured."""
    rows = matrix.rows
    found = np.full((len(rows), len(rows[-1]) if rows else 0), np.nan)
    for after, row in enumerate(rows):
        for task in range(len(row)):
            value = matrix.accuracy(after, task, scope=scope)
            found[after, task] = np.nan if value is None else value
    return found


def retention(matrix: AccuracyMatrix, *, scope: Scope = "class_incremental") -> Floats:
    """Return (T,T) r[t][k] = a[t+k][t], the accuracy on task t once k later tasks have been learned.

    Joint training learns no later tasks: a run of one training task has one column.
    """
    table = accuracies(matrix, scope=scope)
    num_tasks = len(table)
    found = np.full((num_tasks, num_tasks), np.nan)
    for task in range(num_tasks):
        found[task, : num_tasks - task] = table[task:, task]
    return found


def mean_retention(matrix: AccuracyMatrix, *, scope: Scope = "class_incremental") -> Floats:
    """Return (T,) the mean of ``retention`` over the tasks followed by at least k others; NaN without any."""
    table = retention(matrix, scope=scope)
    known = ~np.isnan(table)
    total = np.where(known, table, 0).sum(axis=0)
    count = known.sum(axis=0)
    means: Floats = np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0)
    return means


def forgetting_of_tasks(matrix: AccuracyMatrix, *, scope: Scope = "class_incremental") -> Floats:
    """Return (T-1,) max over t <= j <= T-2 of a[j][t], minus a[T-1][t]: the terms of the paper's forgetting."""
    table = accuracies(matrix, scope=scope)
    last = len(table) - 1
    return np.array([table[task:last, task].max() - table[last, task] for task in range(max(last, 0))])


def known_values(values: Floats) -> list[float | None]:
    """Return the numbers with None for NaN."""
    return [None if np.isnan(value) else float(value) for value in values]


def evolution_figure(lines: Lines[AccuracyMatrix], *, scope: Scope = "class_incremental") -> Figure:
    """Draw accuracy over all seen classes after each task: means over runs, bands of one standard deviation."""
    with styled():
        figure, (axes,) = new_figure()
        styles = line_styles(list(lines))
        longest = 1
        for label, matrices in lines.items():
            columns = spreads([matrix.curve(scope=scope) for matrix in matrices])
            longest = max(longest, len(columns))
            draw_line(axes, np.arange(1.0, len(columns) + 1), columns, label=label, style=styles[label])
        axes.set_xlabel("tasks learned")
        axes.set_ylabel("accuracy, all seen classes (%)")
        whole_ticks(axes, longest)
        add_legend(figure, axes, lines)
    return figure


def retention_figure(
    lines: Lines[AccuracyMatrix], *, scope: Scope = "class_incremental", num_tasks: int = 3
) -> Figure:
    """Draw the accuracy on each of the first tasks while later ones are learned, a panel for each task."""
    with styled():
        longest = max((len(each.rows) for matrices in lines.values() for each in matrices), default=1)
        count = min(num_tasks, max(longest - 1, 1))
        figure, panels = new_figure(count, columns=3, height=2.9, share_y=True)
        styles = line_styles(list(lines))
        for task, axes in enumerate(panels):
            for label, matrices in lines.items():
                curves = [
                    known_values(retention(each, scope=scope)[task])
                    for each in matrices
                    if len(each.rows) > task
                ]
                columns = spreads([curve[: longest - task] for curve in curves])
                draw_line(
                    axes, task + np.arange(1.0, len(columns) + 1), columns, label=label, style=styles[label]
                )
            axes.set_title(f"task {task + 1}")
            axes.set_xlabel("tasks learned")
            whole_ticks(axes, longest)
        panels[0].set_ylabel("accuracy on the task (%)")
        add_legend(figure, panels[0], lines)
    return figure


def forgetting_figure(lines: Lines[AccuracyMatrix], *, scope: Scope = "class_incremental") -> Figure:
    """Draw how many points of its best accuracy each task has lost at the end."""
    with styled():
        figure, (axes,) = new_figure(height=3.0)
        styles = line_styles(list(lines))
        longest = 1
        for label, matrices in lines.items():
            columns = spreads([known_values(forgetting_of_tasks(each, scope=scope)) for each in matrices])
            longest = max(longest, len(columns))
            draw_line(axes, np.arange(1.0, len(columns) + 1), columns, label=label, style=styles[label])
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_xlabel("task")
        axes.set_ylabel("forgotten at the end (points)")
        whole_ticks(axes, longest)
        add_legend(figure, axes, lines)
    return figure


def mean_accuracies(
    matrices: list[AccuracyMatrix], *, scope: Scope = "class_incremental"
) -> list[list[float | None]]:
    """Return the mean over runs of each a[j][t]; None if no run has measured it."""
    tables = [accuracies(each, scope=scope) for each in matrices]
    num_rows = max((len(table) for table in tables), default=0)
    return [
        [
            each.mean
            for each in spreads([known_values(table[after]) for table in tables if after < len(table)])
        ]
        for after in range(num_rows)
    ]


def matrix_figure(lines: Lines[AccuracyMatrix], *, scope: Scope = "class_incremental") -> Figure:
    """Draw the accuracy matrix of each line, the mean over its runs, as a heat map; with numbers up to 10 tasks."""
    tables = {label: mean_accuracies(list(matrices), scope=scope) for label, matrices in lines.items()}
    return heat_maps(
        {label: rows for label, rows in tables.items() if rows},
        across="task measured",
        down="after task",
        largest=100.0,
    )


def heat_maps(
    tables: dict[str, list[list[float | None]]], *, across: str, down: str, largest: float
) -> Figure:
    """Draw a heat map for each label; darker cells have larger values, empty ones none.

    Args:
        tables: Rows of numbers, by label.
        across: Name of the horizontal axis.
        down: Name of the vertical axis.
        largest: The value of the darkest colour.
    """
    with styled():
        size = max((max(len(rows), *map(len, rows)) for rows in tables.values()), default=1)
        columns = 2 if len(tables) > 1 else 1
        figure, panels = new_figure(max(len(tables), 1), columns=columns, height=3.5)
        for axes, (label, rows) in zip(panels, tables.items(), strict=False):
            for after, row in enumerate(rows):
                for task, value in enumerate(row):
                    _cell(axes, task, after, value, share=(value or 0.0) / largest, size=size)
            axes.set(
                xlim=(0, max(map(len, rows))), ylim=(len(rows), 0), title=label, xlabel=across, ylabel=down
            )
            axes.grid(visible=False)
            axes.spines[:].set_visible(False)
            for axis, count in ((axes.xaxis, max(map(len, rows))), (axes.yaxis, len(rows))):
                step = max(1, -(-count // 10))
                axis.set_ticks(
                    np.arange(0.5, count, step), labels=[str(number + 1) for number in range(0, count, step)]
                )
    return figure


def _cell(axes: object, task: int, after: int, value: float | None, *, share: float, size: int) -> None:
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

    assert isinstance(axes, Axes)
    if value is None or np.isnan(value):
        return
    share = float(np.clip(share, 0.0, 1.0))
    axes.add_patch(
        Rectangle((task, after), 0.96, 0.96, facecolor=ACCENT, alpha=0.04 + 0.96 * share, linewidth=0)
    )
    if size <= 10:
        axes.text(
            task + 0.48,
            after + 0.5,
            f"{value:.0f}",
            ha="center",
            va="center",
            fontsize=8,
            color=PAPER if share > 0.55 else INK,
        )
