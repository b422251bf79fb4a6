"""The forgetting curve of the spacing effect, fitted to measured retention, and what the data can and cannot tell.

R(t) = A (b t + 1)^(-S), with S = 1 + c (ln(I + 1) - d)^2

View-Batch Model (CVPR 2025), appendix "Forgetting Curve Analysis Backgrounds", after Ebbinghaus (1885) and Cepeda et
al. (Psychological Science, 2008). t is the time since a task was learned, here the number of tasks learned since
then; R the accuracy on it in percent; A the retention at t = 0; b a time scale; S the rate of decay; I the recall
interval, here in passes over the samples of a task (about V with V views). The best interval is exp(d) - 1.

Runs with one interval determine A, b and S at most; c and d need three intervals or more. Each interval has its own
A: how well a task is learned is separate from how it is forgotten. The fit is scipy's nonlinear least squares, the
covariance s^2 (J'J)^-1 with the residual variance s^2, bands by the delta method with Student's t.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from vbm_ptm.analysis.drawing import Lines, add_legend, line_styles, new_figure, styled
from vbm_ptm.analysis.retention import mean_retention
from vbm_ptm.analysis.spread import Floats, Spread, mean_and_std
from vbm_ptm.metrics import AccuracyMatrix

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIDENCE = 0.95
# Beyond this, some combination of parameters makes no difference that the data would show.
MAX_CONDITION = 1e4

_LARGEST_SCALE, _LARGEST_RATE = 1e3, 1e3


def decay_rate(interval: Floats, *, c: float, d: float) -> Floats:
    """Return S = 1 + c (ln(I + 1) - d)^2."""
    rate: Floats = 1 + c * (np.log(np.asarray(interval) + 1) - d) ** 2
    return rate


def retained(time: Floats, *, amplitude: Floats | float, scale: float, rate: Floats | float) -> Floats:
    """Return R(t) = A (b t + 1)^(-S)."""
    values: Floats = amplitude * (scale * np.asarray(time) + 1) ** -np.asarray(rate)
    return values


@dataclass(frozen=True)
class CurveFit:
    """A forgetting curve fitted to measured retention.

    Attributes:
        names: Names of the parameters: "A" or "A1", "A2", … one for each interval, "b", then "S", or "c" and "d".
        values: (p,) their best values.
        errors: (p,) their standard errors; NaN if there are not enough points.
        intervals: (g,) recall intervals, one for each group of points; a single NaN if they are not used.
        condition: Condition number of the Jacobian, its columns scaled to length 1.
        num_points: Number of points fitted.
        residual: Standard deviation of the residuals, in points.
        problem: Why the data do not decide; None if they do.
    """

    names: tuple[str, ...]
    values: Floats
    errors: Floats
    intervals: Floats
    condition: float
    num_points: int
    residual: float
    problem: str | None
    _covariance: Floats = field(repr=False)

    @property
    def is_decided(self) -> bool:
        """Whether the parameters are meaningful."""
        return self.problem is None

    @property
    def half_width(self) -> Floats:
        """(p,) half-width of the 95 % confidence interval of each parameter."""
        half: Floats = self.errors * _quantile(self.num_points - len(self.values))
        return half

    def at(self, time: Floats, *, group: int = 0) -> Floats:
        """Return (n,) R(t).

        Args:
            time: (n,) tasks learned since.
            group: Index into ``intervals``.
        """
        return _model(self.values, np.asarray(time, dtype=float), np.full(len(time), group), self.intervals)

    def band(self, time: Floats, *, group: int = 0) -> Floats:
        """Return (n,) the half-width of the 95 % confidence band of R(t)."""
        groups = np.full(len(time), group)
        jacobian = _jacobian(self.values, np.asarray(time, dtype=float), groups, self.intervals)
        variance = np.einsum("np,pq,nq->n", jacobian, self._covariance, jacobian)
        half: Floats = np.sqrt(np.maximum(variance, 0)) * _quantile(self.num_points - len(self.values))
        return half


def fit_forgetting_curve(time: Sequence[float] | Floats, retention: Sequence[float] | Floats) -> CurveFit:
    """Fit A, b and S to points of one recall interval.

    Args:
        time: (n,) tasks learned since.
        retention: (n,) accuracy in percent.
    """
    return _fit(
        np.asarray(time, float), np.asarray(retention, float), np.zeros(len(time), int), np.array([np.nan])
    )


def fit_spacing_effect(
    time: Sequence[float] | Floats, retention: Sequence[float] | Floats, interval: Sequence[float] | Floats
) -> CurveFit:
    """Fit an A for each recall interval, and common b, c and d.

    Args:
        time: (n,) tasks learned since.
        retention: (n,) accuracy in percent.
        interval: (n,) recall interval, in passes over the samples of a task.
    """
    intervals, groups = np.unique(np.asarray(interval, float), return_inverse=True)
    return _fit(np.asarray(time, float), np.asarray(retention, float), groups, intervals)


def _model(values: Floats, time: Floats, groups: NDArray[np.int64], intervals: Floats) -> Floats:
    count = len(intervals)
    amplitude, scale = values[:count][groups], values[count]
    if np.isnan(intervals[0]):
        return retained(time, amplitude=amplitude, scale=scale, rate=values[-1])
    rate = decay_rate(intervals[groups], c=values[-2], d=values[-1])
    return retained(time, amplitude=amplitude, scale=scale, rate=rate)


def _jacobian(values: Floats, time: Floats, groups: NDArray[np.int64], intervals: Floats) -> Floats:
    """Return (n,p) the derivatives of the model, in closed form."""
    count = len(intervals)
    amplitude, scale = values[:count][groups], values[count]
    base, is_single = scale * time + 1, bool(np.isnan(intervals[0]))
    distance = np.zeros(len(time)) if is_single else np.log(intervals[groups] + 1) - values[-1]
    rate = np.full(len(time), values[-1]) if is_single else 1 + values[-2] * distance**2
    power = base**-rate
    columns = [np.where(groups == group, power, 0.0) for group in range(count)]
    columns.append(-amplitude * rate * time * power / base)
    by_rate = -amplitude * power * np.log(base)
    if is_single:
        columns.append(by_rate)
    else:
        columns += [by_rate * distance**2, by_rate * -2 * values[-2] * distance]
    return np.stack(columns, axis=1)


def _fit(time: Floats, retention: Floats, groups: NDArray[np.int64], intervals: Floats) -> CurveFit:
    from scipy.optimize import least_squares

    count, is_single = len(intervals), bool(np.isnan(intervals[0]))
    names = (*(("A",) if is_single else (f"A{number + 1}" for number in range(count))), "b")
    names += ("S",) if is_single else ("c", "d")
    problem = _too_few(time, groups, intervals, num_parameters=len(names))
    if problem is not None:
        nothing = np.full(len(names), np.nan)
        covariance = np.full((len(names), len(names)), np.nan)
        return CurveFit(names, nothing, nothing, intervals, np.nan, len(time), np.nan, problem, covariance)

    largest = float(retention.max())
    first = [float(retention[groups == group].max()) for group in range(count)]
    logs = np.log(intervals + 1)
    starts = (
        [(1.5,), (4.0,)] if is_single else [(0.5, guess) for guess in (logs.min(), logs.mean(), logs.max())]
    )
    low = [0.0] * count + [0.0] + ([1.0] if is_single else [0.0, min(logs.min() - 2, 0.0)])
    high = [2 * largest + 1] * count + [_LARGEST_SCALE]
    high += [_LARGEST_RATE] if is_single else [_LARGEST_RATE, logs.max() + 2]
    solutions = [
        least_squares(
            lambda values: _model(values, time, groups, intervals) - retention,
            np.clip([*first, scale, *start], np.array(low) + 1e-9, np.array(high) - 1e-9),
            jac=lambda values: _jacobian(values, time, groups, intervals),
            bounds=(low, high),
            x_scale="jac",
        )
        for scale in (0.05, 0.5)
        for start in starts
    ]
    best = min(solutions, key=lambda solution: float(solution.cost))
    freedom = len(time) - len(names)
    variance = 2 * float(best.cost) / freedom
    jacobian = _jacobian(best.x, time, groups, intervals)
    lengths = np.linalg.norm(jacobian, axis=0)
    scaled = jacobian / np.where(lengths > 0, lengths, 1)
    condition = float(np.linalg.cond(scaled)) if lengths.all() else np.inf
    inverse = np.linalg.pinv(scaled.T @ scaled) / np.outer(*[np.where(lengths > 0, lengths, 1)] * 2)
    covariance = variance * inverse
    fit = CurveFit(
        names,
        best.x,
        np.sqrt(np.diag(covariance)),
        intervals,
        condition,
        len(time),
        float(np.sqrt(variance)),
        None,
        covariance,
    )
    problem = _undecided(fit, time, retention, groups, is_at_bound=np.asarray(best.active_mask) != 0)
    return CurveFit(**{**fit.__dict__, "problem": problem})


def _too_few(
    time: Floats, groups: NDArray[np.int64], intervals: Floats, *, num_parameters: int
) -> str | None:
    if not np.isnan(intervals[0]) and len(intervals) < 3:
        return f"c and d need three recall intervals or more, not {len(intervals)}"
    num_times = len({(float(each), int(group)) for each, group in zip(time, groups, strict=True)})
    if num_times <= num_parameters:
        return f"{num_times} different times are too few for {num_parameters} parameters"
    return None


def _undecided(
    fit: CurveFit,
    time: Floats,
    retention: Floats,
    groups: NDArray[np.int64],
    *,
    is_at_bound: NDArray[np.bool_],
) -> str | None:
    """Say why the data do not decide, if they do not."""
    if not fit.condition < MAX_CONDITION:
        return f"the parameters cannot be identified (condition number {fit.condition:.1e})"
    if is_at_bound.any():
        names = ", ".join(name for name, at in zip(fit.names, is_at_bound, strict=True) if at)
        return f"the best curve is at the limit of what {names} may be"
    spread = float(retention.max() - retention.min())
    widest = max(
        float(2 * fit.band(time[groups == group], group=group).max()) for group in range(len(fit.intervals))
    )
    if widest > spread:
        return f"the band is wider ({widest:.1f} points) than all that was forgotten ({spread:.1f})"
    return None


def _quantile(freedom: int) -> float:
    from scipy.stats import t

    return float(t.ppf(0.5 + CONFIDENCE / 2, freedom)) if freedom > 0 else float("nan")


def decay_points(matrices: Sequence[AccuracyMatrix]) -> tuple[Floats, Floats]:
    """Return (n,) times and (n,) retentions of runs: for each run, ``mean_retention`` after k later tasks."""
    times: list[float] = []
    values: list[float] = []
    for matrix in matrices:
        for later, value in enumerate(mean_retention(matrix)):
            if not np.isnan(value):
                times.append(float(later))
                values.append(float(value))
    return np.array(times), np.array(values)


def fit_lines(lines: Lines[AccuracyMatrix]) -> dict[str, CurveFit]:
    """Fit A, b and S to the runs of each line."""
    return {label: fit_forgetting_curve(*decay_points(matrices)) for label, matrices in lines.items()}


def forgetting_curve_figure(lines: Lines[AccuracyMatrix], fits: Mapping[str, CurveFit]) -> Figure:
    """Draw measured retention, and the curve with its 95 % band for each line whose data decide it.

    Args:
        lines: The runs of each line.
        fits: Their curves, from ``fit_lines``.
    """
    with styled():
        figure, (axes,) = new_figure()
        styles = line_styles(list(lines))
        for label, matrices in lines.items():
            style = styles[label]
            time, values = decay_points(matrices)
            if not len(time):
                continue
            places = np.unique(time)
            means, _ = mean_and_std([Spread.of(values[time == place]) for place in places])
            fit = fits[label]
            axes.plot(
                places,
                means,
                linestyle="" if fit.is_decided else ":",
                marker=style.marker,
                color=style.color,
                label=label,
            )
            if fit.is_decided:
                smooth = np.linspace(0, places.max(), 60)
                curve, band = fit.at(smooth), fit.band(smooth)
                axes.plot(smooth, curve, color=style.color, linestyle=style.linestyle)
                axes.fill_between(
                    smooth, curve - band, curve + band, color=style.color, alpha=0.16, linewidth=0
                )
        axes.set_xlabel("tasks learned since")
        axes.set_ylabel("retention (%)")
        add_legend(figure, axes, lines)
    return figure
