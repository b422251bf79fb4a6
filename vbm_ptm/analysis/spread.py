"""Mean and deviation of the numbers that exist."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation of the numbers that exist; None if there are too few."""

    mean: float | None
    std: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread:
        """Return the spread of the values that exist."""
        known = [value for value in values if value is not None]
        return cls(
            mean=statistics.fmean(known) if known else None,
            std=statistics.stdev(known) if len(known) > 1 else None,
        )


def spreads(curves: Sequence[Sequence[float | None]]) -> list[Spread]:
    """Return the spread at each position of curves that may differ in length."""
    longest = max(map(len, curves), default=0)
    return [Spread.of(curve[place] for curve in curves if place < len(curve)) for place in range(longest)]


def mean_and_std(columns: Sequence[Spread]) -> tuple[Floats, Floats]:
    """Return (n,) means and (n,) deviations for drawing: NaN without a mean, 0 without a deviation."""
    means = np.array([np.nan if each.mean is None else each.mean for each in columns])
    return means, np.array([each.std or 0.0 for each in columns])
