"""Accuracy on test images, per sample: over all seen classes without the task, and with the task given.

Task-incremental accuracy is made of the same scores, restricted to the classes of the task. Where each task has an
expert of its own (``Learner.has_task_experts``), its accuracy is counted as well; for a learner that rules out all
classes but those of a chosen expert (S-iPrompt), it is the task-incremental accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.contract import broken_scores
from vbm_ptm.engine.counting import count_of_task, probabilities
from vbm_ptm.engine.test_images import TestImages, has_expert, scores_of
from vbm_ptm.errors import TrainingError, some_names
from vbm_ptm.learners.base import Learner
from vbm_ptm.metrics import AccuracyCell


class Evaluation(NamedTuple):
    """What was measured after a task.

    Attributes:
        cells: Counts of each evaluated task.
        labels: (N,) class indices of the test images, task after task, each task's in the order of its rows.
        predictions: (N,) the class with the best score of all seen classes.
        scores: (N,) float32, that score.
        probabilities: (N,) float32, what a softmax over the scores of all seen classes makes of it.
    """

    cells: list[AccuracyCell]
    labels: NDArray[np.int64]
    predictions: NDArray[np.int64]
    scores: NDArray[np.float32]
    probabilities: NDArray[np.float32]


class Evaluator:
    """Counts correct predictions on the test images of tasks, each image exactly once over all ranks."""

    def __init__(self, accelerator: Accelerator, loaders: Loaders) -> None:
        self.accelerator = accelerator
        self.loaders = loaders
        self.images = TestImages(accelerator, loaders)

    @torch.inference_mode()
    def judge(self, learner: Learner, tasks: Sequence[Task]) -> Evaluation:
        """Measure a learner on the test images of tasks.

        Raises:
            TrainingError: Not every test image was counted exactly once.
            FloatingPointError: A score is not finite, other than -inf for a class that is ruled out.
        """
        benchmark = self.loaders.benchmark
        rows = [benchmark.test_rows(task) for task in tasks]
        nothing = torch.empty(0, learner.num_seen_classes), torch.empty(0, dtype=torch.long)
        cells = [
            count_of_task(
                learner,
                task,
                *nothing,
                torch.empty(0, len(task.classes)) if has_expert(learner, task) else None,
            )
            for task in tasks
        ]
        learner.eval()
        broken: list[int] = []
        predictions = [torch.zeros(len(task_rows), dtype=torch.int64) for task_rows in rows]
        confidences = [torch.zeros(len(task_rows), 2, dtype=torch.float32) for task_rows in rows]
        for batch in self.images.batches(learner, tasks, rows):
            task = tasks[batch.position]
            with self.accelerator.autocast():
                scores, own = scores_of(learner, task, batch)
            for each in (scores,) if own is None else (scores, own):
                broken += batch.rows[broken_scores(each)].tolist()
            cells[batch.position] += count_of_task(learner, task, scores, batch.labels, own)
            places = np.searchsorted(rows[batch.position], batch.rows.numpy())
            predictions[batch.position][places] = scores.argmax(1)
            confidences[batch.position][places] = torch.stack(
                [scores.amax(1), probabilities(scores).amax(1)], dim=1
            )
        self._refuse(sorted(set(broken)))
        cells = self._over_ranks(cells)
        counted, expected = [cell.total for cell in cells], [len(task_rows) for task_rows in rows]
        if counted != expected:
            raise TrainingError(
                f"{counted} test images of the tasks were counted over {self.accelerator.num_processes} ranks, but "
                f"the data set holds {expected}: these accuracies would be wrong."
            )
        labels = [benchmark.class_indices(benchmark.datasets.test)[task_rows] for task_rows in rows]
        confidence = self._from_ranks(torch.cat(confidences)).numpy()
        return Evaluation(
            cells,
            np.concatenate(labels),
            self._from_ranks(torch.cat(predictions)).numpy(),
            confidence[:, 0],
            confidence[:, 1],
        )

    def _from_ranks(self, values: Tensor) -> Tensor:
        """Combine the values of all ranks; each has zeros for the images of the others."""
        if self.accelerator.num_processes == 1:
            return values
        summed: Tensor = self.accelerator.reduce(values.to(self.accelerator.device), reduction="sum")
        return summed.cpu()

    def _refuse(self, broken: list[int]) -> None:
        """Raise on all ranks if an image of any of them has no finite score."""
        count = torch.tensor([len(broken)], device=self.accelerator.device)
        num_broken = int(self.accelerator.reduce(count, reduction="sum"))
        if num_broken:
            names = [self.loaders.benchmark.datasets.test.source_name(row) for row in broken]
            which = f": {some_names(names, limit=5)}" if names else " (on other ranks)"
            raise FloatingPointError(
                f"the scores of {num_broken} test images are NaN or infinite{which}. The weights have diverged, or "
                "Learner.predict divides by zero; finished tasks are saved."
            )

    def _over_ranks(self, cells: list[AccuracyCell]) -> list[AccuracyCell]:
        """Add the counts of all ranks."""
        if self.accelerator.num_processes == 1:
            return cells
        names = [name for name in AccuracyCell.__dataclass_fields__ if getattr(cells[0], name) is not None]
        table = torch.tensor([[getattr(cell, name) for name in names] for cell in cells])
        summed = self.accelerator.reduce(table.to(self.accelerator.device), reduction="sum").tolist()
        return [AccuracyCell(**dict(zip(names, row, strict=True))) for row in summed]
