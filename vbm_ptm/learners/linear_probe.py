"""Linear probe: heads trained on frozen features, the simplest learner.

The cross-entropy sees the classes of the current task only, old heads are frozen. With ``scenario.kind: joint`` it is
the classic probe of a representation.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.base import Learner, LearnerConfig, LearnerOutput, ParameterGroup
from vbm_ptm.learners.config import Passes


class LinearProbeConfig(LearnerConfig):
    """The linear probe has no settings of its own."""

    usual_passes: ClassVar[Passes] = Passes(1, 1, testing=0, querying=1)
    name: str = "linear_probe"


class LinearProbe(Learner):
    """Frozen backbone, one linear head per task on the class token."""

    config_class = LinearProbeConfig
    trained_parts = "one head per task"
    predicts_from_query = True
    backbone_class = Backbone

    def __init__(self, backbone: Backbone, config: LinearProbeConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.heads = TaskHeads(backbone.width)

    def begin_task(self, task: Task) -> None:
        """Add a head for the new classes and freeze the heads that hold none of the task's classes."""
        super().begin_task(task)
        self.heads.append(len(task.new_classes))
        self.heads.train_only(task.classes)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the trainable heads."""
        return [ParameterGroup("heads", self.heads.trainable_parameters())]

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) over the task's classes."""
        return LearnerOutput(self.heads(self.query(images))[:, self.task_columns], self.task_columns, {})

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return logits (N, seen) of all heads."""
        scores: Tensor = self.heads(self.query(images) if query is None else query)
        return scores
