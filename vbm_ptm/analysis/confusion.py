"""What takes over the images that are forgotten: confusion between tasks, and forgetting of each class.

Based on the counts in each task's record (``task_confusion``, ``class_counts``), which runs of earlier versions lack.
T tasks, K classes. The terms of forgetting are those of Chaudhry et al. (ECCV 2018), for classes instead of tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vbm_ptm.analysis.drawing import ACCENT, SERIES, Lines, new_figure, styled
from vbm_ptm.analysis.retention import heat_maps
from vbm_ptm.analysis.spread import Floats, spreads
from vbm_ptm.storage.task_record import TaskFacts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Records = Sequence[TaskFacts]


def task_confusion(records: Records, *, after: int = -1) -> Floats | None:
    """Return (T,T) the share, in percent, of each task's test images (row) assigned a class of each task (column).

    Args:
        records: Records of the tasks.
        after: The training task after which to look; None for the last one.

    Returns:
        NaN in rows of tasks that were not measured or have no images; None if the run has no such counts.
    """
    counts = records[after].task_confusion if records else []
    if not counts:
        return None
    table = np.array([[np.nan] * len(counts) if row is None else row for row in counts], dtype=float)
    totals = table.sum(axis=1, keepdims=True)
    shares: Floats = 100 * np.divide(table, totals, out=np.full_like(table, np.nan), where=totals > 0)
    return shares


def taken_over(records: Records) -> Floats | None:
    """Return (T,) the percentage of each task's test images that later tasks take at the end; None without counts."""
    table = task_confusion(records)
    return None if table is None else np.array([table[task, task + 1 :].sum() for task in range(len(table))])


def class_accuracy(records: Records) -> Floats:
    """Return (T,K) the accuracy on each class after each task, in percent; NaN before it is seen or without images."""
    num_classes = max((len(each.class_counts) for each in records), default=0)
    table = np.full((len(records), num_classes), np.nan)
    for after, record in enumerate(records):
        for index, (right, total) in enumerate(record.class_counts):
            if total:
                table[after, index] = 100 * right / total
    return table


def class_forgetting(records: Records) -> Floats:
    """Return (K,) the best accuracy on each class before the last task, minus that after it; NaN for the newest."""
    table = class_accuracy(records)
    if len(table) < 2:
        return np.full(table.shape[1], np.nan)
    known = ~np.isnan(table[:-1]).all(axis=0)
    best = np.where(known, np.where(np.isnan(table[:-1]), -np.inf, table[:-1]).max(axis=0), np.nan)
    forgotten: Floats = best - table[-1]
    return forgotten


def mean_confusion(runs: Sequence[Records]) -> list[list[float | None]]:
    """Return the mean over runs of ``task_confusion`` after the last task; None if nothing was measured."""
    tables = [table for table in map(task_confusion, runs) if table is not None]
    size = max(map(len, tables), default=0)
    return [
        [
            each.mean
            for each in spreads(
                [
                    [None if np.isnan(value) else float(value) for value in table[row]]
                    for table in tables
                    if row < len(table)
                ]
            )
        ]
        for row in range(size)
    ]


def confusion_figure(lines: Lines[Records]) -> Figure:
    """Draw the confusion between tasks at the end as a heat map for each line, the mean over its runs."""
    tables = {label: mean_confusion(runs) for label, runs in lines.items()}
    return heat_maps(
        {label: rows for label, rows in tables.items() if rows},
        across="task of the predicted class",
        down="task of the image",
        largest=100.0,
    )


def class_forgetting_figure(forgotten: dict[str, float], *, most: int = 20) -> Figure:
    """Draw the classes that were forgotten most.

    Args:
        forgotten: Points by name of the class.
        most: How many to draw.
    """
    worst = sorted(forgotten.items(), key=lambda item: -item[1])[:most]
    with styled():
        figure, (axes,) = new_figure(height=max(1.6, 0.24 * len(worst) + 0.8))
        names = [name if len(name) <= 28 else f"{name[:27]}…" for name, _ in worst]
        values = [value for _, value in worst]
        colors = [ACCENT if value >= 0 else SERIES[2] for value in values]
        axes.barh(np.arange(len(worst)), values, height=0.62, color=colors)
        axes.set_yticks(np.arange(len(worst)), labels=names)
        axes.invert_yaxis()
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("forgotten at the end (points)")
    return figure
