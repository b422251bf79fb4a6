"""Loaders of digits whose tasks have the rows that a test gives, and what they bring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.image_split import ImageDatasets, ImageSplit
from vbm_ptm.data.loader_config import LoaderConfig
from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Scenario, Task
from vbm_ptm.data.train_loader import TrainLoader
from vbm_ptm.data.view_batch import ViewBatchSampler
from vbm_ptm.data.view_transforms import ViewTransforms
from vbm_ptm.data.views import MultiViewDataset, ViewBatch

ROWS = np.array([40, 3, 17, 88, 61, 5, 23, 99, 70, 12, 31])
IN_PROCESS, TWO_WORKERS = LoaderConfig(), LoaderConfig(num_workers=2)


@dataclass(frozen=True)
class GivenRows(Benchmark):
    """A benchmark whose tasks all have the rows that are given, in their order."""

    rows: Any = ()

    def training_rows(self, task: Task) -> Any:
        return self.rows


def benchmark_of(split: ImageSplit, transforms: ViewTransforms, *, rows: Any = ()) -> Benchmark:
    names = tuple("9876543210")
    scenario = Scenario("class_incremental", names, (), (), np.arange(10)[::-1])
    return GivenRows(ImageDatasets(split, split, names[::-1], "", {}), scenario, transforms, rows=rows)


def loader_of(
    dataset: MultiViewDataset,
    *,
    batch_size: int = 8,
    num_views: int = 4,
    config: LoaderConfig = IN_PROCESS,
    rank: int = 0,
    num_ranks: int = 1,
    pin_memory: bool = False,
) -> TrainLoader:
    sampler = ViewBatchSampler(len(dataset), batch_size, num_views, dataset.seed, dataset.task_index)
    loaders = Loaders(
        benchmark_of(dataset.split, dataset.transforms, rows=dataset.rows),
        config,
        seed=dataset.seed,
        rank=rank,
        num_ranks=num_ranks,
        pin_memory=pin_memory,
    )
    return loaders.training(Task(dataset.task_index, (), (), 0), sampler)


def epochs_of(loader: TrainLoader, num_epochs: int) -> list[list[ViewBatch]]:
    batches = []
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        batches.append(list(loader))
    return batches


def are_equal(one: Iterable[ViewBatch], two: Iterable[ViewBatch]) -> bool:
    return all(
        torch.equal(a.images, b.images)
        and torch.equal(a.labels, b.labels)
        and torch.equal(a.sample_ids, b.sample_ids)
        and a.num_global_groups == b.num_global_groups
        for a, b in zip(one, two, strict=True)
    )


def steps_of(sampler: ViewBatchSampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return sampler.steps()
