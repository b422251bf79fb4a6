"""Sequential fine-tuning: the lower bound that continual learners are compared with.

The whole backbone and one linear head per task are trained with one learning rate; the cross-entropy sees the
classes of the current task only and old heads are frozen. This is stage 1 of SLCA (Zhang et al., ICCV 2023,
"SLCA: Slow Learner with Classifier Alignment") with a learning-rate scale of 1 and without alignment. In the
domain-incremental scenario the head is shared.
"""

from __future__ import annotations

from torch import Tensor

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.base import Learner, LearnerConfig, LearnerOutput, ParameterGroup


class FinetuneConfig(LearnerConfig):
    """Sequential fine-tuning has no settings of its own."""

    name: str = "finetune"


class Finetune(Learner):
    """Backbone and heads, trained task after task with no protection against forgetting."""

    config_class = FinetuneConfig
    trained_parts = "backbone, one head per task"
    predicts_from_query = True
    backbone_class = Backbone

    def __init__(self, backbone: Backbone, config: FinetuneConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.heads = TaskHeads(backbone.width)

    def begin_task(self, task: Task) -> None:
        """Add a head for the new classes and freeze the heads that hold none of the task's classes."""
        super().begin_task(task)
        self.heads.append(len(task.new_classes))
        self.heads.train_only(task.classes)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the backbone and the trainable heads."""
        return [
            ParameterGroup("backbone", list(self.backbone.parameters())),
            ParameterGroup("heads", self.heads.trainable_parameters()),
        ]

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) over the task's classes."""
        features = self.backbone.features(images)
        return LearnerOutput(self.heads(features)[:, self.task_columns], self.task_columns, {})

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return logits (N, seen) of all heads."""
        features = self.query(images) if query is None else query
        scores: Tensor = self.heads(features)
        return scores
