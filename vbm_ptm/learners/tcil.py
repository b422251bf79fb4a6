"""TCIL: an expandable network whose feature maps are fused by attention, with distillation of outputs and maps.

Huang et al.: "Resolving Task Confusion in Dynamic Expansion Architectures for Class Incremental Learning", AAAI 2023.
As in ``expandable``, every task has its own backbone, initialised from the one before, in addition to the frozen
earlier ones. Their feature maps are fused by attention before the classifier. From the second task on, the newest
network also has to reproduce the outputs of the network before the task, and on images of earlier classes its maps. The
weights of the classifier are clamped at 0 after every step; after the task the rows of new classes are scaled to the
mean length of the old ones.

Differs from the official code in:
  - The fusion module is trained with the newest backbone and kept. The published code re-initialises it at random in
    every forward pass, even in evaluation, and never trains it.
  - The distance of maps is averaged over all images of a step, with those of new classes counting as 0; the code
    averages over images of earlier classes alone.
  - Rows are scaled once, after the task, instead of at every evaluation: the scores are the same.
  - Herding takes the running mean nearest to the class's, in float64.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone, evaluating
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput
from vbm_ptm.learners.config import TRAINING_PASSES, Passes
from vbm_ptm.learners.expandable import auxiliary_targets
from vbm_ptm.learners.fusion import MapFusion, map_distance
from vbm_ptm.learners.plain_head import PlainHead
from vbm_ptm.learners.teacher import Teacher, softened_divergence
from vbm_ptm.replay import ExemplarSet, Rehearsal


class TCILConfig(LearnerConfig):
    """Settings of TCIL; the defaults are the official ones.

    Attributes:
        capacity: Exemplars in total, divided equally among the classes; 0 for none.
        reset_epoch: Epoch of each task, counted from 0, at whose beginning the classifiers are re-initialised; None for
            never.
        answer_weight: Weight of the divergence from the outputs of the network before the task.
        temperature: Divides the logits in it; its square is a factor of the weight.
        map_weight: Weight of the distance between the newest backbone's maps and those of the earlier ones.
        map_epochs: Epochs over which this weight rises from 0.
        distils_new_maps: Compare the maps of new classes' images too; without exemplars there are no others.
    """

    name: str = "tcil"
    capacity: int = Field(default=2000, ge=0)
    reset_epoch: int | None = Field(default=10, ge=0)
    answer_weight: float = Field(default=0.5, ge=0)
    temperature: float = Field(default=2.0, gt=0)
    map_weight: float = Field(default=0.5, ge=0)
    map_epochs: int = Field(default=50, ge=1)
    distils_new_maps: bool = False

    def passes(self, task_index: int) -> Passes:
        """Return one pass more for every earlier backbone."""
        return Passes(TRAINING_PASSES + task_index, 1 + task_index)

    @property
    def rehearsal(self) -> Rehearsal:
        """Exemplars among the training images."""
        return Rehearsal("merged", self.capacity)


class TCIL(Learner):
    """The newest backbone, frozen earlier ones, a fusion of their maps, a classifier and an auxiliary one."""

    config_class = TCILConfig
    trained_parts = "a backbone per task, fusion, head"
    backbone_class = Backbone
    head: PlainHead
    fusion: MapFusion
    map_share: Tensor

    def __init__(self, backbone: Backbone, config: TCILConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.earlier = nn.ModuleList()
        self.auxiliary_head: PlainHead | None = None
        self.teacher = Teacher()
        self.exemplars = ExemplarSet(config.capacity)
        self.register_buffer("map_share", torch.zeros(()))

    def begin_task(self, task: Task) -> None:
        """Freeze a copy of the newest backbone, and the classifier as the teacher; continue with new ones."""
        super().begin_task(task)
        if task.index:
            self.earlier.append(Teacher(backbone=self.backbone))
            self.teacher.hold(**{"0": self.fusion, "1": self.head})  # as they are called in checkpoints
        width = self.backbone.width
        self.fusion = MapFusion(width * (len(self.earlier) + 1))
        self.head = PlainHead(width * (len(self.earlier) + 1), self.num_seen_classes)
        has_auxiliary = task.index > 0 and task.new_classes
        self.auxiliary_head = PlainHead(width, len(task.new_classes) + 1) if has_auxiliary else None

    def begin_epoch(self, epoch: int) -> None:
        """Re-initialise the classifiers once the newest backbone has warmed up; raise the weight of the maps."""
        self.map_share.fill_(min(1.0, epoch / self.config.map_epochs))
        if epoch == self.config.reset_epoch:
            for head in (self.head, self.auxiliary_head):
                if head is not None:
                    head.reset_parameters()

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, seen), and of each image the auxiliary cross-entropy and both distillations."""
        earlier, newest = self._earlier_maps(images), self.backbone.feature_map(images)
        logits = self.head(self.fusion(torch.cat([*earlier, newest], dim=1)))
        auxiliary = {}
        if self.auxiliary_head is not None:
            targets = auxiliary_targets(labels, num_known=self.num_known_classes)
            scores = self.auxiliary_head(newest.mean((2, 3)))
            auxiliary["newest_features"] = F.cross_entropy(scores, targets, reduction="none")
        if self.teacher:
            config, taught = self.config, self.teacher(torch.cat(earlier, dim=1))
            divergence = softened_divergence(
                logits[:, : taught.shape[1]], taught, temperature=config.temperature
            )
            auxiliary["answers"] = config.answer_weight * config.temperature**2 * divergence
            distances = torch.stack([map_distance(newest, maps) for maps in earlier]).sum(0)
            counts = (labels < self.num_known_classes) | config.distils_new_maps
            auxiliary["maps"] = config.map_weight * self.map_share * distances * counts
        return LearnerOutput(logits, torch.arange(self.num_seen_classes, device=logits.device), auxiliary)

    @torch.no_grad()
    def after_step(self) -> None:
        """Keep the rows of the classifier from being negative."""
        self.head.weight.clamp_(min=0)

    def query(self, images: Tensor) -> Tensor:
        """Return the fused features (N, tasks * D), without gradient and in eval mode."""
        with evaluating(self.backbone):
            maps = [*self._earlier_maps(images), self.backbone.feature_map(images)]
            fused: Tensor = self.fusion(torch.cat(maps, dim=1))
            return fused

    def end_task(self, task: Task, features: Features) -> None:
        """Align the new rows of the classifier, and choose the task's exemplars."""
        self.teacher.clear()
        self.head.align(self.num_known_classes)
        if self.config.capacity:
            self.exemplars.add(*features(), task=task.index)

    @torch.no_grad()
    def _earlier_maps(self, images: Tensor) -> list[Tensor]:
        teachers = (each for each in self.earlier if isinstance(each, Teacher))
        return [teacher.backbone.feature_map(images) for teacher in teachers]
