"""The test images of tasks in batches, with queries that are not computed twice, and the scores of a batch.

Shapes: N images, C colour channels, H x W pixels, D backbone width, K classes of a task.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.contract import check_scores
from vbm_ptm.engine.query_cache import QueriedImages
from vbm_ptm.learners.base import Learner


class TaskBatch(NamedTuple):
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


class TestImages:
    """Brings the test images of tasks to each rank: its own part of them.

    Args:
        accelerator: Devices, ranks and precision.
        loaders: Bring the images.
    """

    __test__ = False  # for pytest, which would collect classes of such names

    def __init__(self, accelerator: Accelerator, loaders: Loaders) -> None:
        self.loaders = loaders
        self.images = QueriedImages(accelerator, loaders)

    def batches(
        self, learner: Learner, tasks: Sequence[Task], rows: Sequence[NDArray[np.int64]]
    ) -> Iterator[TaskBatch]:
        """Yield the images of each task in turn.

        A batch holds images of one task, so that an image is measured among the same others after every task.

        Args:
            learner: In evaluation mode.
            tasks: The tasks.
            rows: (n,) row numbers of the test split for each of them.
        """
        test = self.loaders.benchmark.datasets.test
        labels_of_rows = torch.from_numpy(self.loaders.benchmark.class_indices(test))
        positions, parts = [], []
        for position, own in enumerate(rows):
            for part in self.loaders.parts_of_rank(own):
                positions.append(position)
                parts.append(part)
        needs_images = [has_expert(learner, tasks[position]) for position in positions]
        batches = self.images.batches(learner, test, parts, needs_images=needs_images)
        for position, (part, images, query) in zip(positions, batches, strict=True):
            yield TaskBatch(position, torch.tensor(part), images, query, labels_of_rows[part])


def has_expert(learner: Learner, task: Task) -> bool:
    """Return whether a task has an expert whose accuracy is worth counting.

    In the domain-incremental scenario tasks share their classes, so that there is no task-incremental accuracy; joint
    training evaluates tasks that it was not divided into.
    """
    return learner.has_task_experts and task.domain is None and task in learner.tasks


def scores_of(learner: Learner, task: Task, batch: TaskBatch) -> tuple[Tensor, Tensor | None]:
    """Return scores (N, seen) of images of a task, and those (N, K) of its expert if it has one, in float32 on the CPU.

    An image that ``predict`` has given to its own task's expert is not shown to that expert again, but under autocast:
    there a score depends in its rounding on the images beside it, and an expert must be measured on the same ones after
    every task.

    Raises:
        UsageError: The learner returns another shape.
    """
    images, query, num_images = batch.images, batch.query, len(batch.rows)
    is_expert_asked = has_expert(learner, task)
    is_rounded = torch.is_autocast_enabled(images.device.type)
    asks_once = is_expert_asked and not is_rounded and _tells_its_choice(type(learner))
    query = learner.query(images) if asks_once and query is None else query
    scores = learner.predict(images, query).float().cpu()
    check_scores(scores, num_images=num_images, num_classes=learner.num_seen_classes)
    if not is_expert_asked:
        return scores, None
    own, others = scores[:, list(task.classes)], torch.ones(num_images, dtype=torch.bool)
    chosen = learner.chosen_tasks(query) if asks_once and query is not None else None
    if chosen is not None:
        others = (chosen != task.index).cpu()
    if others.any():
        answers = learner.predict_task(images[others.to(images.device)], task).float().cpu()
        num_asked = int(others.sum())
        check_scores(answers, num_images=num_asked, num_classes=len(task.classes), method="predict_task")
        own[others] = answers
    return scores, own


def _tells_its_choice(kind: type[Learner]) -> bool:
    """Return whether ``chosen_tasks`` is meant for the class's ``predict``: defined beside it, or after it."""
    tells, predicts = (
        next(each for each in kind.__mro__ if name in vars(each)) for name in ("chosen_tasks", "predict")
    )
    return tells is not Learner and issubclass(tells, predicts)
