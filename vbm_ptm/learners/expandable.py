"""Expandable: a new feature extractor for every task, beside those of earlier tasks, which are frozen.

Yan, Xie, He: "DER: Dynamically Expandable Representation for Class Incremental Learning", CVPR 2021 (repository
DER-ClassIL.pytorch; without pruning, which has no public code). Each task's network starts from the one before. The
classifier sees the concatenated features and is re-initialised for every task; an auxiliary classifier makes the newest
features separate the task's classes from each other and from all earlier ones. After the task the classifier is fitted
again, to the same number of images of each class. Exemplars of earlier classes are training images of the task.

Differs from the official code in:
  - Herding takes the running mean nearest to the class's, in float64, and returns as many exemplars as there is room
    for; the official loop may stop early.
  - In the domain-incremental scenario, which the paper does not treat, a task without new classes has no auxiliary
    classifier.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone, evaluating
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput
from vbm_ptm.learners.config import TRAINING_PASSES, Passes, TaskSizes
from vbm_ptm.learners.plain_head import PlainHead
from vbm_ptm.learners.teacher import Teacher
from vbm_ptm.replay import ExemplarSet, Rehearsal, kept_sizes


class ExpandableConfig(LearnerConfig):
    """Settings of the expandable representation; the defaults are the official ones.

    Attributes:
        capacity: Exemplars in total, divided equally among the classes; 0 for none.
        reset_epoch: Epoch of each task, counted from 0, at whose beginning the classifiers are re-initialised (the
            official code does so after its warm-up); None for never.
        balanced_epochs: Epochs of the last fit of the classifier, after each task but the first; 0 switches it off.
        balanced_learning_rate: Its rate; a tenth from half of the epochs on.
        balanced_batch_size: Its images per step.
        balanced_weight_decay: Its weight decay.
        balanced_temperature: Divides the logits in it.
    """

    name: str = "expandable"
    capacity: int = Field(default=2000, ge=0)
    reset_epoch: int | None = Field(default=10, ge=0)
    balanced_epochs: int = Field(default=30, ge=0)
    balanced_learning_rate: float = Field(default=0.1, gt=0)
    balanced_batch_size: int = Field(default=128, ge=1)
    balanced_weight_decay: float = Field(default=5e-4, ge=0)
    balanced_temperature: float = Field(default=5.0, gt=0)

    def viewed_images(self, sizes: TaskSizes) -> int:
        """Return the task's images, and those that the classifier is fitted to in each of its epochs."""
        counts = [*sizes.own, *kept_sizes(self.capacity, sizes.earlier, num_cells=len(sizes.earlier))]
        counts = [count for count in counts if count]
        fitted = self.balanced_epochs * min(counts) * len(counts) if sizes.task_index else 0
        return sum(sizes.own) + fitted

    def passes(self, task_index: int) -> Passes:
        """Return one pass more for every earlier backbone."""
        return Passes(TRAINING_PASSES + task_index, 1 + task_index)

    @property
    def rehearsal(self) -> Rehearsal:
        """Exemplars among the training images."""
        return Rehearsal("merged", self.capacity)


class Expandable(Learner):
    """The newest backbone, frozen earlier ones, a classifier over all of them and an auxiliary one."""

    config_class = ExpandableConfig
    trained_parts = "a backbone per task, head"
    backbone_class = Backbone
    head: PlainHead

    def __init__(self, backbone: Backbone, config: ExpandableConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.earlier = nn.ModuleList()
        self.auxiliary_head: PlainHead | None = None
        self.exemplars = ExemplarSet(config.capacity)

    def begin_task(self, task: Task) -> None:
        """Freeze a copy of the newest backbone, continue with it, and create new classifiers."""
        super().begin_task(task)
        if task.index:
            self.earlier.append(Teacher(backbone=self.backbone))
        width = self.backbone.width
        self.head = PlainHead(width * (len(self.earlier) + 1), self.num_seen_classes)
        has_auxiliary = task.index > 0 and task.new_classes
        self.auxiliary_head = PlainHead(width, len(task.new_classes) + 1) if has_auxiliary else None

    def begin_epoch(self, epoch: int) -> None:
        """Re-initialise the classifiers, by torch's default, once the newest backbone has warmed up."""
        if epoch == self.config.reset_epoch:
            for head in (self.head, self.auxiliary_head):
                if head is not None:
                    head.reset_parameters()

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, seen) and the auxiliary cross-entropy of each image."""
        newest = self.backbone.features(images)
        logits = self.head(torch.cat([*self._earlier_features(images), newest], dim=1))
        auxiliary = {}
        if self.auxiliary_head is not None:
            targets = auxiliary_targets(labels, num_known=self.num_known_classes)
            auxiliary["newest_features"] = F.cross_entropy(
                self.auxiliary_head(newest), targets, reduction="none"
            )
        columns = torch.arange(self.num_seen_classes, device=logits.device)
        return LearnerOutput(logits, columns, auxiliary)

    def query(self, images: Tensor) -> Tensor:
        """Return the features (N, tasks * D) of all backbones side by side, without gradient and in eval mode."""
        with evaluating(self.backbone):
            return torch.cat([*self._earlier_features(images), self.backbone.features(images)], dim=1)

    def end_task(self, task: Task, features: Features) -> None:
        """Fit the classifier to the same number of images of each class, and choose the task's exemplars."""
        values, labels, rows = features()
        if task.index and self.config.balanced_epochs:
            held = self.exemplars.rows, self.exemplars.labels
            self._fit_balanced(torch.cat([rows, held[0]]), torch.cat([labels, held[1]]), features)
        if self.config.capacity:
            self.exemplars.add(values, labels, rows, task=task.index)

    def _earlier_features(self, images: Tensor) -> Iterator[Tensor]:
        return (backbone(images) for backbone in self.earlier)

    def _fit_balanced(self, rows: Tensor, labels: Tensor, features: Features) -> None:
        """Draw the classifier anew and fit it to views of equally many images of each class; nothing else moves."""
        config = self.config
        counts = labels.unique(return_counts=True)[1]
        own = [(labels == label).nonzero()[:, 0] for label in labels.unique().tolist()]
        chosen = torch.cat([each[torch.randperm(len(each))[: int(counts.min())]] for each in own])
        wanted, targets = rows[chosen].tolist(), labels[chosen].to(self.head.weight.device)
        self.head.reset_parameters()
        optimizer = torch.optim.SGD(
            self.head.parameters(),
            lr=config.balanced_learning_rate,
            momentum=0.9,
            weight_decay=config.balanced_weight_decay,
        )
        for epoch in range(config.balanced_epochs):
            for group in optimizer.param_groups:
                late = epoch >= config.balanced_epochs // 2
                group["lr"] = config.balanced_learning_rate * (0.1 if late else 1)
            values = features(wanted, "weak", draw=epoch)[0].to(self.head.weight)
            for batch in torch.randperm(len(wanted)).split(config.balanced_batch_size):
                batch = batch.to(values.device)
                logits = self.head(values[batch]) / config.balanced_temperature
                loss = F.cross_entropy(logits, targets[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        optimizer.zero_grad()


def auxiliary_targets(labels: Tensor, *, num_known: int) -> Tensor:
    """Return 0 for images of earlier classes, and 1, 2, ... for those of the task's new classes, in order."""
    return (labels - num_known + 1).clamp(min=0)
