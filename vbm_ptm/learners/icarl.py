"""iCaRL: exemplars chosen by herding, distillation by sigmoids, and the nearest mean of exemplars.

Rebuffi, Kolesnikov, Sperl, Lampert: "iCaRL: Incremental Classifier and Representation Learning", CVPR 2017; as run by
Buzzega et al. (2020), repository mammoth. Exemplars of earlier classes are training images of each task like its own.
An image's target is one-hot in the columns of the task's classes and the sigmoid of the old network in those of the
others, for exemplars too: they get no label of their own.

Differs from the official code in:
  - Herding is done in float64, ties within 1e-9 go to the lowest row, and all images of the task take part.
  - Class means are means over all exemplars, whatever the batch size.
  - In the domain-incremental scenario, which the paper does not treat, a class has exemplars of every domain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import SharedHead
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput
from vbm_ptm.learners.config import TaskSizes
from vbm_ptm.learners.teacher import Teacher
from vbm_ptm.replay import ExemplarSet, Rehearsal, kept_sizes


class ICaRLConfig(LearnerConfig):
    """Settings of iCaRL.

    Attributes:
        capacity: Exemplars in total, divided equally among the classes; 0 for none.
        classifier: What predicts: the "nearest_mean" of exemplars, or the "linear" head (with a capacity of 0 this is
            LwF-MC).
        all_columns: Average an image's loss over the columns of all classes of the run, as mammoth does; without it
            over those seen so far.
        mirrored_means: Let every exemplar count together with its mirror image; wrong for digits.
        normalize: Compare unit vectors, in herding too; mammoth does, the view-batch model's code does not.
    """

    has_teacher: ClassVar[bool] = True
    name: str = "icarl"
    capacity: int = Field(default=200, ge=0)
    classifier: Literal["nearest_mean", "linear"] = "nearest_mean"
    all_columns: bool = False
    mirrored_means: bool = True
    normalize: bool = True

    def viewed_images(self, sizes: TaskSizes) -> int:
        """Return the task's images, and all exemplars for their means."""
        together = [*sizes.earlier, *sizes.own]
        held = sum(kept_sizes(self.capacity, together, num_cells=len(together)))
        return sum(sizes.own) + held * (1 + self.mirrored_means) if self.capacity else 0

    @property
    def rehearsal(self) -> Rehearsal:
        """Exemplars among the training images."""
        return Rehearsal("merged", self.capacity)

    @model_validator(mode="after")
    def _check_means(self) -> ICaRLConfig:
        if not self.capacity and self.classifier == "nearest_mean":
            raise ValueError("without exemplars (capacity 0) there are no means: set classifier to linear")
        return self


class ICaRL(Learner):
    """Backbone and one sigmoid per class, a teacher, exemplars and their class means."""

    config_class = ICaRLConfig
    trained_parts = "backbone, head"
    backbone_class = Backbone
    class_means: Tensor
    is_hard: Tensor

    def __init__(self, backbone: Backbone, config: ICaRLConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.head = SharedHead(backbone.width)
        self.exemplars = ExemplarSet(config.capacity)
        self.teacher = Teacher()
        self.register_buffer("class_means", torch.zeros(0, backbone.width))
        self.register_buffer("is_hard", torch.zeros(0), persistent=False)

    def begin_task(self, task: Task) -> None:
        """Keep a copy of the network as the teacher, and add columns."""
        super().begin_task(task)
        if task.index:
            self.teacher.hold(backbone=self.backbone, head=self.head)
        planned = task.num_planned_classes if self.config.all_columns else 0
        self.head.widen(max(planned, task.num_seen_classes))
        self.class_means = self.class_means[:0]
        is_old = torch.arange(self.head.out_features) < task.num_seen_classes - len(task.new_classes)
        is_old[list(task.classes)] = False
        self.is_hard = (~is_old).to(self.class_means)

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
        """Choose the task's exemplars, and recompute all class means with the current features."""
        self.teacher.clear()
        if not self.config.capacity:
            return
        values, labels, rows = features()
        self.exemplars.add(values, labels, rows, task=task.index, normalize=self.config.normalize)
        held = self.exemplars.rows.tolist()
        means = self._means(*features(held)[:2])
        if self.config.mirrored_means:
            means = means + self._means(*features(held, "flip")[:2])
            means = F.normalize(means, dim=1) if self.config.normalize else means / 2
        self.class_means = means.to(self.class_means)

    def allocate(self, task: Task, shapes: Mapping[str, Sequence[int]]) -> None:
        """Make room for the class means."""
        super().allocate(task, shapes)
        if self.config.capacity:
            self.class_means = self.class_means.new_zeros(self.num_seen_classes, self.backbone.width)

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return scores (N, seen): minus the squared distance to the means, or logits; inside a task always logits."""
        features = self.query(images) if query is None else query
        if self.config.classifier == "linear" or not len(self.class_means):
            scores: Tensor = self.head(features)
            return scores[:, : self.num_seen_classes]
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(self.class_means)
            if self.config.normalize:
                features = F.normalize(features, dim=1)
            squares = self.class_means.square().sum(1)
            return 2 * features @ self.class_means.T - squares - features.square().sum(1, keepdim=True)

    def report(self, task: Task) -> dict[str, Any]:
        """Return how many exemplars each class has."""
        return {"exemplars_per_class": {str(label): n for label, n in self.exemplars.per_class().items()}}

    def _means(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean (seen, D) of each class's features, in float64."""
        features = features.double()
        if self.config.normalize:
            features = F.normalize(features, dim=1)
        means = torch.stack([features[labels == label].mean(0) for label in range(self.num_seen_classes)])
        return F.normalize(means, dim=1) if self.config.normalize else means


def distilled_cross_entropy(
    logits: Tensor, labels: Tensor, *, soft: Tensor | None, is_hard: Tensor
) -> Tensor:
    """Return iCaRL's loss of each image (N,): the mean over all columns of the binary cross-entropy.

    Args:
        logits: (N, K).
        labels: (N,) columns.
        soft: (N, K_old) logits of the old network; None in the first task.
        is_hard: (K,) 1 for columns whose target is the label, 0 for those whose target is the old network's sigmoid.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    targets = (labels[:, None] == columns).to(logits)
    if soft is not None:
        taught = F.pad(soft.to(logits).sigmoid(), (0, logits.shape[1] - soft.shape[1]))
        targets = targets * is_hard + taught * (1 - is_hard)
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(1)
