"""Finished runs that tests of this folder look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vbm_ptm.experiment import run


@pytest.fixture(scope="session")
def train(toy_folder: Path, tiny_weights: Path) -> Callable[..., Path]:
    """Return a function that makes a run of three tasks of six steps each and returns its folder."""

    def make(folder: Path, learner: str, **changes: Any) -> Path:
        tree = {
            "dataset": {"name": "toy", "path": str(toy_folder)},
            "scenario": {"num_tasks": 3},
            "backbone": {"name": "test_vit.r160_in1k", "checkpoint": str(tiny_weights), "image_size": 32},
            "learner": {"name": learner},
            "view_batch": {"num_views": 2},
            "optimization": {"epochs": 2, "batch_size": 8},
            "trainer": {"mixed_precision": "no"},
            "preset": "none",
        }
        run(tree | changes, output=folder, is_quiet=True)
        return folder

    return make


@pytest.fixture(scope="session")
def two_runs(train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Finished runs of a linear probe with seeds 1 and 2; no test may change them."""
    root = tmp_path_factory.mktemp("two_runs")
    one, two = (train(root / str(seed), "linear_probe", seed=seed) for seed in (1, 2))
    return one, two


@pytest.fixture(scope="session")
def mean_run(train: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of nearest_mean; no test may change it."""
    return train(tmp_path_factory.mktemp("mean") / "run", "nearest_mean")
