"""SLCA: slow learner with classifier alignment.

Zhang, Wang, Kang, Chen, Wei: "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a
Pre-trained Model", ICCV 2023 (section 3; repository GengDavid/SLCA). Stage 1 trains the whole backbone with a
learning rate far below that of the task's own head. Stage 2 models each class by a Gaussian over its features
and re-trains all heads together on draws from them.

Differs from the official code in:
  - Aligned heads are a copy that only prediction uses, so nothing needs to be backed up and recalled: training
    never sees them, and each alignment starts from the heads of stage 1 (what the official recall restores).
  - A class belongs to the task in which it appeared, even if task sizes differ.
  - A draw is ``scale * mean + e1 F + 0.01 e2`` with the factor F of the centred features instead of a Cholesky
    factor of F'F + 1e-4 I: the same distribution, exact for every class size from one image up.
  - In the domain-incremental scenario, which the paper does not treat, heads are shared and there is one
    Gaussian for each class and domain.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone, PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.alignment import (
    Covariance,
    align,
    class_gaussians,
    gaussians_of,
    gaussians_size,
    notes_on_normalization,
)
from vbm_ptm.learners.base import Features, Learner, LearnerOutput, ParameterGroup, TaskStatistics
from vbm_ptm.learners.drift import Drift, DriftConfig
from vbm_ptm.losses import logit_normalized_cross_entropy


class SLCAConfig(DriftConfig):
    """Settings of SLCA; the defaults are the official ones, except for the final norm, which is kept.

    Attributes:
        backbone_learning_rate_scale: Learning rate of the backbone over that of the heads ("slow learner").
        reinitialize_final_norm: Replace the final norm by a fresh LayerNorm (eps 1e-5), as the official code does.
        covariance: "full" (as published) or "diagonal" for each class, or one "shared" by the classes of a task.
        mean_decay: The oldest means are scaled down by at most this fraction, the newest not at all.
        logit_normalization_temperature: Temperature of the logit normalisation; None for plain cross-entropy.
    """

    name: str = "slca"
    backbone_learning_rate_scale: float = Field(default=0.01, gt=0)
    reinitialize_final_norm: bool = False
    covariance: Covariance = "full"
    mean_decay: float = Field(default=0.1, ge=0, le=1)
    logit_normalization_temperature: float | None = Field(default=0.1, gt=0)

    def task_notes(self, task: Task) -> list[str]:
        """Warn about logit normalisation in a task of one class."""
        if self.logit_normalization_temperature is None:
            return []
        remedy = "learner.logit_normalization_temperature=null disables it"
        return notes_on_normalization(task, remedy=remedy)


class SLCA(Learner):
    """Slowly tuned backbone, one head per task, heads aligned on Gaussian features for prediction."""

    config_class = SLCAConfig
    trained_parts = "backbone, one head per task"
    predicts_from_query = True
    backbone_class = Backbone

    def __init__(self, backbone: Backbone, config: SLCAConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        if config.reinitialize_final_norm:
            if not isinstance(backbone, PromptableViT):
                raise UsageError(
                    "learner.reinitialize_final_norm=true needs a vision transformer; with another backbone set it "
                    "to false."
                )
            backbone.vit.norm = nn.LayerNorm(backbone.width)
        self.backbone.requires_grad_(True)
        self.heads = TaskHeads(backbone.width)
        self.aligned_heads: TaskHeads | None = None
        self.drift = Drift() if config.drift == "linear" else None

    def begin_task(self, task: Task) -> None:
        """Add a head for the new classes and freeze the heads that hold none of the task's classes."""
        super().begin_task(task)
        self.aligned_heads = None
        self.heads.append(len(task.new_classes))
        self.heads.train_only(task.classes)

    def prepare_task(self, task: Task, features: Features) -> None:
        """Keep the features from before training, if older Gaussians are to follow what it does to them."""
        if self.drift is not None and task.index > 0:
            self.drift.hold(features()[0])

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the slow backbone and the trainable heads."""
        slow = self.config.backbone_learning_rate_scale
        return [
            ParameterGroup("backbone", list(self.backbone.parameters()), slow),
            ParameterGroup("heads", self.heads.trainable_parameters()),
        ]

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) over the task's classes."""
        features = self.backbone.features(images)
        return LearnerOutput(self.heads(features)[:, self.task_columns], self.task_columns, {})

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return logits (N, seen) of the aligned heads, or of the heads in training inside a task."""
        features = self.query(images) if query is None else query
        heads = self.heads if self.aligned_heads is None else self.aligned_heads
        scores: Tensor = heads(features)
        return scores

    def end_task(self, task: Task, features: Features) -> None:
        """Model the task's classes as Gaussians and align a copy of all heads."""
        values, labels, _ = features()
        tensors = class_gaussians(values, labels, task.classes, covariance=self.config.covariance)
        if self.drift is not None:
            tensors |= self.drift.finish(values)
        self.statistics[str(task.index)] = TaskStatistics(tensors).to(next(self.heads.parameters()).device)
        aligned = self._copy_heads()
        if task.index > 0:
            self._align(aligned)

    def allocate(self, task: Task, shapes: Mapping[str, Sequence[int]]) -> None:
        """Make room for the Gaussians and the aligned heads."""
        super().allocate(task, shapes)
        self._copy_heads()

    def statistics_size(self, class_sizes: Sequence[int]) -> int:
        """Return how many numbers means, factors and, except for the first task, the map of features take."""
        width = self.backbone.width
        gaussians = gaussians_size(class_sizes, width, covariance=self.config.covariance)
        return gaussians + (0 if self.drift is None else width**2)

    def report(self, task: Task) -> dict[str, Any]:
        """Return the bytes that the Gaussians of the task take."""
        return {"statistics_bytes": sum(tensor.nbytes for tensor in self.statistics_of(task).values())}

    def _copy_heads(self) -> TaskHeads:
        self.aligned_heads = copy.deepcopy(self.heads).requires_grad_(False)
        return self.aligned_heads

    def _align(self, heads: TaskHeads) -> None:
        """Train these heads on draws from every class's Gaussian (the official stage 2)."""
        joined, gaussians = heads.joined(), gaussians_of(self)
        scales = self._mean_scales(gaussians.ages)
        align(joined, gaussians, self.config, loss=self._alignment_loss, mean_scales=scales)
        heads.load_joined(joined)

    def _mean_scales(self, ages: Tensor) -> Tensor:
        """Return the factors on means by age: 1 for the newest task's, falling by equal parts of the decay."""
        decay: float = self.config.mean_decay
        return 1 - decay * ages / len(self.tasks)

    def _alignment_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        temperature = self.config.logit_normalization_temperature
        if temperature is None:
            return F.cross_entropy(logits, labels)
        sizes = [size for size in self.heads.sizes if size]
        return logit_normalized_cross_entropy(logits, labels, sizes, temperature)
