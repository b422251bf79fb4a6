"""What rest does while a task is trained: intervals between visits, what is forgotten meanwhile, how features move.

View-Batch Model (CVPR 2025), section "Empirical Evidence" and the appendix on the degree of forgetting: Delta_r =
1/(E - E0) sum_{i >= E0} (mean_j r_j - r_i)^2 over the retention r_i after each of E epochs, E0 the first saturated one.
These are measured by ``trainer.evaluate_every_epoch`` and ``trainer.feature_drift`` (``vbm_ptm.engine.measures``) and
kept in the record of each task; NaN stands for what a run has not measured. T tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vbm_ptm.analysis.drawing import (
    Lines,
    add_legend,
    draw_line,
    line_styles,
    new_figure,
    styled,
    whole_ticks,
)
from vbm_ptm.analysis.retention import known_values
from vbm_ptm.analysis.spread import Floats, Spread, spreads
from vbm_ptm.storage.task_record import TaskFacts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Records = Sequence[TaskFacts]


class Intervals(NamedTuple):
    """(T,) mean and (T,) standard deviation of the images between two visits of a sample, in passes over the task."""

    mean: Floats
    std: Floats


def observed_intervals(records: Records) -> Intervals:
    """Return the recall intervals that each task actually had: V passes with V views, 1 with one."""

    def passes(name: str) -> Floats:
        return np.array(
            [each.recall_interval.get(name, np.nan) / max(each.num_samples, 1) for each in records]
        )

    return Intervals(passes("mean"), passes("std"))


def degrees_of_forgetting(records: Records, *, split: str = "train") -> Floats:
    """Return (T,) the variance of the accuracy on each task over its saturated epochs, in squared points.

    Args:
        records: Records of the tasks.
        split: "train" or "test" images.
    """
    return np.array([each.degree_of_forgetting.get(split, np.nan) for each in records])


def lost_between_recalls(records: Records) -> Floats:
    """Return (T,) the points by which accuracy on a sample falls between a visit's epoch and that before the next."""
    return _measured(records, lambda each: each.sample_forgetting)


def feature_drift(records: Records) -> Floats:
    """Return (T,) |features after the task - before| / |before| of the seen tasks' test images."""
    return _measured(records, lambda each: each.feature_drift)


def _measured(records: Records, of: Callable[[TaskFacts], float | None]) -> Floats:
    return np.array([np.nan if of(each) is None else of(each) for each in records], dtype=float)


MEASURES: dict[str, tuple[str, Callable[[Records], Floats]]] = {
    "recall interval": ("passes over the task", lambda records: observed_intervals(records).mean),
    "degree of forgetting": ("squared points", degrees_of_forgetting),
    "lost between recalls": ("points", lost_between_recalls),
    "feature drift": ("relative change", feature_drift),
}


def is_measured(lines: Lines[Records], name: str) -> bool:
    """Return whether any run has a number for a measure."""
    _, of = MEASURES[name]
    return any(not np.isnan(of(records)).all() for runs in lines.values() for records in runs if records)


def measures_figure(lines: Lines[Records]) -> Figure:
    """Draw what was measured in each task, one panel per measure that any run has."""
    with styled():
        names = [name for name in MEASURES if is_measured(lines, name)]
        figure, panels = new_figure(max(len(names), 1), columns=2, height=2.7)
        styles = line_styles(list(lines))
        for name, axes in zip(names, panels, strict=False):
            unit, of = MEASURES[name]
            longest = 1
            for label, runs in lines.items():
                columns = spreads([known_values(of(records)) for records in runs])
                longest = max(longest, len(columns))
                draw_line(axes, np.arange(1.0, len(columns) + 1), columns, label=label, style=styles[label])
            axes.set(title=name, xlabel="task", ylabel=unit)
            whole_ticks(axes, longest)
        add_legend(figure, panels[0], lines)
    return figure


class IntervalPoint(NamedTuple):
    """One run in the plane of recall interval and degree of forgetting: means over its tasks, None if unknown."""

    interval: float | None
    degree: float | None


def interval_points(runs: Sequence[Records], *, split: str = "train") -> list[IntervalPoint]:
    """Return where each run lies: mean recall interval in passes, mean degree of forgetting."""
    return [
        IntervalPoint(
            Spread.of(known_values(observed_intervals(records).mean)).mean,
            Spread.of(known_values(degrees_of_forgetting(records, split=split))).mean,
        )
        for records in runs
    ]


def interval_figure(lines: Lines[Records], *, split: str = "train") -> Figure:
    """Draw degree of forgetting against recall interval: a point per run, bars for the 95 % interval of each mean."""
    from scipy.stats import t

    with styled():
        figure, (axes,) = new_figure(height=3.0)
        styles = line_styles(list(lines))
        for label, runs in lines.items():
            points = [each for each in interval_points(runs, split=split) if None not in each]
            if not points:
                continue
            where, degrees = np.array(points, dtype=float).T
            style = styles[label]
            axes.plot(where, degrees, linestyle="", marker=style.marker, color=style.color, label=label)
            if len(points) > 1:
                half = t.ppf(0.975, len(points) - 1) * degrees.std(ddof=1) / np.sqrt(len(points))
                axes.errorbar(
                    where.mean(), degrees.mean(), yerr=half, color=style.color, capsize=4, linewidth=1.2
                )
        axes.set(
            xlabel="recall interval (passes over the task)", ylabel="degree of forgetting (squared points)"
        )
        add_legend(figure, axes, lines)
    return figure
