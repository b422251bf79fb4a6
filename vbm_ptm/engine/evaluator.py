"""Accuracy on test images, per sample: over all seen classes without telling the learner the task, and told it.

Task-incremental accuracy is made of the same scores, restricted to the classes of the task. Where each task has an
expert of its own (S-iPrompt, DualPrompt, S-Prompt++), its accuracy is counted as well; for a learner that rules out all
classes but those of a chosen expert (S-iPrompt), it is the task-incremental accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.contract import broken_scores
from vbm_ptm.errors import TrainingError, some_names
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
            FloatingPointError: A score is not finite, other than -inf for a class that is ruled out.
        """
        benchmark = self.loaders.benchmark
        test = benchmark.datasets.test
        rows = [benchmark.test_rows(task) for task in tasks]
        task_of_row = np.full(len(test), -1)
        for position, task_rows in enumerate(rows):
            task_of_row[task_rows] = position
        nothing = torch.empty(0, learner.num_seen_classes), torch.empty(0, dtype=torch.long)
        cells = [
            _count(
                learner,
                task,
                *nothing,
                torch.empty(0, len(task.classes)) if _has_expert(learner, task) else None,
            )
            for task in tasks
        ]
        learner.eval()
        broken: list[int] = []
        for images, labels, sample_ids in self.loaders.evaluation(test, np.concatenate(rows)):
            images = images.to(self.accelerator.device, non_blocking=True)
            with self.accelerator.autocast():
                scores = learner.predict(images).float().cpu()
            broken += sample_ids[broken_scores(scores)].tolist()
            task_of_image = torch.from_numpy(task_of_row[sample_ids.numpy()])
            for position in task_of_image.unique().tolist():
                mine, task = task_of_image == position, tasks[position]
                own: Tensor | None = None
                if _has_expert(learner, task):
                    with self.accelerator.autocast():
                        own = learner.predict_task(images[mine.to(images.device)], task).float().cpu()
                    broken += sample_ids[mine][broken_scores(own)].tolist()
                cells[position] += _count(learner, task, scores[mine], labels[mine], own)
        self._refuse(sorted(set(broken)))
        cells = self._over_ranks(cells)
        counted, expected = [cell.total for cell in cells], [len(task_rows) for task_rows in rows]
        if counted != expected:
            raise TrainingError(
                f"{counted} test images of the tasks were counted over {self.accelerator.num_processes} ranks, but "
                f"the data set holds {expected}: these accuracies would be wrong."
            )
        return cells

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


def _has_expert(learner: Learner, task: Task) -> bool:
    """Return whether a task has an expert whose accuracy is worth counting.

    In the domain-incremental scenario tasks share their classes, so that there is no task-incremental accuracy; joint
    training evaluates tasks that it was not divided into.
    """
    return learner.has_task_experts and task.domain is None and task in learner.tasks


def _count(
    learner: Learner, task: Task, scores: Tensor, labels: Tensor, expert_scores: Tensor | None
) -> AccuracyCell:
    """Count what is correct among images of one task.

    Args:
        learner: Whose scores they are.
        task: The task of the images.
        scores: (N, seen).
        labels: (N,) class indices.
        expert_scores: (N, classes of the task) of the task's expert, if it has one.
    """
    classes = task.classes if task.domain is None else None
    if learner.rules_out_classes:
        return count_correct(scores, labels, task_classes=classes, own_scores=expert_scores)
    return count_correct(scores, labels, task_classes=classes, expert_scores=expert_scores)
