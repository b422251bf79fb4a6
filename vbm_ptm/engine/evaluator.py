"""Accuracy on test images, per sample: over all seen classes without telling the learner the task, and told it.

Task-incremental accuracy is made of the same scores, restricted to the classes of the task. Where each task has an
expert of its own (S-iPrompt, DualPrompt, S-Prompt++), its accuracy is counted as well; for a learner that rules out all
classes but those of a chosen expert (S-iPrompt), it is the task-incremental accuracy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.contract import broken_scores, check_scores
from vbm_ptm.engine.query_cache import QueryCache
from vbm_ptm.errors import TrainingError, some_names
from vbm_ptm.learners.base import Learner
from vbm_ptm.metrics import AccuracyCell, class_counts, count_correct, task_confusion


class _Batch(NamedTuple):
    """Test images of one task.

    Attributes:
        position: Of the task, among those that are measured.
        rows: (N,) row numbers in the split.
        images: (N,C,H,W), or empty where the prediction is a function of queries that are known.
        query: (N,D) if the learner's queries never change.
        labels: (N,) class indices.
    """

    position: int
    rows: Tensor
    images: Tensor
    query: Tensor | None
    labels: Tensor


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
        self._queries = QueryCache(len(loaders.benchmark.datasets.test))

    def evaluate(self, learner: Learner, tasks: Sequence[Task]) -> list[AccuracyCell]:
        """Return the counts for each task, in order, as ``judge`` does."""
        return self.judge(learner, tasks).cells

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
        predictions = [torch.zeros(len(task_rows), dtype=torch.int64) for task_rows in rows]
        confidences = [torch.zeros(len(task_rows), 2, dtype=torch.float32) for task_rows in rows]
        for batch in self._batches(learner, tasks, rows):
            task = tasks[batch.position]
            own: Tensor | None = None
            with self.accelerator.autocast():
                scores = learner.predict(batch.images, batch.query).float().cpu()
                if _has_expert(learner, task):
                    own = learner.predict_task(batch.images, task).float().cpu()
            check_scores(scores, num_images=len(batch.rows), num_classes=learner.num_seen_classes)
            for each in (scores,) if own is None else (scores, own):
                broken += batch.rows[broken_scores(each)].tolist()
            cells[batch.position] += _count(learner, task, scores, batch.labels, own)
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
        """Put the values of all ranks together; each has zeros where another one has looked."""
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

    def _batches(
        self, learner: Learner, tasks: Sequence[Task], rows: Sequence[NDArray[np.int64]]
    ) -> Iterator[_Batch]:
        """Yield the images of each task in turn.

        A batch holds images of one task, so that an image is measured among the same others after every task.
        """
        test, device = self.loaders.benchmark.datasets.test, self.accelerator.device
        to_input = self.loaders.benchmark.transforms.to_input
        labels_of_rows = torch.from_numpy(self.loaders.benchmark.class_indices(test))
        if learner.query_is_fixed:
            self._queries.begin(learner)
        parts = [
            (position, part) for position, own in enumerate(rows) for part in self.loaders.parts_of_rank(own)
        ]
        is_loaded = [
            _has_expert(learner, tasks[position])
            or not (learner.query_is_fixed and learner.predicts_from_query and self._queries.knows(part))
            for position, part in parts
        ]
        wanted = [part for (_, part), is_needed in zip(parts, is_loaded, strict=True) if is_needed]
        loaded = iter(self.loaders.evaluation(test, wanted))
        for (position, part), is_needed in zip(parts, is_loaded, strict=True):
            images = to_input(next(loaded).images, device) if is_needed else torch.empty(0)
            query: Tensor | None = None
            if learner.query_is_fixed:
                if not self._queries.knows(part):
                    with self.accelerator.autocast():
                        self._queries.put(part, learner.query(images))
                query = self._queries.get(part, device)
            yield _Batch(position, torch.tensor(part), images, query, labels_of_rows[part])

    def _over_ranks(self, cells: list[AccuracyCell]) -> list[AccuracyCell]:
        """Add the counts of all ranks."""
        if self.accelerator.num_processes == 1:
            return cells
        names = [name for name in AccuracyCell.__dataclass_fields__ if getattr(cells[0], name) is not None]
        table = torch.tensor([[getattr(cell, name) for name in names] for cell in cells])
        summed = self.accelerator.reduce(table.to(self.accelerator.device), reduction="sum").tolist()
        return [AccuracyCell(**dict(zip(names, row, strict=True))) for row in summed]


def probabilities(scores: Tensor) -> Tensor:
    """Return (N,K) what a softmax makes of scores (N,K): 0 for classes that are ruled out, also where all of them are.

    They are calibrated for no learner; where scores are similarities or distances they only keep their order.
    """
    return scores.double().softmax(1).nan_to_num(0.0).float()


def confusion_facts(judged: Evaluation, *, seen: Sequence[Task], first_task: int) -> dict[str, Any]:
    """Return what a task's record keeps of the predictions, beside the counts.

    Args:
        judged: What was measured after the task.
        seen: All tasks seen so far.
        first_task: Position of the first one that was measured.
    """
    num_classes = max(task.num_seen_classes for task in seen)
    counts = class_counts(judged.predictions, judged.labels, num_classes=num_classes)
    facts: dict[str, Any] = {"class_counts": [(int(right), int(total)) for right, total in counts]}
    if any(task.domain is not None for task in seen):
        return facts
    task_of_class = np.zeros(num_classes, dtype=np.int64)
    for position, task in enumerate(seen):
        task_of_class[list(task.new_classes)] = position
    sizes = [cell.total for cell in judged.cells]
    tasks = np.repeat(np.arange(first_task, len(seen)), sizes)
    confusion = task_confusion(
        judged.predictions, tasks=tasks, num_tasks=len(seen), task_of_class=task_of_class
    )
    facts["task_confusion"] = [*[None] * first_task, *confusion[first_task:].tolist()]
    return facts


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
