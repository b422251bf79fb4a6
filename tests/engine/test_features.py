"""Features of training images: which rows, in which order, through which transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.loader_config import LoaderConfig
from vbm_ptm.engine.acceleration import build_accelerator, loaders_for
from vbm_ptm.engine.features import TaskFeatures
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seed_for, seeded


@pytest.fixture(name="benchmark_shuffled", scope="module")
def classes_in_another_order(new_benchmark: Callable[..., Benchmark]) -> Benchmark:
    return new_benchmark([4, 3, 5, 2], num_tasks=2, class_order="seed", class_order_seed=2)


@pytest.fixture(name="learner")
def begun_learner(new_learner: Callable[..., Learner], benchmark_shuffled: Benchmark) -> Learner:
    learner = new_learner("nearest_mean", num_tasks=2)
    for task in benchmark_shuffled.scenario.tasks:
        learner.begin_task(task)
    return learner


def features_of(learner: Learner, benchmark: Benchmark, **options: Any) -> TaskFeatures:
    accelerator = build_accelerator(device="cpu", **options)
    loaders = loaders_for(accelerator, benchmark, LoaderConfig(evaluation_batch_size=3), seed=5)
    return TaskFeatures(learner, benchmark.scenario.tasks[1], accelerator=accelerator, loaders=loaders)


def test_features__are_those_of_the_task_in_the_order_of_rows(
    learner: Learner, benchmark_shuffled: Benchmark
) -> None:
    benchmark = benchmark_shuffled
    task = benchmark.scenario.tasks[1]
    names = [f"class {label}" for label in benchmark.datasets.train.labels]
    expected = [
        row for row, name in enumerate(names) if benchmark.scenario.class_names.index(name) in task.classes
    ]
    values, labels, sample_ids = features_of(learner, benchmark)()
    assert sample_ids.tolist() == expected
    assert labels.tolist() == [benchmark.scenario.class_names.index(names[row]) for row in expected]
    views = [benchmark.transforms.evaluate(benchmark.datasets.train.image(row)) for row in expected]
    images = benchmark.transforms.normalization(torch.stack(views))
    torch.testing.assert_close(values, learner.query(images), atol=1e-6, rtol=0)
    assert values.dtype == torch.float32
    assert values.device.type == "cpu"


def test_labels__are_known_without_an_image(learner: Learner, benchmark_shuffled: Benchmark) -> None:
    features = features_of(learner, benchmark_shuffled)
    _, labels, rows = features()
    learner.query = None  # type: ignore[assignment,method-assign]  # no image is looked at
    own, its_rows = features.labels()
    assert (own.tolist(), its_rows.tolist()) == (labels.tolist(), rows.tolist())


@pytest.mark.parametrize("rows", [[3, 0, 11, 7, 1], [5], [9, 2, 4]])
def test_features__come_as_the_rows_are_asked_for(
    learner: Learner, benchmark_shuffled: Benchmark, rows: list[int]
) -> None:
    features = features_of(learner, benchmark_shuffled)
    values, labels, sample_ids = features(rows)
    assert sample_ids.tolist() == rows
    assert values.shape == (len(rows), 48)
    assert labels.dtype == torch.int64
    everything, _, _ = features(range(len(benchmark_shuffled.datasets.train)))
    torch.testing.assert_close(values, everything[rows], atol=1e-5, rtol=0)


def test_features__weak_transform_is_one_fixed_draw_per_row(
    learner: Learner, benchmark_shuffled: Benchmark
) -> None:
    features = features_of(learner, benchmark_shuffled)
    values, _, sample_ids = features(transform="weak")
    again, _, _ = features(sample_ids.flip(0).tolist(), "weak")
    torch.testing.assert_close(again.flip(0), values, atol=1e-5, rtol=0)
    plain, _, _ = features()
    assert not torch.allclose(plain, values, atol=1e-3)
    row = int(sample_ids[0])
    with seeded(seed_for("features", seed=5, task=1, sample=row)):
        view = benchmark_shuffled.transforms.weak(benchmark_shuffled.datasets.train.image(row))
    image = benchmark_shuffled.transforms.normalization(view)
    torch.testing.assert_close(learner.query(image[None])[0], values[0], atol=1e-5, rtol=0)


def test_features__are_computed_when_asked_for(
    learner: Learner, benchmark_shuffled: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    query = learner.query

    def counted(images: torch.Tensor) -> torch.Tensor:
        sizes.append(len(images))
        return query(images)

    monkeypatch.setattr(learner, "query", counted)
    features = features_of(learner, benchmark_shuffled)
    assert sizes == []
    features(np.arange(7).tolist())
    assert sizes == [3, 3, 1]


def test_features__are_computed_in_the_precision_of_the_run_and_returned_in_float32(
    learner: Learner, benchmark_shuffled: Benchmark
) -> None:
    plain, _, _ = features_of(learner, benchmark_shuffled)()
    mixed, _, _ = features_of(learner, benchmark_shuffled, mixed_precision="bf16")()
    assert mixed.dtype == torch.float32
    assert 1e-4 < float((mixed - plain).norm() / plain.norm()) < 1e-2
    assert not mixed.is_inference()  # a learner may train on them
    learner.double()
    monkey = learner.query
    learner.query = lambda images: monkey(images.double())  # a learner may compute in float64
    double, _, _ = features_of(learner, benchmark_shuffled)()
    assert double.dtype == torch.float64


def test_features__that_are_not_finite_stop_the_run(learner: Learner, benchmark_shuffled: Benchmark) -> None:
    with torch.no_grad():
        learner.backbone.vit.norm.bias[0] = torch.nan
    num_images = len(benchmark_shuffled.training_rows(benchmark_shuffled.scenario.tasks[1]))
    with pytest.raises(FloatingPointError, match=f"task 2 the features of {num_images} training images"):
        features_of(learner, benchmark_shuffled)()


def test_features__of_no_rows_are_empty(learner: Learner, benchmark_shuffled: Benchmark) -> None:
    values, labels, sample_ids = features_of(learner, benchmark_shuffled)([])
    assert values.shape == (0, learner.backbone.width)
    assert len(labels) == len(sample_ids) == 0


@pytest.mark.parametrize("transform", ["eval", "weak"])
def test_sum__is_that_over_all_images_of_the_task_in_float64(
    learner: Learner, benchmark_shuffled: Benchmark, transform: Any
) -> None:
    sizes: list[int] = []

    def function(images: torch.Tensor) -> dict[str, torch.Tensor]:
        assert not torch.is_grad_enabled()
        sizes.append(len(images))
        return {"pixels": images.sum(dim=0), "images": torch.tensor(len(images))}

    features = features_of(learner, benchmark_shuffled)
    sums = features.sum(function, transform)
    benchmark, rows = benchmark_shuffled, benchmark_shuffled.training_rows(features.task)
    assert sizes == [3] * (len(rows) // 3) + [len(rows) % 3] * (len(rows) % 3 > 0)
    images = []
    for row in rows.tolist():
        with seeded(seed_for("features", seed=5, task=1, sample=row)):
            apply = benchmark.transforms.weak if transform == "weak" else benchmark.transforms.evaluate
            images.append(apply(benchmark.datasets.train.image(row)))
    assert sums["pixels"].dtype == torch.float64
    assert int(sums["images"]) == len(rows)
    expected = benchmark.transforms.to_input(torch.stack(images), torch.device("cpu")).double().sum(dim=0)
    torch.testing.assert_close(sums["pixels"], expected, atol=1e-5, rtol=1e-6)


def test_sum__that_is_not_finite_stops_the_run(learner: Learner, benchmark_shuffled: Benchmark) -> None:
    features = features_of(learner, benchmark_shuffled)
    with pytest.raises(FloatingPointError, match=r"task 2 sums .* \(broken\)"):
        features.sum(lambda images: {"fine": images.sum(), "broken": images.sum() * torch.inf})
