"""Means, deviations and paired effects of runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from vbm_ptm.metrics import AccuracyCell, AccuracyMatrix
from vbm_ptm.report.collect import (
    Effect,
    MeasuredRun,
    Missing,
    Spread,
    collect,
    costs_of,
    last_of_both,
    measures_of,
)
from vbm_ptm.storage.task_record import TaskFacts, TaskTimings


def cell(percent: float) -> AccuracyCell:
    """Of 1,000 images; twenty points more among the five best."""
    return AccuracyCell(1000, round(10 * percent), round(10 * percent) + 200)


def matrix(average: float, last: float, forgetting: float) -> AccuracyMatrix:
    """Return two tasks with these numbers."""
    first = 2 * average - last
    return AccuracyMatrix([[cell(first)], [cell(first - forgetting), cell(2 * last - first + forgetting)]])


def a_run(
    label: str, seed: int, numbers: AccuracyMatrix, *, num_views: int, family: str = "", num_steps: int = 5
) -> MeasuredRun:
    return MeasuredRun(
        label=label,
        seeds=(seed, 1993),
        directory=f"out/{label}/{seed}",
        family=f"{family}{seed}",
        num_views=num_views,
        is_baseline=num_views == 1,
        matrix=numbers,
        num_steps=num_steps,
        num_images=100,
        seconds=2.0,
    )


def test_spread__leaves_out_what_does_not_exist() -> None:
    assert Spread.of([1.0, None, 4.0]) == Spread(2.5, pytest.approx(4.5**0.5))
    assert Spread.of([7.0, None]) == Spread(7.0, None)
    assert Spread.of([None]) == Spread(None, None)


def test_effect__is_a_paired_t_test() -> None:
    """Differences 1, 2, 3 and 6: t = 3 / (s / 2), s = sqrt(14 / 3), three degrees of freedom."""
    found = Effect.of_pairs([(11, 10), (12, 10), (43, 40), (26, 20), (None, 3)])
    assert found.differences == (1, 2, 3, 6)
    deviation = (14 / 3) ** 0.5
    assert (found.mean, found.std) == (3.0, pytest.approx(deviation))
    t = 3.182446305284263  # the 97.5 % quantile, from a table
    assert found.interval == pytest.approx((3 - t * deviation / 2, 3 + t * deviation / 2))
    x = 3 / (deviation / 2) / 3**0.5  # distribution of t with three degrees of freedom
    one_side = 0.5 - (x / (1 + x * x) + math.atan(x)) / math.pi
    assert found.p_value == pytest.approx(2 * one_side)


def test_effect__says_no_more_than_there_is() -> None:
    assert Effect.of_pairs([]) == Effect(None, None, (), None, None)
    assert Effect.of_pairs([(3, 1), (5, None)]) == Effect(2.0, None, (2,), None, None)
    assert Effect.of_pairs([(3, 1), (5, 3)]) == Effect(2.0, 0.0, (2, 2), None, None)
    rounded = Effect.of_pairs([(60.28, 60), (40.28, 40), (10.28, 10)])
    assert len(set(rounded.differences)) > 1
    assert (rounded.mean, rounded.std) == (pytest.approx(0.28), 0.0)
    assert (rounded.interval, rounded.p_value) == (None, None)
    assert Effect.of_pairs([(0, 0), (0, 0)]).interval is None


def test_collect__gives_means_deviations_and_paired_differences() -> None:
    collected = collect(
        [
            a_run("plain", 1, matrix(60, 50, 10), num_views=1),
            a_run("plain", 2, matrix(64, 56, 14), num_views=1),
            a_run("views", 2, matrix(65, 60, 12), num_views=4),
            a_run("views", 1, matrix(63, 54, 10), num_views=4),
            a_run("views", 3, matrix(50, 50, 0), num_views=4),
        ]
    )
    plain, views = collected.rows
    assert (plain.label, plain.num_runs, plain.seeds) == ("plain", 2, ((1, 1993), (2, 1993)))
    assert plain.directories == ("out/plain/1", "out/plain/2")
    # Mean and sample deviation of (60, 64), (50, 56), (10, 14); tasks are of one size, so both means are the same.
    for average in (plain.average_incremental_accuracy, plain.average_incremental_accuracy_task_mean):
        assert average == Spread(pytest.approx(62.0), pytest.approx(8**0.5))
    for last in (plain.last_accuracy, plain.last_accuracy_task_mean):
        assert last == Spread(pytest.approx(53.0), pytest.approx(18**0.5))
    assert plain.forgetting == Spread(pytest.approx(12.0), pytest.approx(8**0.5))
    assert plain.average_incremental_accuracy_top5.mean == pytest.approx(82.0)
    assert plain.last_accuracy_top5.mean == pytest.approx(73.0)
    assert plain.seconds == Spread(2.0, 0.0)
    assert views.num_images == Spread(100.0, 0.0)
    # Pairs by seed: 65 - 64 and 63 - 60; 60 - 56 and 54 - 50; 12 - 14 and 10 - 10.
    (effect,) = collected.view_batch_effects
    assert (effect.label, effect.num_pairs) == ("views", 2)
    assert effect.average_incremental_accuracy.differences == pytest.approx((1.0, 3.0))
    assert effect.average_incremental_accuracy.std == pytest.approx(2**0.5)
    assert effect.last_accuracy.mean == pytest.approx(4.0)
    assert effect.forgetting.differences == pytest.approx((-2.0, 0.0))


def test_collect__pairs_within_a_family_alone() -> None:
    runs = [
        a_run("slow-1", 1, matrix(10, 10, 0), num_views=1, family="slow"),
        a_run("fast-1", 1, matrix(20, 20, 0), num_views=1, family="fast"),
        a_run("slow-4", 1, matrix(15, 15, 0), num_views=4, family="slow"),
        a_run("fast-4", 1, matrix(26, 26, 0), num_views=4, family="fast"),
        a_run("other-4", 1, matrix(30, 30, 0), num_views=4, family="other"),
    ]
    effects = collect(runs).view_batch_effects
    assert [(effect.label, effect.last_accuracy.mean) for effect in effects] == [
        ("slow-4", pytest.approx(5.0)),
        ("fast-4", pytest.approx(6.0)),
    ]


def test_collect__says_nothing_of_views_where_nothing_is_trained() -> None:
    joint = AccuracyMatrix([[cell(50), cell(50)]])
    runs = [a_run(str(views), 1, joint, num_views=views, num_steps=0) for views in (1, 4)]
    collected = collect(runs)
    assert collected.view_batch_effects == ()
    assert collected.rows[0].forgetting == Spread(None, None)


def test_collected__becomes_json() -> None:
    missing = Missing("views", (2, 1993), "out/2")
    collected = collect([a_run("plain", 1, matrix(60, 50, 10), num_views=1)], missing=[missing])
    stored = json.loads(json.dumps(collected.to_json()))
    assert stored["rows"][0]["last_accuracy"] == {"mean": pytest.approx(50.0), "std": None}
    assert stored["missing"] == [
        {"label": "views", "seeds": [2, 1993], "directory": "out/2", "problem": None}
    ]


def test_last_of_both__is_the_mean_of_class_and_task_incremental_accuracy() -> None:
    first, second = AccuracyCell(10, 4, 9, 8, 10), AccuracyCell(30, 6, 20, 30, 30)
    assert last_of_both(AccuracyMatrix([[first], [first, second]])) == pytest.approx((25 + 95) / 2)
    assert last_of_both(AccuracyMatrix([[AccuracyCell(10, 4, 9)]])) is None


def test_collect__a_share_of_strong_images_is_compared_with_the_baseline_and_is_none() -> None:
    plain = a_run("plain", 1, matrix(50, 40, 5), num_views=1)
    control = replace(a_run("share", 1, matrix(46, 40, 5), num_views=1), is_baseline=False)
    views = a_run("views", 1, matrix(52, 40, 5), num_views=4)
    for runs in ([plain, control, views], [plain, views, control]):
        effects = {
            row.label: row.average_incremental_accuracy.mean for row in collect(runs).view_batch_effects
        }
        assert effects == {"share": pytest.approx(-4), "views": pytest.approx(2)}


def test_costs_of__are_those_of_a_step_and_of_the_dearest_task() -> None:
    def task(seconds: float, memory: int | None) -> TaskTimings:
        return TaskTimings(
            training_seconds=9, step_seconds=seconds, end_task_seconds=0, evaluation_seconds=0,
            peak_memory_bytes=memory,
        )  # fmt: skip

    tasks = [task(3, 200_000_000), task(1, 235_000_000), task(0, None)]
    assert costs_of(tasks, num_steps=200) == {"step_milliseconds": 20.0, "peak_memory_gigabytes": 0.235}
    assert set(costs_of([task(0, None)], num_steps=0).values()) == {None}  # nothing is trained


def test_measures_of__are_means_over_tasks() -> None:
    def record(index: int, **measures: Any) -> TaskFacts:
        return TaskFacts(
            task_index=index, num_samples=10, num_views=4, num_steps=5, num_images=40, min_visits=1, max_visits=1,
            learner_report={}, parameters={}, **measures,
        )  # fmt: skip

    tasks = [
        record(0, recall_interval={"mean": 40.0, "std": 3.0}, summed_rate={"min": 1.0, "mean": 1.5, "max": 2.0},
               degree_of_forgetting={"train": 4.0, "test": 1.0}, sample_forgetting=6.0, feature_drift=0.1),
        record(1, recall_interval={"mean": 42.0, "std": 3.0}, summed_rate={"min": 1.0, "mean": 1.5, "max": 3.0},
               degree_of_forgetting={"train": 2.0}, feature_drift=0.3),
        record(2),
    ]  # fmt: skip
    assert measures_of(tasks) == {
        "recall_interval": pytest.approx(4.1),
        "summed_rate_spread": 3.0,
        "degree_of_forgetting_train": 3.0,
        "degree_of_forgetting_test": 1.0,
        "sample_forgetting": 6.0,
        "feature_drift": pytest.approx(0.2),
    }
    assert set(measures_of([record(0)]).values()) == {None}
    runs = [
        replace(a_run("a", seed, matrix(70, 60, 5), num_views=4), measures=measures_of(tasks))
        for seed in (1, 2)
    ]
    assert collect(runs).rows[0].measures["sample_forgetting"] == Spread(6.0, 0.0)
