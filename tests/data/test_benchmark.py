"""Which rows belong to which task, and what their class indices are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.image_split import ImageDatasets, ImageSplit
from vbm_ptm.data.record import DataRecord
from vbm_ptm.data.task_division import ScenarioConfig, build_scenario
from vbm_ptm.data.transforms import TransformsConfig, build_transforms


def split_of(name: Any, labels: list[int], domains: list[str] | None = None) -> ImageSplit:
    """Return a split whose images nobody looks at."""
    return ImageSplit(
        rows=Dataset.from_dict({"image": [None] * len(labels)}),
        labels=np.array(labels),
        domains=None if domains is None else np.array(domains),
        name=name,
        source_names=pa.array([str(row) for row in range(len(labels))]),
    )


def benchmark_of(train: ImageSplit, test: ImageSplit, **scenario: Any) -> Benchmark:
    class_names = ("ant", "bee", "cat", "dog")
    return Benchmark(
        ImageDatasets(train, test, class_names, split_sha256="", record=DataRecord.model_construct()),
        build_scenario(
            ScenarioConfig(**scenario), class_names=class_names, labels=train.labels, domains=train.domains
        ),
        build_transforms(
            TransformsConfig(),
            image_size=32,
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            interpolation="bicubic",
            crop_fraction=1.0,
        ),
    )


def test_benchmark__cuts_both_splits_by_class() -> None:
    benchmark = benchmark_of(
        split_of("train", [0, 3, 1, 2, 0, 3]),
        split_of("test", [3, 0, 2]),
        num_tasks=2,
        class_order=("dog", "ant", "cat", "bee"),
    )
    first, second = benchmark.scenario.tasks
    assert benchmark.training_rows(first).tolist() == [0, 1, 4, 5]
    assert benchmark.training_rows(second).tolist() == [2, 3]
    assert benchmark.test_rows(first).tolist() == [0, 1]
    assert benchmark.test_rows(second).tolist() == [2]
    assert benchmark.class_indices(benchmark.datasets.train).tolist() == [1, 0, 3, 2, 1, 0]
    assert benchmark.class_indices(benchmark.datasets.test).tolist() == [0, 1, 2]


def test_benchmark__cuts_both_splits_by_domain() -> None:
    benchmark = benchmark_of(
        split_of("train", [0, 1, 2, 3, 1], ["photo", "photo", "sketch", "sketch", "sketch"]),
        split_of("test", [1, 1, 2], ["sketch", "photo", "sketch"]),
        kind="domain_incremental",
        class_order="natural",
    )
    photo, sketch = benchmark.scenario.tasks
    assert benchmark.training_rows(photo).tolist() == [0, 1]
    assert benchmark.training_rows(sketch).tolist() == [2, 3, 4]
    assert benchmark.test_rows(photo).tolist() == [1]
    assert benchmark.test_rows(sketch).tolist() == [0, 2]


@pytest.mark.parametrize("bounds", ["class_incremental", "domain_incremental"])
def test_benchmark__joint_training_sees_all_rows(bounds: str) -> None:
    settings: dict[str, Any] = {"num_tasks": 2} if bounds == "class_incremental" else {}
    benchmark = benchmark_of(
        split_of("train", [0, 1, 2, 3], ["a", "b", "a", "b"]),
        split_of("test", [3, 0], ["b", "a"]),
        kind="joint",
        bounds=bounds,
        **settings,
    )
    (task,) = benchmark.scenario.tasks
    assert benchmark.training_rows(task).tolist() == [0, 1, 2, 3]
    tested = [benchmark.test_rows(one).tolist() for one in benchmark.scenario.evaluation_tasks]
    assert sorted(row for rows in tested for row in rows) == [0, 1]
    assert [len(rows) for rows in tested] == [1, 1]


def test_benchmark__says_once_which_test_images_belong_to_no_task(caplog: pytest.LogCaptureFixture) -> None:
    benchmark = benchmark_of(
        split_of("train", [0, 1, 2, 3, 1], ["photo", "photo", "sketch", "sketch", "sketch"]),
        split_of("test", [1, 3, 2, 0], ["photo", "photo", "sketch", "clay"]),
        kind="domain_incremental",
        class_order="natural",
    )
    for task in benchmark.scenario.tasks * 2:
        benchmark.test_rows(task)
    assert [record.getMessage() for record in caplog.records] == [
        "domain 'clay': it has no training images; its 1 test images are left out",
        "domain 'photo': 1 of 2 test images show classes that had no training images so far; left out",
    ]
