"""Which task takes over the images of which, and which classes are right.

Shapes: N images, K seen classes, T tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.evaluator import Evaluation


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


def task_confusion(
    predictions: NDArray[np.int64],
    *,
    tasks: NDArray[np.int64],
    num_tasks: int,
    task_of_class: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return (T,T) how many test images of a task (row) were given a class of each task (column).

    Args:
        predictions: (N,) class indices.
        tasks: (N,) task of each image.
        num_tasks: T.
        task_of_class: (K,) the task in which each class was new.
    """
    counts = np.zeros((num_tasks, num_tasks), dtype=np.int64)
    np.add.at(counts, (tasks, task_of_class[predictions]), 1)
    return counts


def class_counts(
    predictions: NDArray[np.int64], labels: NDArray[np.int64], *, num_classes: int
) -> NDArray[np.int64]:
    """Return (K,2) how many test images of each class are right, and how many there are.

    Args:
        predictions: (N,) class indices.
        labels: (N,) class indices.
        num_classes: K.
    """
    right, all_images = labels[predictions == labels], labels
    return np.stack([np.bincount(each, minlength=num_classes) for each in (right, all_images)], axis=1)
