"""How much training a task takes: counted from the steps that it will consist of, before any of them is done."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from vbm_ptm.data.view_batch import ViewBatchSampler


class Workload(NamedTuple):
    """Optimizer steps of a task and the images in them, over all ranks."""

    num_steps: int
    num_images: int


def training_workload(sampler: ViewBatchSampler, *, epochs: int, max_steps: int | None = None) -> Workload:
    """Return what training on a task takes.

    Args:
        sampler: The steps of the task; left at one of its epochs.
        epochs: Epochs of N images.
        max_steps: Where a smoke run stops.
    """
    # Step sizes come back with every cycle, so that one cycle of V epochs tells all.
    cycle = []
    for epoch in range(min(sampler.num_views, epochs)):
        sampler.set_epoch(epoch)
        cycle.append([len(positions) for positions in sampler.steps()])
    all_epochs = (cycle[epoch % sampler.num_views] for epoch in range(epochs))
    sizes = list(itertools.islice(itertools.chain.from_iterable(all_epochs), max_steps))
    return Workload(len(sizes), sum(sizes) * sampler.num_views)
