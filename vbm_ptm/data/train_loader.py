"""The steps of one task, each rank's part of them.

Shapes: G groups, V views, C colour channels, H x W pixels.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

from vbm_ptm.data.view_batch import ViewBatchSampler, chunk
from vbm_ptm.data.views import ReplayPart, StepPart, ViewBatch
from vbm_ptm.data.workers import ImageLoader


class TrainLoader:
    """The steps of one task on one rank; one loader serves all epochs, so that its workers stay.

    Attributes:
        waited_seconds: How long the last batch was waited for; without workers, how long it took to load.
    """

    def __init__(self, parts: RankParts, loader: ImageLoader) -> None:
        self._parts = parts
        self._loader = loader
        self.waited_seconds = 0.0

    def set_epoch(
        self, epoch: int, *, start_step: int = 0, replays: Sequence[tuple[ReplayPart, ...]] = ()
    ) -> None:
        """Choose what to load.

        Args:
            epoch: From 0.
            start_step: First step; not 0 when a run is resumed.
            replays: Draws of past samples for every step from the first one on, over all ranks; none if empty. Steps
                after the last one are not loaded.
        """
        self._parts.set_epoch(epoch, start_step=start_step, replays=replays)

    def __len__(self) -> int:
        """Return the number of steps that are left in the epoch."""
        return len(self._parts)

    def __iter__(self) -> Iterator[ViewBatch]:
        return self._timed(iter(self._loader))  # workers start at once

    def _timed(self, batches: Iterator[ViewBatch]) -> Iterator[ViewBatch]:
        asked = time.perf_counter()
        for batch in batches:
            self.waited_seconds = time.perf_counter() - asked
            yield batch
            asked = time.perf_counter()


class RankParts:
    """The batch sampler of one rank: its contiguous chunk of every step's positions, for each kind of sample."""

    def __init__(self, sampler: ViewBatchSampler, *, rank: int, num_ranks: int) -> None:
        self._sampler = sampler
        self._rank = rank
        self._num_ranks = num_ranks
        self._start_step = 0
        self._replays: Sequence[tuple[ReplayPart, ...]] = ()

    def set_epoch(self, epoch: int, *, start_step: int, replays: Sequence[tuple[ReplayPart, ...]]) -> None:
        """Choose what to iterate over; arguments as for ``TrainLoader``."""
        self._sampler.set_epoch(epoch)
        self._start_step = start_step
        self._replays = replays

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._start_step)

    def __iter__(self) -> Iterator[StepPart]:
        steps = [
            (self._sampler.draw_of(step), positions) for step, positions in enumerate(self._sampler.steps())
        ]
        replays = self._replays or itertools.repeat(())
        for (draw, positions), replayed in zip(steps[self._start_step :], replays, strict=False):
            draws = tuple(part.of_rank(self._rank, self._num_ranks) for part in replayed)
            first = self._sampler.num_own
            own = self._part(draw, [position for position in positions if position < first])
            if first < self._sampler.num_samples:
                exemplars = self._part(draw, [position for position in positions if position >= first])
                own = own._replace(exemplars=exemplars)
            yield own._replace(replays=draws)

    def _part(self, draw: int, positions: list[int]) -> StepPart:
        first, last = chunk(len(positions), self._rank, self._num_ranks)
        return StepPart(draw, positions[first:last], len(positions))
