"""Fitted curves against the parameters that simulated retention was made with, and data that decide nothing."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from vbm_ptm.analysis.forgetting_curve import (
    CurveFit,
    decay_points,
    decay_rate,
    fit_forgetting_curve,
    fit_lines,
    fit_spacing_effect,
    forgetting_curve_figure,
    retained,
)
from vbm_ptm.metrics import AccuracyCell, AccuracyMatrix

TIMES = np.arange(12.0).repeat(3)


def simulated(noise: float, *, seed: int = 0) -> NDArray[np.float64]:
    curve = retained(TIMES, amplitude=90.0, scale=0.4, rate=1.6)
    return curve + np.random.default_rng(seed).normal(0, noise, len(TIMES))


def spaced(noise: float, *, seed: int = 0) -> CurveFit:
    """Fit what four recall intervals leave: A 92, b 0.3, c 0.5, d 1.4, so that 3 passes between visits are best."""
    intervals = np.array([1.0, 2.0, 4.0, 8.0]).repeat(len(TIMES))
    times = np.tile(TIMES, 4)
    curve = retained(times, amplitude=92.0, scale=0.3, rate=decay_rate(intervals, c=0.5, d=1.4))
    noisy = curve + np.random.default_rng(seed).normal(0, noise, len(times))
    return fit_spacing_effect(times, noisy, intervals)


def test_formulas__are_those_of_the_appendix() -> None:
    assert decay_rate(np.array([np.exp(1.5) - 1, 0.0]), c=2.0, d=1.5).tolist() == pytest.approx([1.0, 5.5])
    assert retained(np.array([0.0, 3.0]), amplitude=80.0, scale=1.0, rate=2.0).tolist() == [80.0, 5.0]


def test_fit__finds_the_parameters_without_noise() -> None:
    fit = fit_forgetting_curve(TIMES, simulated(0.0))
    assert fit.is_decided
    assert fit.names == ("A", "b", "S")
    assert fit.values == pytest.approx([90.0, 0.4, 1.6], rel=1e-4)


def test_fit__the_intervals_hold_what_they_promise() -> None:
    truth, hits = np.array([90.0, 0.4, 1.6]), 0
    for seed in range(40):
        fit = fit_forgetting_curve(TIMES, simulated(0.5, seed=seed))
        assert fit.is_decided
        hits += int((np.abs(fit.values - truth) <= fit.half_width).sum())
    assert 0.88 <= hits / 120 <= 1.0  # 95 % of 120 intervals, give or take


def test_fit__the_spacing_effect_of_four_intervals() -> None:
    fit = spaced(0.3)
    assert fit.is_decided
    assert fit.names == ("A1", "A2", "A3", "A4", "b", "c", "d")
    assert fit.values == pytest.approx([92, 92, 92, 92, 0.3, 0.5, 1.4], rel=0.15)
    truth = np.array([92, 92, 92, 92, 0.3, 0.5, 1.4])
    assert (np.abs(fit.values - truth) <= 1.5 * fit.half_width).all()
    curve = retained(TIMES, amplitude=92.0, scale=0.3, rate=decay_rate(np.array([2.0]), c=0.5, d=1.4)[0])
    assert (np.abs(fit.at(TIMES, group=1) - curve) <= 2 * fit.band(TIMES, group=1)).all()


@pytest.mark.parametrize(
    ("time", "retention", "problem"),
    [
        ([0, 1, 2], [90, 80, 75], "3 different times are too few for 3 parameters"),
        (TIMES, 60 + np.random.default_rng(0).normal(0, 3, len(TIMES)), "limit|wider|identified"),
        (np.arange(8.0), 80 - 0.5 * np.arange(8.0), "identified|limit|wider"),
        (np.arange(5.0), [90, 40, 85, 30, 70], "wider|identified|limit"),
    ],
)
def test_fit__says_when_the_data_cannot_decide(time: object, retention: object, problem: str) -> None:
    fit = fit_forgetting_curve(np.asarray(time, float), np.asarray(retention, float))
    assert not fit.is_decided
    assert any(each in str(fit.problem) for each in problem.split("|")), fit.problem


def test_fit__two_intervals_are_not_enough_for_the_spacing_effect() -> None:
    intervals = np.array([1.0, 4.0]).repeat(len(TIMES))
    fit = fit_spacing_effect(np.tile(TIMES, 2), np.tile(simulated(0.1), 2), intervals)
    assert fit.problem == "c and d need three recall intervals or more, not 2"


def test_decay_points__are_the_means_over_tasks() -> None:
    counts = [[9], [5, 8], [3, 6, 10]]
    matrix = AccuracyMatrix([AccuracyCell(10, count, 10) for count in row] for row in counts)
    times, values = decay_points([matrix])
    assert times.tolist() == [0, 1, 2]
    assert values.tolist() == pytest.approx([90, 55, 30])
    lines = {"a": [matrix], "b": [matrix]}
    (axes,) = forgetting_curve_figure(lines, fit_lines(lines)).axes
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
