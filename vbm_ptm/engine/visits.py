"""When each sample of a task was visited, how long it rested, and at which learning rates it was trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class VisitLog:
    """The visits of a task's samples.

    Args:
        num_samples: Samples of the task.

    Attributes:
        counts: (samples,) visits of each.
        rates: (samples,) learning rates of its visits, summed.
    """

    def __init__(self, num_samples: int) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(num_samples, dtype=np.int64)
        self.rates: npt.NDArray[np.float64] = np.zeros(num_samples)
        self._last = np.zeros(num_samples, dtype=np.int64)
        self._num_rests, self._sum, self._sum_of_squares = 0, 0, 0

    def add(self, positions: Sequence[int], *, num_images: int, rate: float) -> None:
        """Count a step.

        Args:
            positions: Distinct samples of the step.
            num_images: Images that were shown before it, over all ranks.
            rate: Learning rate of the step.
        """
        chosen = np.asarray(positions, dtype=np.int64)
        rests = num_images - self._last[chosen[self.counts[chosen] > 0]]
        self._num_rests += len(rests)
        self._sum += int(rests.sum())
        self._sum_of_squares += int((rests**2).sum())
        self._last[chosen] = num_images
        self.counts[chosen] += 1
        self.rates[chosen] += rate

    def recall_interval(self) -> dict[str, float]:
        """Return mean and standard deviation of the images between two visits of a sample; empty without any.

        With V views it is V x N for N samples, on average over whole cycles.
        """
        if not self._num_rests:
            return {}
        mean = self._sum / self._num_rests
        variance = max(self._sum_of_squares / self._num_rests - mean**2, 0.0)
        return {"mean": round(mean, 3), "std": round(variance**0.5, 3)}

    def summed_rate(self) -> dict[str, float]:
        """Return the smallest, mean and largest sum of learning rates over the samples; empty without a visit."""
        if not self.counts.any():
            return {}
        named = {"min": self.rates.min(), "mean": self.rates.mean(), "max": self.rates.max()}
        return {name: float(f"{value:.6g}") for name, value in named.items()}
