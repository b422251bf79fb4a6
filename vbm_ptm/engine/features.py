"""Features of a task's training images for what a learner does at the end of the task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.scenario import Task
from vbm_ptm.data.view_batch import LoaderConfig, evaluation_loader
from vbm_ptm.learners.base import Learner


class TaskFeatures:
    """Computes ``learner.query`` over training images, spread over ranks; every rank gets all of them.

    Implements ``vbm_ptm.learners.base.Features``. Nothing is computed before the first call.
    """

    def __init__(
        self,
        learner: Learner,
        benchmark: Benchmark,
        task: Task,
        accelerator: Accelerator,
        loading: LoaderConfig,
        *,
        seed: int,
    ) -> None:
        self.learner = learner
        self.benchmark = benchmark
        self.task = task
        self.accelerator = accelerator
        self.loading = loading
        self.seed = seed

    @torch.no_grad()
    def __call__(
        self, rows: Sequence[int] | None = None, transform: Literal["eval", "weak"] = "eval"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return features (n, D) float32, class indices (n,) and sample ids (n,) on the CPU, in the order of rows.

        Raises:
            FloatingPointError: A feature is not finite.
        """
        wanted = self.benchmark.training_rows(self.task) if rows is None else np.asarray(rows, dtype=np.int64)
        train = self.benchmark.datasets.train
        loader = evaluation_loader(
            train,
            rows=wanted,
            class_indices=self.benchmark.class_indices(train),
            transforms=self.benchmark.transforms,
            transform=transform,
            seed=self.seed,
            task_index=self.task.index,
            config=self.loading,
            rank=self.accelerator.process_index,
            num_ranks=self.accelerator.num_processes,
            pin_memory=self.accelerator.device.type == "cuda",
        )
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for images, labels, sample_ids in loader:
            features = self.learner.query(images.to(self.accelerator.device, non_blocking=True))
            precision = torch.promote_types(features.dtype, torch.float32)
            parts.append((features.to("cpu", precision), labels, sample_ids))
        if self.accelerator.num_processes > 1:
            parts = gather_object(parts)  # in rank order, and a rank's rows are a contiguous part of all rows
        if not parts:
            empty = torch.empty(0, dtype=torch.long)
            return torch.empty(0, self.learner.backbone.width), empty, empty
        features, labels, sample_ids = (torch.cat(column) for column in zip(*parts, strict=True))
        if not bool(features.isfinite().all()):
            broken = sample_ids[~features.isfinite().all(dim=1)].tolist()
            raise FloatingPointError(
                f"after task {self.task.index} the features of {len(broken)} training images are not finite (rows "
                f"{', '.join(map(str, broken[:10]))}): the weights have diverged. Finished tasks are saved; lower "
                "optimization.learning_rate."
            )
        return features, labels, sample_ids
