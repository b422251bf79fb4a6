"""SLCA++: a hybrid slow learner of low-rank updates, norms and biases, with classifier alignment.

Zhang, Wang, Kang, Chen, Wei: "SLCA++: Unleash the Power of Sequential Fine-tuning for Continual Learning with
Pre-training", 2024 (repository GengDavid/SLCA, ``slcapp_*``). As SLCA, but the matrices of the backbone are frozen:
low-rank updates of them, one set for all tasks, are trained, and slowly the norms, biases and the class token. Stage 1
takes a symmetric cross-entropy; stage 2 scales whole draws by the age of their class, and prediction scales what the
heads of older tasks see.

Differs from the official code in:
  - Aligned heads are a copy that only prediction uses, as in ``slca``; a class belongs to the task that it came with.
  - A draw uses a factor of the centred features instead of a Cholesky factor, exact for every class size.
  - In the domain-incremental scenario, where heads are shared, there is one Gaussian for each class and domain, and no
    scaling by age. With more images of a known class there is one for each task; its draws are as old as its head.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from vbm_ptm.backbones import PromptableViT, evaluating
from vbm_ptm.backbones.adaptations import LowRank, LowRankUpdates
from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.alignment import (
    align,
    class_gaussians,
    gaussians_of,
    gaussians_size,
    notes_on_normalization,
)
from vbm_ptm.learners.base import Features, Learner, LearnerOutput, ParameterGroup, TaskStatistics
from vbm_ptm.learners.drift import Drift, DriftConfig
from vbm_ptm.losses import logit_normalized_cross_entropy, symmetric_cross_entropy_terms


class SLCAPlusPlusConfig(DriftConfig):
    """Settings of SLCA++; the defaults are the official ones for CIFAR-100, except for the final norm, which is kept.

    Attributes:
        rank: Rank of the updates.
        update_factor: Factor of the updates.
        first_update_learning_rate_scale: Learning rate of the updates over that of the heads in the first task.
        update_learning_rate_scale: The same in later tasks.
        slow_learning_rate_scale: Learning rate of norms, biases and class token over that of the heads.
        reinitialize_final_norm: Replace the final norm by a fresh LayerNorm (eps 1e-5), as the official code does.
        cross_entropy_weight: Weight of the cross-entropy in stage 1.
        reverse_weight: Weight of the reverse cross-entropy in stage 1.
        age_scale: Old classes' draws are divided by 1 + about this per task that came after theirs, and the features
            that an old head sees in prediction are multiplied by it.
        logit_normalization_temperature: Temperature of the logit normalisation in alignment; None for plain
            cross-entropy.
    """

    name: str = "slca_pp"
    rank: int = Field(default=4, ge=1)
    update_factor: float = Field(default=0.8, gt=0)
    first_update_learning_rate_scale: float = Field(default=0.5, gt=0)
    update_learning_rate_scale: float = Field(default=0.1, gt=0)
    slow_learning_rate_scale: float = Field(default=0.1, gt=0)
    reinitialize_final_norm: bool = False
    cross_entropy_weight: float = Field(default=1.0, ge=0)
    reverse_weight: float = Field(default=0.1, ge=0)
    age_scale: float = Field(default=0.02, ge=0)
    logit_normalization_temperature: float | None = Field(default=0.1, gt=0)

    def task_notes(self, task: Task) -> list[str]:
        """Warn about logit normalisation in a task of one class."""
        if self.logit_normalization_temperature is None or self.logit_normalization_temperature >= 1:
            return []
        return notes_on_normalization(task, remedy="learner.logit_normalization_temperature=1 softens it")


class SLCAPlusPlus(Learner):
    """Backbone with low-rank updates and slow norms and biases, one head per task, heads aligned for prediction."""

    config_class = SLCAPlusPlusConfig
    trained_parts = "low-rank updates, norms, biases, heads"
    backbone: PromptableViT

    def __init__(self, backbone: PromptableViT, config: SLCAPlusPlusConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        if config.rank > backbone.width:
            raise UsageError(
                f"learner.rank is {config.rank}, but matrices of width {backbone.width} have no more directions: take "
                f"at most {backbone.width}."
            )
        if config.reinitialize_final_norm:
            self.backbone.vit.norm = nn.LayerNorm(backbone.width)
        for name, parameter in backbone.vit.named_parameters():
            parameter.requires_grad_("norm" in name or "bias" in name or name == "cls_token")
        self.updates = LowRankUpdates(
            backbone, config.rank, sites=("qkv", "fc1", "fc2"), factor=config.update_factor
        )
        blocks: Any = backbone.vit.blocks
        for block, updates in zip(blocks, self.updates.blocks, strict=True):
            weights = {"qkv": block.attn.qkv.weight, "fc1": block.mlp.fc1.weight, "fc2": block.mlp.fc2.weight}
            for site, weight in weights.items():
                update = updates.get_submodule(site)
                assert isinstance(update, LowRank)
                update.down.data.copy_(leading_directions(weight, config.rank))
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
        """Return the updates, the slow part of the backbone and the trainable heads."""
        config, is_first = self.config, len(self.tasks) == 1
        slow = [parameter for parameter in self.backbone.parameters() if parameter.requires_grad]
        return [
            ParameterGroup(
                "updates",
                list(self.updates.parameters()),
                config.first_update_learning_rate_scale if is_first else config.update_learning_rate_scale,
            ),
            ParameterGroup("norms_biases", slow, config.slow_learning_rate_scale),
            ParameterGroup("heads", self.heads.trainable_parameters()),
        ]

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) over the task's classes, and what the symmetric loss adds to the cross-entropy."""
        logits = self.heads(self._encode(images))[:, self.task_columns]
        targets = (labels[:, None] == self.task_columns).int().argmax(dim=1)
        plain, reverse = symmetric_cross_entropy_terms(logits, targets)
        config = self.config
        auxiliary = {"reverse_cross_entropy": config.reverse_weight * reverse}
        if config.cross_entropy_weight != 1:
            auxiliary["cross_entropy_weight"] = (config.cross_entropy_weight - 1) * plain
        return LearnerOutput(logits, self.task_columns, auxiliary)

    def query(self, images: Tensor) -> Tensor:
        """Return the class token (N, D) of the updated backbone, without gradient and in eval mode."""
        with evaluating(self):
            return self._encode(images)

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return logits (N, seen) of the aligned heads, or of the heads in training inside a task."""
        features = self.query(images) if query is None else query
        if self.aligned_heads is None:
            scores: Tensor = self.heads(features)
            return scores
        return scaled_logits(self.aligned_heads, features, scale=self._age_scale())

    def end_task(self, task: Task, features: Features) -> None:
        """Model the task's classes as Gaussians and align a copy of all heads."""
        values, labels, _ = features()
        tensors = class_gaussians(values, labels, task.classes)
        if self.drift is not None:
            tensors |= self.drift.finish(values)
        self.statistics[str(task.index)] = TaskStatistics(tensors).to(next(self.heads.parameters()).device)
        heads = self._copy_heads()
        if task.index > 0:
            gaussians, joined = gaussians_of(self), heads.joined()
            shape = len(gaussians.classes), self.config.alignment_samples_per_class
            newest = len(heads.sizes) - 1
            ages = torch.tensor(
                [newest - index for index, size in enumerate(heads.sizes) for _ in range(size)]
            )
            ages = ages.to(gaussians.classes.device)[
                gaussians.classes
            ]  # a class that came back is as old as its head

            def draw_scales(generator: torch.Generator) -> Tensor:
                uniform = torch.rand(shape, generator=generator, device=generator.device)
                return draw_factors(uniform, ages[:, None], scale=self._age_scale())

            align(joined, gaussians, self.config, loss=self._alignment_loss, draw_scales=draw_scales)
            heads.load_joined(joined)

    def allocate(self, task: Task, shapes: Mapping[str, Sequence[int]]) -> None:
        """Make room for the Gaussians and the aligned heads."""
        super().allocate(task, shapes)
        self._copy_heads()

    def statistics_size(self, class_sizes: Sequence[int]) -> int:
        """Return the numbers in a mean and a factor per class and, but for the first task, in the map of features."""
        width = self.backbone.width
        return gaussians_size(class_sizes, width) + (0 if self.drift is None else width**2)

    def _encode(self, images: Tensor) -> Tensor:
        return self.backbone.encode(images, adaptation=self.updates())[:, 0]

    def _age_scale(self) -> float:
        """Return 0 where heads are shared by domains, which have no age, and where no head is aligned."""
        scale: float = self.config.age_scale
        return scale if self.task.domain is None and self.config.alignment_epochs else 0.0

    def _copy_heads(self) -> TaskHeads:
        self.aligned_heads = copy.deepcopy(self.heads).requires_grad_(False)
        return self.aligned_heads

    def _alignment_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        temperature = self.config.logit_normalization_temperature
        if temperature is None:
            return nn.functional.cross_entropy(logits, labels)
        sizes = [size for size in self.heads.sizes if size]
        return logit_normalized_cross_entropy(logits, labels, sizes, temperature)


def leading_directions(weight: Tensor, rank: int) -> Tensor:
    """Return the right singular vectors (rank, in) of a weight (out, in) with the largest singular values.

    They come from the smaller of the two products of the weight with itself, in float64.
    """
    device = "cpu" if weight.device.type == "mps" else weight.device
    matrix = weight.detach().to(device, torch.float64)
    if matrix.shape[0] >= matrix.shape[1]:
        directions = torch.linalg.eigh(matrix.T @ matrix).eigenvectors[:, -rank:]
    else:
        left = torch.linalg.eigh(matrix @ matrix.T).eigenvectors[:, -rank:]
        directions = nn.functional.normalize(matrix.T @ left, dim=0)
    leading: Tensor = directions.flip(1).T.to(weight)
    return leading


def draw_factors(uniform: Tensor, ages: Tensor, *, scale: float) -> Tensor:
    """Return the factor 1 / (1 + s * age) on each draw, with s = scale (1/2 + u) for u from U(0, 1).

    Args:
        uniform: u, of any shape that broadcasts with ``ages``.
        ages: Tasks that came after the one of the class.
        scale: The middle of the range of s.
    """
    return 1 / (1 + scale * (0.5 + uniform) * ages)


def scaled_logits(heads: TaskHeads, features: Tensor, *, scale: float) -> Tensor:
    """Return the logits (N,K) of features (N,D), which the head of an older task sees times 1 + scale * age."""
    newest = len(heads.tasks) - 1
    parts = [
        heads.forward_task(index, (1 + scale * (newest - index)) * features)
        for index in range(len(heads.tasks))
    ]
    return torch.cat(parts, dim=1)
