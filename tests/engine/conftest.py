"""The tiny benchmark, learners and runs of tests/small_runs.py, for the tests of this folder."""

from __future__ import annotations

from small_runs import (
    _quick_garbage_collection,
    benchmark_of_three,
    new_benchmark,
    new_learner,
    new_run,
    tiny_backbones,
    transforms,
)

__all__ = [
    "_quick_garbage_collection",
    "benchmark_of_three",
    "new_benchmark",
    "new_learner",
    "new_run",
    "tiny_backbones",
    "transforms",
]
