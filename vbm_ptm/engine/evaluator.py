"""Accuracy on test images: per sample, over all seen classes, without telling the learner the task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator

from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import TrainingError
from vbm_ptm.learners.base import Learner
from vbm_ptm.metrics import AccuracyCell, count_correct


class Evaluator:
    """Counts correct predictions on the test images of tasks, each image exactly once over all ranks."""

    def __init__(self, accelerator: Accelerator, loaders: Loaders) -> None:
        self.accelerator = accelerator
        self.loaders = loaders

    @torch.no_grad()
    def evaluate(self, learner: Learner, tasks: Sequence[Task]) -> list[AccuracyCell]:
        """Return the counts for each task, in order.

        Raises:
            TrainingError: Not every test image was counted exactly once.
        """
        benchmark = self.loaders.benchmark
        test = benchmark.datasets.test
        rows = [benchmark.test_rows(task) for task in tasks]
        task_of_row = np.full(len(test), -1)
        for position, task_rows in enumerate(rows):
            task_of_row[task_rows] = position
        # In the domain-incremental scenario tasks share their classes: there is no task-incremental accuracy.
        own_classes = [task.classes if task.domain is None else None for task in tasks]
        cells = [
            count_correct(
                torch.empty(0, learner.num_seen_classes), torch.empty(0, dtype=torch.long), task_classes=own
            )
            for own in own_classes
        ]
        learner.eval()
        for images, labels, sample_ids in self.loaders.evaluation(test, np.concatenate(rows)):
            with self.accelerator.autocast():
                scores = learner.predict(images.to(self.accelerator.device, non_blocking=True)).float().cpu()
            task_of_image = torch.from_numpy(task_of_row[sample_ids.numpy()])
            for position in task_of_image.unique().tolist():
                mine = task_of_image == position
                cells[position] += count_correct(
                    scores[mine], labels[mine], task_classes=own_classes[position]
                )
        cells = self._over_ranks(cells)
        counted, expected = [cell.total for cell in cells], [len(task_rows) for task_rows in rows]
        if counted != expected:
            raise TrainingError(
                f"{counted} test images of the tasks were counted over {self.accelerator.num_processes} ranks, but "
                f"the data set holds {expected}: these accuracies would be wrong."
            )
        return cells

    def _over_ranks(self, cells: list[AccuracyCell]) -> list[AccuracyCell]:
        """Add the counts of all ranks."""
        if self.accelerator.num_processes == 1:
            return cells
        names = [name for name in AccuracyCell.__dataclass_fields__ if getattr(cells[0], name) is not None]
        table = torch.tensor([[getattr(cell, name) for name in names] for cell in cells])
        summed = self.accelerator.reduce(table.to(self.accelerator.device), reduction="sum").tolist()
        return [AccuracyCell(**dict(zip(names, row, strict=True))) for row in summed]
