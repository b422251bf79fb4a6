"""Class prototypes: one sum of features per class and task, and cosines to them.

A sum over all tasks is the mean of a class but for its length, which the cosine does not see; in the domain-incremental
scenario a class so has one prototype over all domains.
Shapes: N images, D width of the features, K seen classes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Features, Learner, TaskStatistics


def keep_class_sums(learner: Learner, task: Task, features: Features) -> None:
    """Keep the sum of the features of each class of a task as the statistic ``sum`` (classes of the task, D)."""
    values, labels, _ = features()
    # Class by class: the features in double precision, or a table of classes and images, may not fit.
    sums = [values[labels == class_index].double().sum(dim=0) for class_index in task.classes]
    learner.statistics[str(task.index)] = TaskStatistics({"sum": torch.stack(sums).to(values.dtype)})


def class_cosines(learner: Learner, features: Tensor) -> Tensor:
    """Return cosines (N,K) of features (N,D) and what ``keep_class_sums`` has kept; 0 for classes without any."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    sums = features.new_zeros(learner.num_seen_classes, features.shape[1])
    for task in learner.tasks:
        if statistics := learner.statistics_of(task):
            sums[learner.columns(task.classes, sums.device)] += statistics["sum"].to(sums)
    # Cosines of neighbours differ by less than the digits that autocast would leave.
    with torch.autocast(features.device.type, enabled=False):
        return F.normalize(features, dim=1) @ F.normalize(sums, dim=1).T
