"""LwF: learning without forgetting, and without any past image.

Li, Hoiem: "Learning without Forgetting", TPAMI 2017; as run by Buzzega et al. (2020), repository mammoth. The network
as it was before the task provides soft targets for each image of the task, which the new network has to reproduce in
the columns of earlier classes. The cross-entropy covers all classes so far.

Differs from the official code in:
  - The old network sees the same views, normalised like them; mammoth shows it un-normalised images.
  - The new columns are not trained separately before the task.
  - In the domain-incremental scenario the columns of all classes seen before the task are distilled.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import SharedHead
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput
from vbm_ptm.learners.teacher import Teacher


class LwFConfig(LearnerConfig):
    """Settings of LwF.

    Attributes:
        alpha: Weight of the distillation.
        temperature: Divides the logits of both networks.
    """

    has_teacher: ClassVar[bool] = True
    name: str = "lwf"
    alpha: float = Field(default=1.0, ge=0)
    temperature: float = Field(default=2.0, gt=0)


class LwF(Learner):
    """Backbone and one head, distilled from the network before the task."""

    config_class = LwFConfig
    trained_parts = "backbone, head"
    backbone_class = Backbone

    def __init__(self, backbone: Backbone, config: LwFConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.head = SharedHead(backbone.width)
        self.teacher = Teacher()

    def begin_task(self, task: Task) -> None:
        """Keep a copy of the network as the teacher, and add columns."""
        super().begin_task(task)
        if task.index:
            self.teacher.hold(backbone=self.backbone, head=self.head)
        self.head.widen(task.num_seen_classes)

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, seen) and the distillation of each image."""
        logits = self.head(self.backbone.features(images))
        auxiliary = {}
        if self.teacher:
            taught = self.teacher(images)
            losses = soft_cross_entropy(
                logits[:, : taught.shape[1]], taught, temperature=self.config.temperature
            )
            auxiliary["distillation"] = self.config.alpha * losses
        return LearnerOutput(logits, torch.arange(logits.shape[1], device=logits.device), auxiliary)

    def end_task(self, task: Task, features: Features) -> None:
        """Drop the teacher."""
        self.teacher.clear()


def soft_cross_entropy(logits: Tensor, taught: Tensor, *, temperature: float) -> Tensor:
    """Return -sum q log p of each image (N,), q and p the softmax of taught (N, K) and logits (N, K) by temperature."""
    log_probabilities = F.log_softmax(logits / temperature, dim=1)
    return -((taught / temperature).softmax(1) * log_probabilities).sum(1)
