"""SLCA: slow learner with classifier alignment.

Zhang, Wang, Kang, Chen, Wei: "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a
Pre-trained Model", ICCV 2023 (section 3; repository GengDavid/SLCA). Stage 1 trains the whole backbone with a
learning rate far below that of the task's own head. Stage 2 models each class by a Gaussian over its features
and re-trains all heads together on draws from them.

Differs from the official code in:
  - Aligned heads are a copy that only prediction uses, so nothing needs to be backed up and recalled: training
    never sees them, and each alignment starts from the heads of stage 1 (what the official recall restores).
  - A class belongs to the task in which it appeared, also when task sizes differ.
  - A draw is ``scale * mean + e1 F + 0.01 e2`` with the factor F of the centred features instead of a Cholesky
    factor of F'F + 1e-4 I: the same distribution, exact for every class size from one image up.
  - In the domain-incremental scenario, which the paper does not treat, heads are shared and there is one
    Gaussian for each class and domain.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.class_statistics import diagonal_factor, draw, gaussian_factor, pooled_factor
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.base import (
    Features,
    Learner,
    LearnerConfig,
    LearnerOutput,
    ParameterGroup,
    TaskStatistics,
)
from vbm_ptm.losses import logit_normalized_cross_entropy


class SLCAConfig(LearnerConfig):
    """Settings of SLCA; the defaults are the official ones, but for the final norm, which stays as it is.

    Attributes:
        backbone_learning_rate_scale: Learning rate of the backbone over that of the heads ("slow learner").
        reinitialize_final_norm: Replace the final norm by a fresh LayerNorm (eps 1e-5), as the official code does.
        alignment_epochs: Epochs of classifier alignment after each task but the first; 0 switches it off.
        alignment_samples_per_class: Draws from each class's Gaussian per epoch; also the batch size.
        alignment_learning_rate: Rate at the first alignment epoch, annealed by a cosine per epoch.
        alignment_momentum: Momentum of alignment's SGD.
        alignment_weight_decay: Weight decay of alignment's SGD.
        covariance: "full" (as published) or "diagonal" for each class, or one "shared" by the classes of a task.
        mean_decay: Oldest means are scaled down by at most this much, the newest not at all.
        logit_normalization_temperature: Temperature of the logit normalisation; None for plain cross-entropy.
    """

    name: str = "slca"
    backbone_learning_rate_scale: float = Field(default=0.01, gt=0)
    reinitialize_final_norm: bool = False
    alignment_epochs: int = Field(default=5, ge=0)
    alignment_samples_per_class: int = Field(default=256, ge=1)
    alignment_learning_rate: float = Field(default=0.01, gt=0)
    alignment_momentum: float = Field(default=0.9, ge=0, lt=1)
    alignment_weight_decay: float = Field(default=5e-4, ge=0)
    covariance: Literal["full", "diagonal", "shared"] = "full"
    mean_decay: float = Field(default=0.1, ge=0, le=1)
    logit_normalization_temperature: float | None = Field(default=0.1, gt=0)


class SLCA(Learner):
    """Slowly tuned backbone, one head per task, heads aligned on Gaussian features for prediction."""

    config_class = SLCAConfig

    def __init__(self, backbone: PromptableViT, config: SLCAConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        if config.reinitialize_final_norm:
            self.backbone.vit.norm = nn.LayerNorm(backbone.width)
        self.backbone.requires_grad_(True)
        self.heads = TaskHeads(backbone.width)
        self.aligned_heads: TaskHeads | None = None

    def begin_task(self, task: Task) -> None:
        """Add a head for the new classes and freeze the heads that hold none of the task's classes."""
        super().begin_task(task)
        self.aligned_heads = None
        self.heads.append(len(task.new_classes))
        self.heads.train_only(task.classes)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the slow backbone and the trainable heads."""
        slow = self.config.backbone_learning_rate_scale
        return [
            ParameterGroup("backbone", list(self.backbone.parameters()), slow),
            ParameterGroup("heads", self.heads.trainable_parameters()),
        ]

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) over the task's classes."""
        features = self.backbone.encode(images)[:, 0]
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
        tensors, covariance = {}, self.config.covariance
        gaussian = diagonal_factor if covariance == "diagonal" else gaussian_factor
        for class_index in task.classes:
            own = values[labels == class_index].double()
            if covariance == "shared":
                tensors[f"mean_{class_index}"] = own.mean(dim=0).to(values.dtype)
            else:
                mean, factor = gaussian(own)
                tensors[f"mean_{class_index}"] = mean.to(values.dtype)
                tensors[f"factor_{class_index}"] = factor.to(values.dtype)
        if covariance == "shared":
            tensors["factor"] = pooled_factor(values, labels).to(values.dtype)
        self.statistics[str(task.index)] = TaskStatistics(tensors).to(next(self.heads.parameters()).device)
        self._copy_heads()
        if task.index > 0:
            self._align()

    def allocate(self, task: Task, shapes: Mapping[str, Sequence[int]]) -> None:
        """Make room for the Gaussians and the aligned heads."""
        super().allocate(task, shapes)
        self._copy_heads()

    def statistics_size(self, class_sizes: Sequence[int]) -> int:
        """Return the numbers in a mean per class and in the factors."""
        width = self.backbone.width
        if self.config.covariance == "diagonal":
            return 2 * width * len(class_sizes)
        if self.config.covariance == "shared":
            return width * (len(class_sizes) + min(sum(class_sizes) - len(class_sizes), width))
        return sum(width * (1 + min(max(count - 1, 0), width)) for count in class_sizes)

    def report(self, task: Task) -> dict[str, Any]:
        """Return the bytes that the Gaussians of the task take."""
        return {"statistics_bytes": sum(tensor.nbytes for tensor in self.statistics_of(task).values())}

    def _copy_heads(self) -> TaskHeads:
        self.aligned_heads = copy.deepcopy(self.heads).requires_grad_(False)
        return self.aligned_heads

    def _align(self) -> None:
        """Train the aligned heads on draws from every class's Gaussian (the official stage 2)."""
        config, heads = self.config, self.aligned_heads
        assert heads is not None
        sizes = [size for size in heads.sizes if size]
        # Draws come from a generator of the heads' device, itself seeded by the caller's.
        generator = torch.Generator(next(heads.parameters()).device).manual_seed(
            int(torch.randint(2**62, ()))
        )
        heads.requires_grad_(True)
        optimizer = torch.optim.SGD(
            heads.parameters(), momentum=config.alignment_momentum, weight_decay=config.alignment_weight_decay
        )
        for epoch in range(config.alignment_epochs):
            annealing = (1 + math.cos(math.pi * epoch / config.alignment_epochs)) / 2
            for group in optimizer.param_groups:
                group["lr"] = config.alignment_learning_rate * annealing
            features, labels = self._draw_features(generator)
            batches = torch.randperm(len(labels), generator=generator, device=labels.device).split(
                config.alignment_samples_per_class
            )
            for batch in batches:
                logits, targets = heads(features[batch]), labels[batch]
                if config.logit_normalization_temperature is None:
                    loss = F.cross_entropy(logits, targets)
                else:
                    loss = logit_normalized_cross_entropy(
                        logits, targets, sizes, config.logit_normalization_temperature
                    )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        heads.requires_grad_(False)

    def _draw_features(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return draws (n, D) from all Gaussians and their class indices (n,)."""
        count, newest = self.config.alignment_samples_per_class, len(self.tasks)
        draws, labels = [], []
        for task in self.tasks:
            statistics = self.statistics_of(task)
            scale = 1 - self.config.mean_decay * (1 - (task.index + 1) / newest)
            for class_index in task.classes:
                mean = statistics[f"mean_{class_index}"]
                factor = statistics[
                    "factor" if self.config.covariance == "shared" else f"factor_{class_index}"
                ]
                draws.append(draw(mean, factor, count, mean_scale=scale, generator=generator))
                labels.append(torch.full((count,), class_index, device=mean.device))
        return torch.cat(draws), torch.cat(labels)
