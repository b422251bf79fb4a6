"""What training takes, against walking through every step of every epoch."""

from __future__ import annotations

import pytest

from vbm_ptm.engine.objective import ObjectiveConfig, ViewBatchObjective
from vbm_ptm.engine.optimization import OptimizationConfig
from vbm_ptm.engine.recipe import Recipe


def recipe_of(*, num_views: int, batch_size: int, epochs: int, max_steps: int | None = None) -> Recipe:
    optimization = OptimizationConfig(batch_size=batch_size, epochs=epochs)
    objective = ViewBatchObjective(ObjectiveConfig())
    return Recipe(objective, optimization, num_views=num_views, seed=3, max_steps=max_steps)


@pytest.mark.parametrize("num_samples", [1, 3, 40, 41])
@pytest.mark.parametrize("num_views", [1, 2, 4])
@pytest.mark.parametrize("epochs", [1, 4, 7])
@pytest.mark.parametrize("max_steps", [None, 1, 13])
def test_workload__is_that_of_the_steps(
    num_samples: int, num_views: int, epochs: int, max_steps: int | None
) -> None:
    recipe = recipe_of(num_views=num_views, batch_size=8, epochs=epochs, max_steps=max_steps)
    sampler = recipe.sampler(num_samples, task_index=1)
    assert (sampler.seed, sampler.task_index, sampler.batch_size) == (3, 1, 8)
    sizes = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        sizes += [len(positions) * sampler.num_views for positions in sampler.steps()]
    taken = sizes[:max_steps]
    assert recipe.workload(sampler) == (len(taken), sum(taken))


def test_workload__of_the_paper_is_the_same_with_and_without_views() -> None:
    for num_views in (1, 4):
        recipe = recipe_of(num_views=num_views, batch_size=128, epochs=20)
        assert recipe.workload(recipe.sampler(5000, task_index=0)) == (20 * 40, 20 * 5000)
