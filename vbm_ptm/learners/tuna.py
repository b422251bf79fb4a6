"""TUNA: an adapter for every task, a universal one fused from all, and the most certain of the experts.

Wang, Zhou, Ye: "Integrating Task-Specific and Universal Adapters for Pre-Trained Model-based Class-Incremental
Learning", ICCV 2025 (section 4; repository LAMDA-CL/ICCV2025-TUNA). Each task trains an adapter, which starts from that
of the task before, and a head of cosines times 20. Heads are aligned on Gaussian features of the experts. An image
passes through all experts; the one with the least entropy over the seen classes is added to the universal adapter's
probabilities.

Differs from the official code in:
  - The rate of alignment is annealed over its epochs; the official scheduler's period is 5 of 30 epochs, so that the
    rate oscillates.
  - Means do not decay with age; the official code has the sign of its decay reversed.
  - In the domain-incremental scenario, which the paper does not treat, heads are shared, there is one Gaussian for each
    class and domain, and entropy picks the domain's expert.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones import PromptableViT, evaluating
from vbm_ptm.backbones.adaptations import Adapters
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import CosineTaskHead, TaskHeads
from vbm_ptm.learners.alignment import AlignmentConfig, align, class_gaussians, gaussians_of, gaussians_size
from vbm_ptm.learners.base import Features, Learner, LearnerOutput, ParameterGroup, TaskStatistics
from vbm_ptm.learners.config import TRAINING_PASSES, Passes


class TUNAConfig(AlignmentConfig):
    """Settings of TUNA; the defaults are the official ones for CIFAR-100, except for dropout.

    Attributes:
        adapter_width: Width of an adapter's bottleneck.
        adapter_dropout: Dropout inside adapters. Its masks come from each rank's own generator: above 0 a step on
            several ranks is not exactly that on one.
        scale: Factor of the cosines, in training, alignment and prediction.
        orthogonality_weight: Weight of the term that keeps an adapter's up-projection away from those of earlier tasks.
    """

    feature_passes: ClassVar[int] = 1
    name: str = "tuna"
    adapter_width: int = Field(default=16, ge=1)
    adapter_dropout: float = Field(default=0.0, ge=0, lt=1)
    scale: float = Field(default=20.0, gt=0)
    orthogonality_weight: float = Field(default=0.0, ge=0)
    alignment_epochs: int = Field(default=30, ge=0)
    alignment_samples_per_class: int = Field(default=80, ge=1)
    alignment_learning_rate: float = Field(default=0.005, gt=0)

    def passes(self, task_index: int) -> Passes:
        """Return, for a test, one pass for each expert so far and one for the universal one, if there are several."""
        return Passes(TRAINING_PASSES, 1, testing=task_index + 2 if task_index else 1)


class TUNA(Learner):
    """Frozen backbone, adapters and a head of cosines for each task, Gaussians of the classes."""

    config_class = TUNAConfig
    trained_parts = "an adapter and a head per task"
    has_task_experts = True
    backbone: PromptableViT

    def __init__(self, backbone: PromptableViT, config: TUNAConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.experts = nn.ModuleList()
        self.heads = TaskHeads(backbone.width, head_class=CosineTaskHead)

    def begin_task(self, task: Task) -> None:
        """Add an expert that starts from the one before, and a head; freeze those of finished tasks."""
        super().begin_task(task)
        self.experts.requires_grad_(False)
        config, backbone = self.config, self.backbone
        expert: nn.Module = (
            copy.deepcopy(self.experts[-1])
            if len(self.experts)
            else Adapters(
                backbone.depth, backbone.width, config.adapter_width, dropout=config.adapter_dropout
            )
        )
        self.experts.append(expert.requires_grad_(True))
        self.heads.append(len(task.new_classes))
        self.heads.train_only(task.classes)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the task's expert and the heads that hold its classes."""
        return [
            ParameterGroup("experts", list(self.experts[-1].parameters())),
            ParameterGroup("heads", self.heads.trainable_parameters()),
        ]

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) over the task's classes under its expert."""
        logits = self._logits(self._encode(self.experts[-1], images))[:, self.task_columns]
        auxiliary = {}
        if self.config.orthogonality_weight and len(self.experts) > 1:
            auxiliary["orthogonality"] = self._orthogonality()
        return LearnerOutput(logits, self.task_columns, auxiliary)

    def query(self, images: Tensor) -> Tensor:
        """Return the class token (N, D) under the newest expert, without gradient and in eval mode."""
        with evaluating(self):
            return self._encode(self.experts[-1], images)

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return the sum (N, seen) of the probabilities of the universal and of the most certain expert."""
        newest = self._logits(self.query(images) if query is None else query)
        if len(self.experts) == 1:
            return newest
        with evaluating(self):
            earlier = [self._logits(self._encode(expert, images)) for expert in list(self.experts)[:-1]]
            universal = self._logits(self._encode(self.universal_expert(), images))
        scores, _ = combined_scores(torch.stack([*earlier, newest]), universal)
        return scores

    def predict_task(self, images: Tensor, task: Task) -> Tensor:
        """Return logits (N, K) over the task's classes under its expert."""
        with evaluating(self):
            logits = self._logits(self._encode(self.experts[task.index], images))
            return logits[:, self.columns(task.classes, logits.device)]

    def end_task(self, task: Task, features: Features) -> None:
        """Model the task's classes as Gaussians under its expert; align all heads."""
        values, labels, _ = features()
        tensors = class_gaussians(values, labels, task.classes)
        self.statistics[str(task.index)] = TaskStatistics(tensors).to(next(self.heads.parameters()).device)
        if task.index > 0 and self.config.alignment_epochs:
            joined = self.heads.joined()
            align(
                joined,
                gaussians_of(self),
                self.config,
                loss=lambda cosines, labels: F.cross_entropy(self.config.scale * cosines, labels),
            )
            self.heads.load_joined(joined)

    def statistics_size(self, class_sizes: Sequence[int]) -> int:
        """Return the numbers in a mean and a factor per class."""
        return gaussians_size(class_sizes, self.backbone.width)

    def universal_expert(self) -> nn.Module:
        """Return the adapters that are fused from all experts; nothing of them is kept."""
        universal = copy.deepcopy(self.experts[-1])
        states = [expert.state_dict() for expert in self.experts]
        universal.load_state_dict(
            {name: fused(torch.stack([state[name] for state in states])) for name in states[0]}
        )
        return universal.eval()

    def _encode(self, expert: nn.Module, images: Tensor) -> Tensor:
        return self.backbone.encode(images, adaptation=expert())[:, 0]

    def _logits(self, features: Tensor) -> Tensor:
        logits: Tensor = self.config.scale * self.heads(features)
        return logits

    def _orthogonality(self) -> Tensor:
        """Return the weighted sum over earlier experts of how alike the rows of the up-projections are, ()."""

        def mean_rows(expert: nn.Module) -> Tensor:
            blocks: Any = expert.blocks
            return torch.stack(
                [F.normalize(block.up.weight, dim=1).mean(dim=0) for block in blocks]
            )  # (blocks, R)

        newest = mean_rows(self.experts[-1])
        # The mean of all products of two sets of rows is the product of their means.
        alike = [(newest * mean_rows(each)).sum(dim=1).abs().mean() for each in list(self.experts)[:-1]]
        factor = self.config.orthogonality_weight * math.exp(-len(self.experts))
        total: Tensor = factor * torch.stack(alike).sum()
        return total


def fused(values: Tensor) -> Tensor:
    """Return one tensor (...) of several (experts, ...), number by number.

    The sign is that of the mean, - where it is 0; the magnitude is the largest among the numbers of that sign, or 0.
    """
    sign = torch.where(values.mean(dim=0) > 0, 1.0, -1.0).to(values)
    return sign * (values * sign).clamp(min=0).amax(dim=0)


def combined_scores(logits: Tensor, universal: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores (N,K) and the expert (N,) that was chosen for each image.

    Args:
        logits: (experts,N,K).
        universal: (N,K).
    """
    probabilities = logits.softmax(dim=2)
    entropy = -(probabilities * (probabilities + 1e-10).log()).sum(dim=2)
    chosen = entropy.argmin(dim=0)
    rows = torch.arange(logits.shape[1], device=logits.device)
    return universal.softmax(dim=1) + probabilities[chosen, rows], chosen
