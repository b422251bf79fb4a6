"""Finished runs that tests of this folder look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from vbm_ptm.experiment import run


@pytest.fixture(scope="session")
def two_runs(
    toy_folder: Path, tiny_weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """Finished runs of a linear probe with seeds 1 and 2, three tasks of six steps each; no test may change them."""
    root = tmp_path_factory.mktemp("two_runs")
    for seed in (1, 2):
        tree = {
            "seed": seed,
            "dataset": {"name": "toy", "path": str(toy_folder)},
            "scenario": {"num_tasks": 3},
            "backbone": {"name": "test_vit.r160_in1k", "checkpoint": str(tiny_weights), "image_size": 32},
            "learner": {"name": "linear_probe"},
            "view_batch": {"num_views": 2},
            "optimization": {"epochs": 2, "batch_size": 8},
            "trainer": {"mixed_precision": "no"},
            "preset": "none",
        }
        run(tree, output=root / str(seed), is_quiet=True)
    return root / "1", root / "2"
