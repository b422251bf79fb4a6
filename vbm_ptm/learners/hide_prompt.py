"""HiDe-Prompt: an expert prefix for each task, chosen by a classifier of its own, with heads aligned for prediction.

Wang, Xie, Zhang, Huang, Su, Zhu: "Hierarchical Decomposition of Prompt-Based Continual Learning: Rethinking Obscured
Sub-optimality", NeurIPS 2023 (section 4; repository thu-ml/HiDe-Prompt). Within-task prediction trains a prefix and a
head, with a term that keeps features away from the centroids of older classes. Task-identity inference trains an MLP
and heads on features without prompts: the task of the best class says which prefix an image gets. Task-adaptive
prediction aligns all heads on draws around the centroids of every class.

Differs from the official code in:
  - Prefixes of different images, and keys and values, cannot be mixed.
  - The contrastive term looks at the centroids of older classes alone: row by row, so that views of one image, which
    the official term would push apart like any two images of a step, are not.
  - Task identity is learned in the same steps as the prefix, which share no parameter, not in a run of its own before
    them: for the same epochs, under the same schedule and the same bound on the gradient's norm.
  - Alignment uses all draws; the official code stops after as many batches as there are older classes.
  - In prediction classes that have not been seen do not compete.

Shapes: N images, D width, K columns, M centroids, k centroids of a class, B blocks, L tokens of a prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones import PromptableViT, evaluating
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.alignment import AlignmentConfig, Gaussians, align
from vbm_ptm.learners.base import Features, Learner, LearnerOutput, ParameterGroup, TaskStatistics
from vbm_ptm.learners.clusters import k_means
from vbm_ptm.learners.config import QUERIED, Passes
from vbm_ptm.prompts.blocks import check_blocks
from vbm_ptm.prompts.general_expert import ExpertPrefixes


class HiDePromptConfig(AlignmentConfig):
    """Settings of HiDe-Prompt; the defaults are the official ones for CIFAR-100.

    Attributes:
        expert_blocks: Blocks with a prefix.
        expert_length: Tokens of a prefix, for keys and values each.
        earlier_share: Share of the mean of earlier tasks' prefixes in the prefix of a task.
        contrast_weight: Weight of the term that keeps features away from the centroids of older classes.
        contrast_temperature: Its temperature.
        num_centroids: Centroids of k-means that stand for a class.
        head_learning_rate_scale: Learning rate of the heads over that of the prefixes.
        identity_learning_rate_scale: That of the MLP and the heads that tell the task.
        identity_alignment_samples: Draws from each centroid, and batch size, where these are aligned.
        identity_alignment_learning_rate: Rate of their alignment.
    """

    feature_passes: ClassVar[int] = 2
    usual_passes: ClassVar[Passes] = QUERIED
    name: str = "hide_prompt"
    expert_blocks: tuple[int, ...] = Field(default=(0, 1, 2, 3, 4), min_length=1)
    expert_length: int = Field(default=5, ge=1)
    earlier_share: float = Field(default=0.01, ge=0, lt=1)
    contrast_weight: float = Field(default=0.1, ge=0)
    contrast_temperature: float = Field(default=0.8, gt=0)
    num_centroids: int = Field(default=10, ge=1)
    head_learning_rate_scale: float = Field(default=0.1, gt=0)
    identity_learning_rate_scale: float = Field(default=1 / 60, gt=0)
    identity_alignment_samples: int = Field(default=24, ge=1)
    identity_alignment_learning_rate: float = Field(default=0.00046875, gt=0)
    alignment_epochs: int = Field(default=30, ge=0)
    alignment_samples_per_class: int = Field(default=120, ge=1)
    alignment_learning_rate: float = Field(default=0.005, gt=0)
    alignment_weight_decay: float = Field(default=0.0, ge=0)


class HiDePrompt(Learner):
    """Frozen backbone; a prefix and a head for each task; an MLP and heads that tell the task; centroids."""

    config_class = HiDePromptConfig
    trained_parts = "prefixes and a head per task, an MLP that tells the task"
    has_task_experts = True
    takes_domains = False
    backbone: PromptableViT

    def __init__(self, backbone: PromptableViT, config: HiDePromptConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        check_blocks(config.expert_blocks, depth=backbone.depth, setting="learner.expert_blocks")
        self.experts = ExpertPrefixes(
            config.expert_blocks, config.expert_length, backbone.width, has_keys=False
        )
        self.heads = TaskHeads(backbone.width)
        self.identity = ResidualMLP(backbone.width)
        self.identity_heads = TaskHeads(backbone.width)
        self.register_buffer("task_of_class", torch.empty(0, dtype=torch.long), persistent=False)

    task_of_class: Tensor

    def begin_task(self, task: Task) -> None:
        """Add a prefix, which starts from the one before, and two heads; freeze those of finished tasks."""
        super().begin_task(task)
        self.experts.append(copy_previous=True)
        for heads in (self.heads, self.identity_heads):
            heads.append(len(task.new_classes))
            heads.train_only(task.classes)
        self.identity.requires_grad_(True)
        owners = self.task_of_class.new_full((len(task.new_classes),), task.index)
        self.task_of_class = torch.cat([self.task_of_class, owners])

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the task's prefix, its head, and what tells the task."""
        config = self.config
        identity = [*self.identity.parameters(), *self.identity_heads.trainable_parameters()]
        return [
            ParameterGroup("experts", [self.experts.prefixes[-1]]),
            ParameterGroup("heads", self.heads.trainable_parameters(), config.head_learning_rate_scale),
            ParameterGroup("identity", identity, config.identity_learning_rate_scale),
        ]

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) over the task's classes under its prefix, the contrast and the loss of the identity."""
        features = self._encode(images, self.prefix(self.task.index)[None])
        targets = (labels[:, None] == self.task_columns).int().argmax(dim=1)
        identity = self._identity_logits(self.query(images))[:, self.task_columns]
        auxiliary = {"task_identity": F.cross_entropy(identity, targets, reduction="none")}
        if self.task.index > 0 and self.config.contrast_weight:
            contrast = contrast_terms(
                features, self._centroids(), temperature=self.config.contrast_temperature
            )
            auxiliary["contrast"] = self.config.contrast_weight * contrast
        return LearnerOutput(self.heads(features)[:, self.task_columns], self.task_columns, auxiliary)

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return logits (N, seen); every image has the prefix of the task whose class its query looks most like."""
        with evaluating(self):
            chosen = self.chosen_tasks(self.query(images) if query is None else query)
            prefixes = torch.stack([self.prefix(task.index) for task in self.tasks])
            scores: Tensor = self.heads(self._encode(images, prefixes[chosen]))
            return scores

    def chosen_tasks(self, query: Tensor) -> Tensor:
        """Return the task (N,) of the class that each query looks most like."""
        with evaluating(self):
            return self.task_of_class[self._identity_logits(query).argmax(dim=1)]

    def predict_task(self, images: Tensor, task: Task) -> Tensor:
        """Return logits (N, K) over the task's classes under its prefix."""
        with evaluating(self):
            logits: Tensor = self.heads(self._encode(images, self.prefix(task.index)[None]))
            return logits[:, self.columns(task.classes, images.device)]

    def prefix(self, task_index: int) -> Tensor:
        """Return the prefix (B,2,L,D) of a task; in training it holds a share of the mean of those before it."""
        own: Tensor = self.experts.prefixes[task_index]
        is_finished = str(task_index) in self.statistics
        if is_finished or not task_index:
            return own
        earlier = torch.stack(list(self.experts.prefixes)[:task_index]).mean(dim=0).detach()
        share: float = self.config.earlier_share
        return (1 - share) * own + share * earlier

    def end_task(self, task: Task, features: Features) -> None:
        """Keep the prefix as it was used, and centroids of the task's classes; align what predicts and what tells."""
        with torch.no_grad():
            self.experts.prefixes[-1].copy_(self.prefix(task.index))
        prefix = self.experts.prefixes[-1][None]
        values, labels, _ = features()
        prompted, _, _ = features(function=lambda images: self._encode(images, prefix))
        kept = {}
        for name, table in (("plain", values), ("prompted", prompted)):
            for class_index in task.classes:
                centroids, deviations = centroids_of(
                    table[labels == class_index], count=self.config.num_centroids
                )
                kept[f"{name}_mean_{class_index}"] = centroids
                kept[f"{name}_deviation_{class_index}"] = deviations
        self.statistics[str(task.index)] = TaskStatistics(kept).to(next(self.heads.parameters()).device)
        if task.index > 0 and self.config.alignment_epochs:
            self._align()

    def statistics_size(self, class_sizes: Sequence[int]) -> int:
        """Return the numbers in the centroids and deviations, with the prefix and without."""
        most: int = self.config.num_centroids
        return 4 * self.backbone.width * sum(min(count, most) for count in class_sizes)

    def _align(self) -> None:
        """Train the heads on draws of prompted features, and what tells the task on draws of plain ones."""
        config = self.config
        joined = self.heads.joined()
        align(joined, self._gaussians("prompted"), config, loss=F.cross_entropy)
        self.heads.load_joined(joined)
        slower = config.model_copy(
            update={
                "alignment_samples_per_class": config.identity_alignment_samples,
                "alignment_learning_rate": config.identity_alignment_learning_rate,
            }
        )
        joined = self.identity_heads.joined()
        align(nn.Sequential(self.identity, joined), self._gaussians("plain"), slower, loss=F.cross_entropy)
        self.identity_heads.load_joined(joined)

    def _gaussians(self, features: str) -> Gaussians:
        """Return a Gaussian for each centroid of all classes, of "plain" or "prompted" features.

        A centroid of one image, which has no spread, stands for its class only where no other does.
        """
        means, deviations, classes, ages = [], [], [], []
        for task in self.tasks:
            statistics = self.statistics_of(task)
            for class_index in task.classes:
                spread = statistics[f"{features}_deviation_{class_index}"]
                rows = spread.any(dim=1) if bool(spread.any()) else spread.new_ones(len(spread)).bool()
                means.append(statistics[f"{features}_mean_{class_index}"][rows])
                deviations.append(spread[rows])
                classes += [class_index] * len(means[-1])
                ages += [len(self.tasks) - 1 - task.index] * len(means[-1])
        stacked = torch.cat(means)
        numbers = (torch.tensor(each, device=stacked.device) for each in (classes, ages))
        return Gaussians(stacked, list(torch.cat(deviations)), *numbers)

    def _centroids(self) -> Tensor:
        """Return the centroids (M,D) of prompted features of all classes of finished tasks."""
        names = [
            (str(task.index), f"prompted_mean_{each}") for task in self.tasks[:-1] for each in task.classes
        ]
        return torch.cat([self.statistics[index].get_buffer(name) for index, name in names])

    def _identity_logits(self, query: Tensor) -> Tensor:
        logits: Tensor = self.identity_heads(self.identity(query))
        return logits

    def _encode(self, images: Tensor, prefixes: Tensor) -> Tensor:
        """Return the class token (N,D) under prefixes (N or 1, B, 2, L, D)."""
        by_block = {block: prefixes[:, number] for number, block in enumerate(self.experts.blocks)}
        return self.backbone.encode(images, prefixes=by_block)[:, 0]


class ResidualMLP(nn.Module):
    """norm(x + fc2(gelu(fc1(x)))) with twice the width inside.

    Args:
        width: D.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, features: Tensor) -> Tensor:
        """Return features (N,D) for features (N,D), not rounded by autocast."""
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(self.fc1.weight.dtype)
            output: Tensor = self.norm(features + self.fc2(F.gelu(self.fc1(features))))
            return output


def contrast_terms(features: Tensor, others: Tensor, *, temperature: float) -> Tensor:
    """Return for each row f (N,) the loss -log(exp(f f / T) / (exp(f f / T) + sum over others o of exp(f o / T))).

    Args:
        features: (N,D).
        others: (M,D), or (N,M,D) if every row has its own.
        temperature: T.
    """
    with torch.autocast(features.device.type, enabled=False):
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        others = others.to(features.dtype).expand(len(features), *others.shape[-2:])
        own = features.square().sum(dim=1, keepdim=True)
        products = torch.cat([own, (others @ features[..., None])[..., 0]], dim=1) / temperature
        return products.logsumexp(dim=1) - products[:, 0]


def centroids_of(features: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
    """Return the centroids (k,D) of features (n,D) and the standard deviations (k,D) around them, k = min(count, n).

    Found by k-means; deviations are biased, those of one image 0.
    """
    points = features.detach().double().cpu().numpy()
    centres, numbers = k_means(points, count=count)
    deviations = np.stack(
        [
            points[numbers == number].std(axis=0) if (numbers == number).any() else 0 * points[0]
            for number in range(len(centres))
        ]
    )
    return torch.from_numpy(centres).to(features), torch.from_numpy(deviations).to(features)
