"""Tables and sentences for a terminal."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from vbm_ptm.analysis.spread import Spread
from vbm_ptm.errors import Problem, advice_of
from vbm_ptm.metrics import AccuracyCell, AccuracyMatrix
from vbm_ptm.report.collect import Collected, Effect, EffectRow, Missing, Row
from vbm_ptm.report.tables import (
    costs_table,
    effect_lines,
    measures_table,
    missing_lines,
    percent,
    plan_table,
    plan_totals,
    spread,
    study_table,
    task_table,
)


def shown(table: Table) -> list[list[str]]:
    """Return the cells of every line of a table."""
    console = Console(width=160, markup=False)
    with console.capture() as capture:
        console.print(table)
    lines = capture.get().splitlines()
    return [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in lines if "│" in line]


def one(mean: float | None, std: float | None = None) -> Spread:
    return Spread(mean, std)


def an_effect(mean: float | None, std: float | None = None, **others: Any) -> Effect:
    return Effect(mean, std, **{"differences": (), "interval": None, "p_value": None, **others})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (one(None), "n/a"),
        (one(12.25), "12.25"),
        (one(12.346, 0.5), "12.35 ± 0.50"),
        (one(0.0, 0.0), "0.00 ± 0.00"),
    ],
)
def test_spread__shows_what_there_is(values: Spread, words: str) -> None:
    assert spread(values) == words


def test_spread__shows_signs_and_digits() -> None:
    assert spread(one(1.25, 2.0), sign="+", digits=1) == "+1.2 ± 2.0"
    assert spread(one(-1.5), sign="+") == "-1.50"


def test_percent__has_two_decimals() -> None:
    assert (percent(None), percent(0.0), percent(100.0)) == ("n/a", "0.00", "100.00")


def test_study_table__says_where_there_is_no_number() -> None:
    row = Row(
        label="slca-v4",
        num_runs=3,
        average_incremental_accuracy=one(81.25, 1.5),
        last_accuracy=one(75.0),
        forgetting=one(None),
        average_incremental_accuracy_task_mean=one(80.25),
        last_accuracy_task_mean=one(74.0),
        average_incremental_accuracy_top5=one(95.0),
        last_accuracy_top5=one(94.5),
        task_incremental_last_accuracy=one(95.0, 0.5),
        task_incremental_forgetting=one(2.25),
        last_accuracy_of_both=one(85.0),
        task_expert_last_accuracy=one(96.5),
        seconds=one(12.34),
        num_images=one(1000),
        seeds=(),
        directories=(),
        measures={
            "recall_interval": one(4.0),
            "feature_drift": one(0.00123, 0.0001),
            "step_milliseconds": one(28.31, 0.2),
            "peak_memory_gigabytes": one(0.2351),
        },
    )
    assert shown(study_table(Collected((row,), ()))) == [
        ["slca-v4", "81.25 ± 1.50", "75.00", "n/a", "95.00 ± 0.50", "2.25", "85.00", "12.3", "1000", "3"]
    ]
    (detailed,) = shown(study_table(Collected((row,), ()), details=True))
    assert detailed == ["slca-v4", "96.50", "80.25", "74.00", "95.00", "94.50", "3"]
    measures = shown(measures_table(Collected((row,), ())))
    assert measures[-1] == ["slca-v4", "4.00", "n/a", "n/a", "n/a", "n/a", "0.00123 ± 0.00010"]
    assert shown(costs_table(Collected((row,), ()))) == [["slca-v4", "28.3 ± 0.2", "0.235"]]


def test_missing_lines__name_runs_that_failed_and_lines_that_are_not_complete() -> None:
    missing = [Missing("slca", (seed, 7), f"out/{seed}") for seed in (1, 2)]
    failed = Missing("slca", (1, 7), "out/1", "UsageError: no data")
    assert missing_lines([failed, *missing]) == [
        "failed: out/1: UsageError: no data",
        "not finished: slca, seed and class-order seed (1, 7), (2, 7)",
    ]
    assert missing_lines([]) == []
    damaged = Missing("slca", (1, 7), "out/1", Problem("UsageError: damaged", "skip_damaged"))
    assert [advice_of(line) for line in missing_lines([failed, damaged])] == [None, "skip_damaged"]


def test_effect_lines__say_what_was_paired() -> None:
    more = an_effect(0.75), an_effect(0.5), an_effect(0.25)
    single = EffectRow("slca-v4", 1, an_effect(1.5), an_effect(-0.25), an_effect(None), *more)
    several = EffectRow(
        "slca-v4",
        3,
        an_effect(1.5, 0.5, interval=(0.258, 2.742), p_value=0.0351),
        an_effect(1.5, 0.5, interval=(1.0, 2.0), p_value=1e-7),
        an_effect(0.0, 0.0, interval=(0.0, 0.0)),
        *more,
    )
    singular, plural = effect_lines(Collected((), (single, several)))
    assert singular == (
        "view batch in 'slca-v4' against one view, 1 pair of equal seeds: average +1.50, last -0.25, "
        "task-incremental +0.75, forgetting n/a points"
    )
    assert "3 pairs of equal seeds: average +1.50 ± 0.50 (95 % interval +0.26 to +2.74, p = 0.035)," in plural
    assert "p < 0.0001), task-incremental +0.75, forgetting +0.00 ± 0.00 points" in plural
    assert effect_lines(Collected((), ())) == []


def test_task_table__shows_every_task_and_all_of_them() -> None:
    matrix = AccuracyMatrix(
        [
            [AccuracyCell(4, 3, 4, 4, 4)],
            [AccuracyCell(4, 2, 3, 3, 4), AccuracyCell(0, 0, 0, 0, 0), AccuracyCell(12, 6, 9, 12, 12)],
        ]
    )
    assert shown(task_table(matrix, ["cat, dog", "[red]", "owl"], after=1)) == [
        ["1: cat, dog", "4", "50.00", "75.00", "75.00", "100.00"],
        ["2: [red]", "0", "n/a", "n/a", "n/a", "n/a"],
        ["3: owl", "12", "50.00", "75.00", "100.00", "100.00"],
        ["all seen", "16", "50.00", "75.00", "93.75", "100.00"],
    ]


def test_task_table__shows_the_task_s_own_expert_where_there_is_one() -> None:
    matrix = AccuracyMatrix([[AccuracyCell(4, 2, 4, 3, 4, 4, 4)]])
    task, total = shown(task_table(matrix, ["cat"], after=0))
    assert task == ["1: cat", "4", "50.00", "100.00", "75.00", "100.00", "100.00", "100.00"]
    assert total[1:] == task[1:]


def test_task_table__has_no_task_incremental_accuracy_where_tasks_share_classes() -> None:
    matrix = AccuracyMatrix([[AccuracyCell(2, 1, 2)]])
    (task, total) = shown(task_table(matrix, ["clipart"], after=0))
    assert task == ["1: clipart", "2", "50.00", "100.00", "n/a", "n/a"]
    assert total[-2:] == ["n/a", "n/a"]


def test_plan_table__shows_costs_and_their_sum() -> None:
    line = {
        "label": "slca",
        "seeds": (1, 2),
        "num_tasks": 10,
        "num_steps": 8000,
        "num_images": 1_000_000,
        "hours": 0.955,
        "state": "to run",
    }
    assert shown(plan_table([line])) == [["slca", "1, 2", "10", "8,000", "1,000,000", "0.95", "to run"]]
    assert plan_totals([line, line]) == "2 runs, 16,000 steps, 2,000,000 images to train on, 1.9 hours"
    assert plan_totals([]) == "0 runs, 0 steps, 0 images to train on, 0.0 hours"
