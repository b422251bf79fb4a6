"""What training takes, against walking through every step of every epoch."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from vbm_ptm.data.class_order import ClassOrderSampler
from vbm_ptm.data.view_batch_config import ViewBatchConfig
from vbm_ptm.engine.objective import ObjectiveConfig, ViewBatchObjective
from vbm_ptm.engine.optimization import OptimizationConfig
from vbm_ptm.engine.recipe import Recipe


def recipe_of(
    *, max_steps: int | None = None, order: Any = "sample", num_views: int, **settings: Any
) -> Recipe:
    objective = ViewBatchObjective(ObjectiveConfig())
    view_batch = ViewBatchConfig(num_views=num_views, order=order)
    return Recipe(
        objective, OptimizationConfig(**settings), view_batch=view_batch, seed=3, max_steps=max_steps
    )


@pytest.mark.parametrize("num_views", [1, 2, 4])
@pytest.mark.parametrize("order", ["sample", "class"])
def test_workload__is_that_of_the_steps(num_views: int, order: str) -> None:
    for num_samples, epochs, max_steps in itertools.product((1, 3, 40, 41), (1, 4, 7), (None, 1, 13)):
        recipe = recipe_of(num_views=num_views, batch_size=8, epochs=epochs, max_steps=max_steps, order=order)
        sampler = recipe.sampler(np.arange(num_samples) % 5, task_index=1)
        assert isinstance(sampler, ClassOrderSampler) == (order == "class")
        assert (sampler.seed, sampler.task_index, sampler.batch_size) == (3, 1, 8)
        sizes = []
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            sizes += [len(positions) * sampler.num_views for positions in sampler.steps()]
        taken = sizes[:max_steps]
        assert recipe.workload(sampler) == (len(taken), sum(taken)), (num_samples, epochs, max_steps)


def test_workload__of_the_paper_is_the_same_with_and_without_views() -> None:
    for num_views in (1, 4):
        recipe = recipe_of(num_views=num_views, batch_size=128, epochs=20)
        assert recipe.workload(recipe.sampler(np.arange(5000) % 10, task_index=0)) == (20 * 40, 20 * 5000)


def test_notes__say_what_makes_numbers_of_views_hard_to_compare() -> None:
    def notes(**settings: Any) -> str:
        return "\n".join(recipe_of(batch_size=8, **settings).notes())

    assert notes(num_views=1, epochs=1, schedule="cosine") == ""
    assert notes(num_views=4, epochs=20, schedule="constant") == ""
    assert "50 epochs are not a whole number of cycles of 4" in notes(num_views=4, epochs=50)
    # Four epochs of a cosine: 1, 0.854, 0.5, 0.146.
    few = notes(num_views=4, epochs=4, schedule="cosine")
    assert "factor of 6.8" in few
    assert "4 epochs and 4 views a sample never comes back" in few
    assert "8 epochs and 4 views a sample comes back 1 time at most" in notes(num_views=4, epochs=8)
    assert "12 epochs and 4 views a sample comes back 2 times at most" in notes(num_views=4, epochs=12)
    assert "factor of" not in notes(num_views=4, epochs=4, schedule="cosine", schedule_unit="cycle")
    # The appendix's 20 epochs with a milestone at 18: 5 or 4.1 epochs at full rate.
    assert "factor of" not in notes(num_views=4, epochs=20, schedule="multistep", milestones=(18,))
