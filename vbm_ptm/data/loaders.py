"""Loaders: each rank's part of every training step, and of all rows that are measured.

Shapes: G groups, V views, N images, C colour channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from vbm_ptm.data.loader_config import LoaderConfig
from vbm_ptm.data.single_views import EvaluationBatch, SingleViewDataset
from vbm_ptm.data.train_loader import RankParts, TrainLoader
from vbm_ptm.data.view_batch import ViewBatchSampler, chunk
from vbm_ptm.data.views import MultiViewDataset
from vbm_ptm.data.workers import ImageLoader

if TYPE_CHECKING:
    from vbm_ptm.data.benchmark import Benchmark
    from vbm_ptm.data.image_split import ImageSplit
    from vbm_ptm.data.scenario import Task

Integers = npt.NDArray[np.int64]


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Loaders:
    """Loads the images of a benchmark, for each rank its own part.

    Attributes:
        benchmark: Images, tasks and transforms.
        config: Workers and the batch size of evaluation.
        seed: Training seed, for random views.
        rank: This process.
        num_ranks: Processes that share the images.
        pin_memory: Put batches into page-locked memory.
        on_wait: Called every few seconds while this rank waits for workers; may raise.
    """

    benchmark: Benchmark
    config: LoaderConfig
    seed: int = 0
    rank: int = 0
    num_ranks: int = 1
    pin_memory: bool = False
    on_wait: Callable[[], None] = _nothing

    def training(
        self,
        task: Task,
        sampler: ViewBatchSampler,
        *,
        rows: Integers | None = None,
        strong_share: float = 0.0,
    ) -> TrainLoader:
        """Return a loader of this rank's part of every step of a task, for all its epochs.

        Args:
            task: What to train on.
            sampler: Decides what each step holds; its positions index the rows.
            rows: Training rows; None for those of the task only.
            strong_share: Fraction of the images that are strong, with one view.
        """
        train = self.benchmark.datasets.train
        dataset = MultiViewDataset(
            train,
            rows=self.benchmark.training_rows(task) if rows is None else rows,
            class_indices=self.benchmark.class_indices(train),
            transforms=self.benchmark.transforms,
            num_views=sampler.num_views,
            seed=self.seed,
            task_index=task.index,
            strong_share=strong_share,
            num_own=sampler.num_own,
            num_exemplar_views=sampler.num_exemplar_views,
        )
        if sampler.num_samples != len(dataset):
            raise ValueError(
                f"the sampler has {sampler.num_samples} samples, but task {task.index} has {len(dataset)}"
            )
        parts = RankParts(sampler, rank=self.rank, num_ranks=self.num_ranks)
        return TrainLoader(parts, self._over(dataset, parts, persistent=True))

    def parts_of_rank(self, rows: Integers) -> list[list[int]]:
        """Return the rows of this rank's batches: each row on exactly one rank, none padded.

        The shares of the ranks, concatenated, are ``rows`` in order; a share may be empty.
        """
        first, last = chunk(len(rows), self.rank, self.num_ranks)
        own = np.asarray(rows)[first:last].tolist()
        size = self.config.evaluation_batch_size
        return [own[start : start + size] for start in range(0, len(own), size)]

    def evaluation(
        self,
        split: ImageSplit,
        parts: Sequence[Sequence[int]],
        *,
        transform: Literal["eval", "flip", "weak"] = "eval",
        task_index: int = 0,
        draw: int = 0,
    ) -> Iterable[EvaluationBatch]:
        """Return a loader with one batch for each part.

        Args:
            split: Training or test split of the benchmark.
            parts: Row numbers of each batch, e.g. from ``parts_of_rank``.
            transform: Which view.
            task_index: Index of the task, for the weak view.
            draw: Which of the weak view's draws.
        """
        dataset = SingleViewDataset(
            split,
            class_indices=self.benchmark.class_indices(split),
            transforms=self.benchmark.transforms,
            transform=transform,
            seed=self.seed,
            task_index=task_index,
            draw=draw,
        )
        return self._over(dataset, parts, persistent=False)

    def _over(self, dataset: Dataset[Any], parts: Any, *, persistent: bool) -> ImageLoader:
        return ImageLoader(
            dataset,
            parts,
            num_workers=min(self.config.num_workers or 0, len(parts)),
            context=self.config.multiprocessing_context,
            is_persistent=persistent,
            pin_memory=self.pin_memory,
            limit_seconds=60 * self.config.worker_timeout_minutes,
            on_wait=self.on_wait,
        )
