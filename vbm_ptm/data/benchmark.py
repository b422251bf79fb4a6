"""A data set divided into tasks: what a run is trained and evaluated on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vbm_ptm.data.image_split import ImageDatasets, ImageSplit
from vbm_ptm.data.scenario import Scenario, Task
from vbm_ptm.data.view_transforms import ViewTransforms

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Benchmark:
    """Images, their tasks and the transforms they pass through.

    Attributes:
        datasets: Training and test images.
        scenario: The tasks.
        transforms: Those of training and of evaluation.
        first_task: Index of the first task that has images here; earlier tasks cannot be measured.
    """

    datasets: ImageDatasets
    scenario: Scenario
    transforms: ViewTransforms
    first_task: int = 0

    def __post_init__(self) -> None:
        """Say once which test images belong to no task."""
        task_of = {task.domain: task for task in self.scenario.evaluation_tasks}
        if self.datasets.test.domains is None or None in task_of:
            return
        for domain, count in zip(*np.unique(self.datasets.test.domains, return_counts=True), strict=True):
            if domain not in task_of:
                logger.warning(
                    "domain '%s': it has no training images; its %d test images are left out", domain, count
                )
            elif (num_kept := len(self.test_rows(task_of[domain]))) < count:
                logger.warning(
                    "domain '%s': %d of %d test images show classes that had no training images so far; left out",
                    *(domain, count - num_kept, count),
                )

    def training_rows(self, task: Task) -> NDArray[np.int64]:
        """Return the rows of the training split that belong to a task."""
        train = self.datasets.train
        return self.scenario.rows_of(task, train.labels, train.domains)

    def training_classes(self, task: Task) -> NDArray[np.int64]:
        """Return the class index of each row that ``training_rows`` returns."""
        return self.class_indices(self.datasets.train)[self.training_rows(task)]

    def test_rows(self, task: Task) -> NDArray[np.int64]:
        """Return the rows of the test split that belong to a task."""
        test = self.datasets.test
        return self.scenario.rows_of(task, test.labels, test.domains)

    def class_indices(self, split: ImageSplit) -> NDArray[np.int64]:
        """Return the class index of every row of a split."""
        return self.scenario.class_index_of_label[split.labels]
