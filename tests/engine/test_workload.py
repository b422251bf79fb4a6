"""What training takes, against walking through every step of every epoch."""

from __future__ import annotations

import pytest

from vbm_ptm.data.view_batch import ViewBatchSampler
from vbm_ptm.engine.workload import training_workload


@pytest.mark.parametrize("num_samples", [1, 3, 40, 41])
@pytest.mark.parametrize("num_views", [1, 2, 4])
@pytest.mark.parametrize("epochs", [1, 4, 7])
@pytest.mark.parametrize("max_steps", [None, 1, 13])
def test_training_workload__is_that_of_the_steps(
    num_samples: int, num_views: int, epochs: int, max_steps: int | None
) -> None:
    sampler = ViewBatchSampler(num_samples, 8, num_views, seed=3, task_index=1)
    sizes = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        sizes += [len(positions) * sampler.num_views for positions in sampler.steps()]
    taken = sizes[:max_steps]
    assert training_workload(sampler, epochs=epochs, max_steps=max_steps) == (len(taken), sum(taken))


def test_training_workload__of_the_paper_is_the_same_with_and_without_views() -> None:
    workloads = {
        num_views: training_workload(ViewBatchSampler(5000, 128, num_views, seed=1993), epochs=20)
        for num_views in (1, 4)
    }
    assert workloads[1] == workloads[4] == (20 * 40, 20 * 5000)
