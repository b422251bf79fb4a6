"""LwF-MC: learning without forgetting with iCaRL's sigmoids, and without any past image.

The baseline of Rebuffi, Kolesnikov, Sperl, Lampert: "iCaRL: Incremental Classifier and Representation Learning", CVPR
2017: ``icarl`` without exemplars, predicting by its linear classifier. An image's target is one-hot in the columns of
the task's classes and the sigmoid of the old network in those of the others.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import SharedHead
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput
from vbm_ptm.learners.icarl import distilled_cross_entropy
from vbm_ptm.learners.teacher import Teacher


class LwFMCConfig(LearnerConfig):
    """Settings of LwF-MC.

    Attributes:
        all_columns: Average an image's loss over the columns of all classes of the run, as mammoth does; without it
            over those seen so far.
    """

    has_teacher: ClassVar[bool] = True
    name: str = "lwf_mc"
    all_columns: bool = False


class LwFMC(Learner):
    """Backbone and one sigmoid per class, and a teacher."""

    config_class = LwFMCConfig
    trained_parts = "backbone, head"
    backbone_class = Backbone
    is_hard: Tensor

    def __init__(self, backbone: Backbone, config: LwFMCConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.head = SharedHead(backbone.width)
        self.teacher = Teacher()
        self.register_buffer("is_hard", torch.zeros(0), persistent=False)

    def begin_task(self, task: Task) -> None:
        """Keep a copy of the network as the teacher, and add columns."""
        super().begin_task(task)
        if task.index:
            self.teacher.hold(backbone=self.backbone, head=self.head)
        planned = task.num_planned_classes if self.config.all_columns else 0
        self.head.widen(max(planned, task.num_seen_classes))
        is_old = torch.arange(self.head.out_features) < self.num_known_classes
        is_old[list(task.classes)] = False
        self.is_hard = (~is_old).to(self.is_hard)

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, seen) and the binary cross-entropy of each image."""
        logits = self.head(self.backbone.features(images))
        soft = self.teacher(images) if self.teacher else None
        columns = torch.arange(self.num_seen_classes, device=logits.device)
        return LearnerOutput(
            logits[:, : self.num_seen_classes],
            columns,
            {},
            supervised=distilled_cross_entropy(logits, labels, soft=soft, is_hard=self.is_hard),
        )

    def end_task(self, task: Task, features: Features) -> None:
        """Drop the teacher."""
        self.teacher.clear()
