"""Nearest class mean on frozen features: no training, and a bar that every trained learner should clear.

A class is the mean of its raw class-token features under the test transform; the score is the cosine between
feature and mean (the "SimpleCIL" baseline of Zhou et al., IJCV 2024, section 4.1). Domain-incremental: the mean
over the images of all domains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput, ParameterGroup
from vbm_ptm.learners.config import TRAINING_PASSES, Passes, TrainedTasks
from vbm_ptm.learners.prototypes import class_cosines, keep_class_sums


class NearestMeanConfig(LearnerConfig):
    """Nearest class mean has no settings of its own."""

    feature_passes: ClassVar[int] = 1
    usual_passes: ClassVar[Passes] = Passes(TRAINING_PASSES, 1, testing=0, querying=1)
    name: str = "nearest_mean"

    @property
    def trained_tasks(self) -> TrainedTasks:
        """No task is trained."""
        return "none"


class NearestMean(Learner):
    """Frozen backbone and one mean per class."""

    config_class = NearestMeanConfig
    trained_parts = "nothing"
    predicts_from_query = True
    backbone_class = Backbone

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return no group: nothing is trained, and a task takes zero steps."""
        return []

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return the scores (N, K) of the task's classes."""
        return LearnerOutput(self.predict(images)[:, self.task_columns], self.task_columns, {})

    def end_task(self, task: Task, features: Features) -> None:
        """Keep the sum of the features of each class of the task."""
        keep_class_sums(self, task, features)

    def statistics_size(self, class_sizes: Sequence[int]) -> int:
        """Return the numbers in a sum per class."""
        return len(class_sizes) * self.backbone.width

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return cosines (N, seen) between features and class means."""
        return class_cosines(self, self.query(images) if query is None else query)
