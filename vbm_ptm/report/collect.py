"""The runs of a study in numbers: means, deviations, and the effect of the view batch on pairs of runs."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import numpy as np

from vbm_ptm.analysis.spread import Spread
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.storage.task_record import TaskFacts, TaskTimings

CONFIDENCE = 0.95
# Differences whose deviation is a smaller share of the numbers themselves are equal.
_ROUNDING = 1e-9

Number = Callable[[AccuracyMatrix], float | None]


def last_of_both(matrix: AccuracyMatrix) -> float | None:
    """Return the paper's Avg*: the mean of class- and task-incremental accuracy after the last task."""
    both = matrix.last(), matrix.last(scope="task_incremental")
    return None if None in both else statistics.fmean(value for value in both if value is not None)


# The numbers of a run over all seen classes, by their names in files.
NUMBERS: dict[str, Number] = {
    "average_incremental_accuracy": AccuracyMatrix.average_incremental,
    "last_accuracy": AccuracyMatrix.last,
    "forgetting": AccuracyMatrix.forgetting,
    "average_incremental_accuracy_task_mean": partial(
        AccuracyMatrix.average_incremental, weighting="task_mean"
    ),
    "last_accuracy_task_mean": partial(AccuracyMatrix.last, weighting="task_mean"),
    "average_incremental_accuracy_top5": partial(AccuracyMatrix.average_incremental, top=5),
    "last_accuracy_top5": partial(AccuracyMatrix.last, top=5),
    "task_incremental_last_accuracy": partial(AccuracyMatrix.last, scope="task_incremental"),
    "task_incremental_forgetting": partial(AccuracyMatrix.forgetting, scope="task_incremental"),
    "last_accuracy_of_both": last_of_both,
    "task_expert_last_accuracy": partial(AccuracyMatrix.last, scope="task_expert"),
}


def measures_of(records: Iterable[TaskFacts]) -> dict[str, float | None]:
    """Return what was measured while the tasks of a run were trained, averaged over the tasks; None if nothing was.

    ``recall_interval`` is in passes over the samples of a task (V with V views); ``summed_rate_spread`` is the largest
    summed learning rate of a sample divided by the smallest, for the worst task.
    """
    tasks = list(records)
    spreads = [
        task.summed_rate["max"] / task.summed_rate["min"] for task in tasks if task.summed_rate.get("min")
    ]
    return {
        "recall_interval": Spread.of(
            task.recall_interval["mean"] / task.num_samples for task in tasks if task.recall_interval
        ).mean,
        "summed_rate_spread": max(spreads, default=None),
        "degree_of_forgetting_train": Spread.of(
            task.degree_of_forgetting.get("train") for task in tasks
        ).mean,
        "degree_of_forgetting_test": Spread.of(task.degree_of_forgetting.get("test") for task in tasks).mean,
        "sample_forgetting": Spread.of(task.sample_forgetting for task in tasks).mean,
        "feature_drift": Spread.of(task.feature_drift for task in tasks).mean,
    }


def costs_of(tasks: Iterable[TaskTimings], *, num_steps: int) -> dict[str, float | None]:
    """Return what a step of a run took, waiting for images included, and the most memory; None if not recorded."""
    tasks = list(tasks)
    seconds = sum(task.step_seconds for task in tasks)
    memory = [task.peak_memory_bytes for task in tasks if task.peak_memory_bytes is not None]
    return {
        "step_milliseconds": 1000 * seconds / num_steps if seconds and num_steps else None,
        "peak_memory_gigabytes": max(memory) / 1e9 if memory else None,
    }


@dataclass(frozen=True)
class Effect(Spread):
    """The effect of a change on a number, from pairs of runs that differ in nothing else.

    Attributes:
        differences: With the change minus without it, for each pair in which both numbers exist.
        interval: 95 % confidence interval of the mean, by Student's t; None with fewer than two pairs, and where all
            differences are equal, which says nothing on how they spread.
        p_value: P-value of the paired t-test of no effect; None without an interval.
    """

    differences: tuple[float, ...]
    interval: tuple[float, float] | None
    p_value: float | None

    @classmethod
    def of_pairs(cls, pairs: Iterable[tuple[float | None, float | None]]) -> Effect:
        """Compare the numbers with the change to those without it; incomplete pairs are left out."""
        known = [(changed, plain) for changed, plain in pairs if changed is not None and plain is not None]
        differences = tuple(changed - plain for changed, plain in known)
        spread = Spread.of(differences)
        if spread.mean is None or spread.std is None:
            return cls(spread.mean, spread.std, differences, interval=None, p_value=None)
        if spread.std <= _ROUNDING * max(abs(value) for pair in known for value in pair):
            return cls(spread.mean, 0.0, differences, interval=None, p_value=None)
        import scipy.stats  # takes a second, which commands that compare nothing are spared

        test = scipy.stats.ttest_rel(*np.array(known).T)
        low, high = test.confidence_interval(CONFIDENCE)
        return cls(
            spread.mean,
            spread.std,
            differences,
            interval=(float(low), float(high)),
            p_value=float(test.pvalue),
        )


@dataclass(frozen=True)
class MeasuredRun:
    """What is collected from a finished run.

    Attributes:
        label: Line of the table.
        seeds: Training seed and class-order seed.
        directory: Its run directory.
        family: Equal for all runs that differ at most in the view batch.
        num_views: V.
        is_baseline: Whether its samples are shown once per epoch, in their weak view.
        matrix: All accuracies.
        num_steps: Optimizer steps.
        num_images: Views in training.
        seconds: Seconds that its tasks took.
        measures: What ``measures_of`` and ``costs_of`` return for its tasks.
    """

    label: str
    seeds: tuple[int, int]
    directory: str
    family: str
    num_views: int
    is_baseline: bool
    matrix: AccuracyMatrix
    num_steps: int
    num_images: int
    seconds: float
    measures: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A line of a study over all its runs; accuracies in percent."""

    label: str
    num_runs: int
    average_incremental_accuracy: Spread
    last_accuracy: Spread
    forgetting: Spread
    average_incremental_accuracy_task_mean: Spread
    last_accuracy_task_mean: Spread
    average_incremental_accuracy_top5: Spread
    last_accuracy_top5: Spread
    task_incremental_last_accuracy: Spread
    task_incremental_forgetting: Spread
    last_accuracy_of_both: Spread
    task_expert_last_accuracy: Spread
    seconds: Spread
    num_images: Spread
    seeds: tuple[tuple[int, int], ...]
    directories: tuple[str, ...]
    measures: dict[str, Spread]


@dataclass(frozen=True)
class EffectRow:
    """The effect of a line's view batch, in points, compared with otherwise equal runs that have one view."""

    label: str
    num_pairs: int
    average_incremental_accuracy: Effect
    last_accuracy: Effect
    forgetting: Effect
    task_incremental_last_accuracy: Effect
    task_incremental_forgetting: Effect
    last_accuracy_of_both: Effect


EFFECTS = tuple(each.name for each in fields(EffectRow) if each.name in NUMBERS)


@dataclass(frozen=True)
class Missing:
    """A run that is not finished; with a problem, it has failed."""

    label: str
    seeds: tuple[int, int]
    directory: str
    problem: str | None = None


@dataclass(frozen=True)
class Collected:
    """What ``study.json`` holds.

    Attributes:
        rows: A row for each line with a finished run.
        view_batch_effects: A row for each line with a view batch and its baseline.
        missing: Runs that are not finished.
        failed: Runs that failed in this sitting.
    """

    rows: tuple[Row, ...]
    view_batch_effects: tuple[EffectRow, ...]
    missing: tuple[Missing, ...] = ()
    failed: tuple[Missing, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def collect(
    runs: Sequence[MeasuredRun], *, missing: Iterable[Missing] = (), failed: Iterable[Missing] = ()
) -> Collected:
    """Group runs by their labels, in the order in which these first occur."""
    lines: dict[str, list[MeasuredRun]] = defaultdict(list)
    for run in runs:
        lines[run.label].append(run)
    return Collected(
        rows=tuple(_row(label, members) for label, members in lines.items()),
        view_batch_effects=view_batch_effects(runs),
        missing=tuple(missing),
        failed=tuple(failed),
    )


def _row(label: str, runs: Sequence[MeasuredRun]) -> Row:
    return Row(
        label=label,
        num_runs=len(runs),
        **{name: Spread.of(number(run.matrix) for run in runs) for name, number in NUMBERS.items()},
        seconds=Spread.of(run.seconds for run in runs),
        num_images=Spread.of(run.num_images for run in runs),
        seeds=tuple(run.seeds for run in runs),
        directories=tuple(run.directory for run in runs),
        measures={
            name: Spread.of(run.measures[name] for run in runs if name in run.measures)
            for name in dict.fromkeys(name for run in runs for name in run.measures)
        },
    )


def view_batch_effects(runs: Sequence[MeasuredRun]) -> tuple[EffectRow, ...]:
    """Return the effect of the view batch in each line that has one.

    A pair is a run and the baseline of its family. Runs without a step have no views.
    """
    baselines = {run.family: run for run in runs if run.is_baseline}
    pairs: dict[str, list[tuple[MeasuredRun, MeasuredRun]]] = defaultdict(list)
    for run in runs:
        if not run.is_baseline and run.num_steps and run.family in baselines:
            pairs[run.label].append((run, baselines[run.family]))
    return tuple(effect_row(label, members) for label, members in pairs.items())


def effect_row(label: str, pairs: Sequence[tuple[MeasuredRun, MeasuredRun]]) -> EffectRow:
    """Return the effect on all numbers; the run with the change comes first in each pair."""
    effects = {name: effect_on(NUMBERS[name], pairs) for name in EFFECTS}
    return EffectRow(label=label, num_pairs=len(pairs), **effects)


def effect_on(number: Number, pairs: Iterable[tuple[MeasuredRun, MeasuredRun]]) -> Effect:
    """Return the effect on a number; the run with the change comes first in each pair."""
    return Effect.of_pairs((number(changed.matrix), number(plain.matrix)) for changed, plain in pairs)
