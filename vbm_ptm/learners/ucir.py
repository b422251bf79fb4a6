"""UCIR: a classifier by cosines, features that keep their direction, and a margin between old and new classes.

Hou, Pan, Loy, Wang, Lin: "Learning a Unified Classifier Incrementally via Rebalancing", CVPR 2019 (repository
CVPR19_Incremental_Learning). Exemplars of earlier classes are training images of the task. Beside the cross-entropy of
scaled cosines, where rows of earlier classes are not trained, features are held to the direction that the network
before the task gave them, with the weight ``distillation_weight * sqrt(n_old / n_new)``, and the cosine of an
exemplar's class is to exceed the largest ones of new classes by a margin.

Before the first step of a task, the rows of its classes are set to the direction of their mean features.

Differs from the official code in:
  - The margin is averaged over all images of a step, those of new classes counting nothing; the code averages over
    exemplars alone.
  - The network keeps its last ReLU, as any backbone does, and has no fine-tuning on exemplars.
  - Herding takes the running mean nearest to the class's, in float64.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import GrowingCosineHead
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput
from vbm_ptm.learners.config import TaskSizes
from vbm_ptm.learners.teacher import Teacher
from vbm_ptm.replay import ExemplarSet, Rehearsal


class UCIRConfig(LearnerConfig):
    """Settings of UCIR; the defaults are the official ones.

    Attributes:
        capacity: Exemplars in total, divided equally among the classes; 0 for none.
        distillation_weight: Weight of the change of direction, before the factor by the numbers of classes.
        margin: By which cosines of an exemplar's class shall exceed those of new classes.
        num_rivals: New classes that an exemplar's class is compared with.
        margin_weight: Weight of the margin.
    """

    has_teacher: ClassVar[bool] = True
    name: str = "ucir"
    capacity: int = Field(default=2000, ge=0)
    distillation_weight: float = Field(default=5.0, ge=0)
    margin: float = Field(default=0.5, ge=0)
    num_rivals: int = Field(default=2, ge=1)
    margin_weight: float = Field(default=1.0, ge=0)

    def viewed_images(self, sizes: TaskSizes) -> int:
        """Return the images whose features give new rows, from the second task on, beside those for herding."""
        return super().viewed_images(sizes) + (sizes.task_index > 0) * sum(sizes.own)

    @property
    def rehearsal(self) -> Rehearsal:
        """Exemplars among the training images."""
        return Rehearsal("merged", self.capacity)


class UCIR(Learner):
    """Backbone and a cosine classifier, a teacher of features and exemplars."""

    config_class = UCIRConfig
    trained_parts = "backbone, cosine head"
    backbone_class = Backbone
    takes_domains = False

    def __init__(self, backbone: Backbone, config: UCIRConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.head = GrowingCosineHead(backbone.width)
        self.exemplars = ExemplarSet(config.capacity)
        self.teacher = Teacher()

    def begin_task(self, task: Task) -> None:
        """Keep the backbone as the teacher, and add columns."""
        super().begin_task(task)
        if task.index:
            self.teacher.hold(backbone=self.backbone)
        self.head.widen(task.num_seen_classes)

    def prepare_task(self, task: Task, features: Features) -> None:
        """Give the rows of new classes the direction of their mean features, and the mean norm of earlier rows."""
        if task.index:
            values, labels, _ = features()
            norm = self.head.known.norm(dim=1).mean()
            for column in labels.unique().tolist():
                mean = F.normalize(values[labels == column], dim=1).mean(0)
                row = norm * F.normalize(mean, dim=0).to(self.head.weight)
                self.head.weight.data[column - self.num_known_classes] = row

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, seen), and of each image the change of direction and the missing margin."""
        features = self.backbone.features(images)
        logits, auxiliary = self.head(features), {}
        if self.teacher:
            known, config = self.num_known_classes, self.config
            weight = config.distillation_weight * math.sqrt(known / (self.num_seen_classes - known))
            taught, exact = self.teacher(images), torch.promote_types(features.dtype, torch.float32)
            with torch.autocast(images.device.type, enabled=False):
                cosine = F.cosine_similarity(features.to(exact), taught.to(exact))
            auxiliary["direction"] = weight * (1 - cosine)
            auxiliary["margin"] = config.margin_weight * missing_margin(
                logits / self.head.scale,
                labels,
                num_known=known,
                margin=config.margin,
                num_rivals=config.num_rivals,
            )
        return LearnerOutput(logits, torch.arange(logits.shape[1], device=logits.device), auxiliary)

    def end_task(self, task: Task, features: Features) -> None:
        """Choose the task's exemplars."""
        self.teacher.clear()
        if self.config.capacity:
            self.exemplars.add(*features(), task=task.index)


def missing_margin(
    cosines: Tensor, labels: Tensor, *, num_known: int, margin: float, num_rivals: int
) -> Tensor:
    """Return how much of the margin an image (N,) of a known class lacks to its rivals, on average; 0 for the others.

    Args:
        cosines: (N, K).
        labels: (N,) columns.
        num_known: Columns of earlier classes, which come first.
        margin: What is asked.
        num_rivals: New classes with the largest cosines that count.
    """
    new = cosines[:, num_known:]
    rivals = new.topk(min(num_rivals, new.shape[1]), dim=1).values
    missing = (margin - cosines.gather(1, labels[:, None]) + rivals).clamp(min=0).mean(1)
    return missing * (labels < num_known)
