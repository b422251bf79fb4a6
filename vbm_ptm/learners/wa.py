"""WA: weight aligning, which gives new and old classes rows of the same mean length.

Zhao, Xiao, Gan, Zhang, Xia: "Maintaining Discrimination and Fairness in Class Incremental Learning", CVPR 2020; as run
by Yan et al. (2021), repository DER-ClassIL.pytorch. Exemplars of earlier classes are training images of the task, and
the network before the task answers each image: with n_old of n classes seen before, lambda = n_old / n, the loss is
(1 - lambda) * cross-entropy + lambda * KL(old || new) by temperature. Rows of the classifier are kept from being
negative after every step, so that their length tells their strength; after the task those of the new classes are
scaled by the mean length of the old ones over their own.

Differs from the official code in:
  - The scaled rows are those that the next task starts from, as in the paper; the code draws all rows, old ones too,
    again at epoch 10.
  - Herding takes the running mean nearest to the class's, in float64.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput
from vbm_ptm.learners.plain_head import PlainHead
from vbm_ptm.learners.teacher import Teacher, softened_divergence
from vbm_ptm.replay import ExemplarSet, Rehearsal


class WAConfig(LearnerConfig):
    """Settings of weight aligning.

    Attributes:
        capacity: Exemplars in total, divided equally among the classes; 0 for none.
        temperature: Temperature that divides the logits of both networks in the distillation.
    """

    has_teacher: ClassVar[bool] = True
    name: str = "wa"
    capacity: int = Field(default=2000, ge=0)
    temperature: float = Field(default=2.0, gt=0)

    @property
    def rehearsal(self) -> Rehearsal:
        """Exemplars among the training images."""
        return Rehearsal("merged", self.capacity)


class WA(Learner):
    """Backbone and one head without bias, a teacher and exemplars."""

    config_class = WAConfig
    trained_parts = "backbone, head"
    backbone_class = Backbone
    takes_domains = False

    def __init__(self, backbone: Backbone, config: WAConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.head = PlainHead(backbone.width, 0)
        self.exemplars = ExemplarSet(config.capacity)
        self.teacher = Teacher()

    def begin_task(self, task: Task) -> None:
        """Keep a copy of the network as the teacher, and add columns."""
        super().begin_task(task)
        if task.index:
            self.teacher.hold(backbone=self.backbone, head=self.head)
        self.head.widen(task.num_seen_classes)

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, seen), and of each image the weighted cross-entropy and distillation."""
        logits = self.head(self.backbone.features(images))
        share, auxiliary = self.num_known_classes / self.num_seen_classes, {}
        if self.teacher:
            taught = self.teacher(images)
            divergence = softened_divergence(
                logits[:, : taught.shape[1]], taught, temperature=self.config.temperature
            )
            auxiliary["distillation"] = share * divergence
        losses = (1 - share) * F.cross_entropy(logits, labels, reduction="none")
        return LearnerOutput(
            logits, torch.arange(logits.shape[1], device=logits.device), auxiliary, supervised=losses
        )

    @torch.no_grad()
    def after_step(self) -> None:
        """Keep the rows of the classifier from being negative."""
        self.head.weight.clamp_(min=0)

    def end_task(self, task: Task, features: Features) -> None:
        """Align the new rows of the classifier, and choose the task's exemplars."""
        self.teacher.clear()
        self.head.align(self.num_known_classes)
        if self.config.capacity:
            self.exemplars.add(*features(), task=task.index)
