"""Visits, rests and summed rates against what is counted by hand, and the recall interval of the paper."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vbm_ptm.data.class_order import ClassOrderSampler
from vbm_ptm.data.view_batch import ViewBatchSampler
from vbm_ptm.engine.optimization import OptimizationConfig
from vbm_ptm.engine.schedule import learning_rate_factor
from vbm_ptm.engine.visits import VisitLog


def test_visit_log__counts_by_hand() -> None:
    log = VisitLog(3)
    assert (log.recall_interval(), log.summed_rate()) == ({}, {})
    log.add([0, 1], num_images=0, rate=0.1)
    log.add([2], num_images=4, rate=0.1)
    assert log.recall_interval() == {}
    log.add([1, 0], num_images=6, rate=0.01)
    log.add([0], num_images=10, rate=0.01)
    assert log.counts.tolist() == [3, 2, 1]
    # Sample 0 rests for 6 and 4 images, sample 1 for 6.
    assert log.recall_interval() == {"mean": round(16 / 3, 3), "std": round(math.sqrt(8 / 9), 3)}
    assert log.summed_rate() == {"min": 0.1, "mean": pytest.approx(0.11, abs=1e-6), "max": 0.12}


@pytest.mark.parametrize("num_views", [1, 2, 3, 4])
def test_recall_interval__is_v_times_n(num_views: int) -> None:
    num_samples, log = 60, VisitLog(60)
    sampler = ViewBatchSampler(num_samples, 12, num_views, seed=0)
    num_images = 0
    for epoch in range(5 * num_views):
        sampler.set_epoch(epoch)
        for positions in sampler.steps():
            log.add(positions, num_images=num_images, rate=1.0)
            num_images += len(positions) * num_views
    assert log.recall_interval()["mean"] == pytest.approx(num_views * num_samples)
    assert log.recall_interval()["std"] > 0
    assert set(log.counts) == {5}


def test_recall_interval__of_parts_of_the_classes_is_that_of_one_view_on_average() -> None:
    """Short rests within an epoch, and a long one until the part comes back."""
    classes, log, num_images = np.arange(60) % 4, VisitLog(60), 0
    sampler = ClassOrderSampler(classes, 15, 4, seed=0)
    for epoch in range(200):
        sampler.set_epoch(epoch)
        for positions in sampler.steps():
            log.add(positions, num_images=num_images, rate=1.0)
            num_images += len(positions)
    interval = log.recall_interval()
    assert interval["mean"] == pytest.approx(60, rel=0.02)
    assert interval["std"] > 60


@pytest.mark.parametrize(("unit", "spread"), [("epoch", 1.3), ("cycle", 1.0)])
def test_summed_rate__is_the_same_for_all_samples_by_cycle(unit: str, spread: float) -> None:
    config = OptimizationConfig.model_validate({"epochs": 16, "schedule": "cosine", "schedule_unit": unit})
    sampler, log = ViewBatchSampler(40, 8, 4, seed=0), VisitLog(40)
    for epoch in range(16):
        sampler.set_epoch(epoch)
        for positions in sampler.steps():
            rate = learning_rate_factor(config, epoch, cycle_length=4)
            log.add(positions, num_images=0, rate=rate)
    found = log.summed_rate()
    assert found["max"] / found["min"] == pytest.approx(spread, rel=0.12)
    assert (found["max"] / found["min"] < 1.05) == (unit == "cycle")
