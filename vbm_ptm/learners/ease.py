"""EASE: an adapter for every task, and class prototypes in the subspaces of all of them.

Zhou, Sun, Ye, Zhan: "Expandable Subspace Ensemble for Pre-Trained Model-Based Class-Incremental Learning", CVPR 2024
(section 4; repository sun-hailong/CVPR24-Ease). Each task trains a fresh adapter with a temporary head; then its images
pass through the adapters of all tasks so far, which gives a prototype of each class in each subspace. Old classes were
never seen in newer subspaces: there, their prototypes are composed of those of newer classes, by their likeness in the
old subspace.

Differs from the official code in:
  - Old adapters are modules of the learner and stored with it; a class belongs to the task in which it appeared, also
    when task sizes differ.
  - It is not defined for the domain-incremental scenario, and refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones import PromptableViT, evaluating
from vbm_ptm.backbones.adaptations import Adapters
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import CosineHead
from vbm_ptm.learners.base import (
    Features,
    Learner,
    LearnerConfig,
    LearnerOutput,
    ParameterGroup,
    TaskStatistics,
)
from vbm_ptm.learners.config import TRAINING_PASSES, Passes


class EASEConfig(LearnerConfig):
    """Settings of EASE; the defaults are the official ones, except for dropout.

    Attributes:
        adapter_width: Width of an adapter's bottleneck.
        adapter_dropout: Dropout inside adapters. Its masks come from each rank's own generator: above 0 a step on
            several ranks is not exactly that on one.
        alpha: Weight of all subspaces but a class's own together.
    """

    feature_passes: ClassVar[int] = 1
    name: str = "ease"
    adapter_width: int = Field(default=64, ge=1)
    adapter_dropout: float = Field(default=0.0, ge=0, lt=1)
    alpha: float = Field(default=0.1, ge=0)

    def passes(self, task_index: int) -> Passes:
        """Return one pass for each adapter so far; tests keep those of earlier ones."""
        return Passes(TRAINING_PASSES, task_index + 1, testing=1, querying=task_index)


class EASE(Learner):
    """Frozen backbone, adapters for each task, prototypes in every subspace."""

    config_class = EASEConfig
    trained_parts = "an adapter per task"
    has_task_experts = True
    takes_domains = False
    predicts_from_query = True
    predicts_while_training = False
    backbone: PromptableViT

    def __init__(self, backbone: PromptableViT, config: EASEConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.experts = nn.ModuleList()
        # Of task i the prototypes (classes of the task, i+1, D); zeros before its end.
        self.prototypes = nn.ModuleList()
        self.head: CosineHead | None = None

    def begin_task(self, task: Task) -> None:
        """Add adapters and a head for the task; freeze the adapters of finished tasks."""
        super().begin_task(task)
        self.experts.requires_grad_(False)
        backbone, config = self.backbone, self.config
        self.experts.append(
            Adapters(backbone.depth, backbone.width, config.adapter_width, dropout=config.adapter_dropout)
        )
        shape = len(task.classes), len(self.tasks), backbone.width
        self.prototypes.append(
            TaskStatistics({"of_classes": next(self.experts.parameters()).new_zeros(shape)})
        )
        self.head = CosineHead(backbone.width, len(task.classes))

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the task's adapters and head; nothing after its end."""
        if self.head is None:
            return []
        return [
            ParameterGroup("experts", list(self.experts[-1].parameters())),
            ParameterGroup("heads", list(self.head.parameters())),
        ]

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) over the task's classes by the task's adapters and head."""
        assert self.head is not None
        return LearnerOutput(self.head(self._encode(self.task, images)), self.task_columns, {})

    @property
    def query_parts(self) -> tuple[tuple[nn.Module, ...], ...]:
        """A part for every task: what earlier adapters make of an image stays."""
        return tuple((self.backbone, expert) for expert in self.experts)

    def query_part(self, images: Tensor, number: int) -> Tensor:
        """Return the class token (N, D) under the adapters of a task, without gradient."""
        with evaluating(self):
            return self._encode(self.tasks[number], images)

    def query(self, images: Tensor) -> Tensor:
        """Return the class tokens (N, (t+1) D) under the adapters of all tasks so far, without gradient."""
        return torch.cat([self.query_part(images, number) for number in range(len(self.tasks))], dim=1)

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return the weighted cosines (N, seen) in all subspaces; 0 for classes without a prototype so far."""
        query = self.query(images) if query is None else query
        features = query.to(torch.promote_types(query.dtype, torch.float32)).unflatten(
            1, (len(self.tasks), -1)
        )
        scores: Tensor = features.new_zeros(len(features), self.num_seen_classes)
        observed = self._observed()
        if observed:
            with torch.autocast(features.device.type, enabled=False):
                known = subspace_scores(features[:, : len(observed)], observed, alpha=self.config.alpha)
            scores[:, : known.shape[1]] = known
        return scores

    def predict_task(self, images: Tensor, task: Task) -> Tensor:
        """Return cosines (N, K) to the task's prototypes in its own subspace."""
        with evaluating(self):
            features = self._encode(task, images)
        prototypes = self._observed()[task.index][:, -1]
        with torch.autocast(features.device.type, enabled=False):
            features = F.normalize(features.to(prototypes.dtype), dim=1)
            return features @ F.normalize(prototypes, dim=1).T

    def end_task(self, task: Task, features: Features) -> None:
        """Drop the head; keep the mean of each class in every subspace."""
        self._finish()
        values, labels, _ = features()
        means = [values[labels == class_index].double().mean(dim=0) for class_index in task.classes]
        self._observed()[-1].copy_(torch.stack(means).unflatten(1, (len(self.tasks), -1)))

    def allocate(self, task: Task, shapes: Mapping[str, Sequence[int]]) -> None:
        """Drop the head, which a finished task no longer has."""
        super().allocate(task, shapes)
        self._finish()

    def _observed(self) -> list[Tensor]:
        """Return the prototypes of the finished tasks."""
        num_finished = len(self.tasks) - (self.head is not None)
        return [each.get_buffer("of_classes") for each in list(self.prototypes)[:num_finished]]

    def _finish(self) -> None:
        self.head = None
        self.experts.requires_grad_(False)

    def _encode(self, task: Task, images: Tensor) -> Tensor:
        return self.backbone.encode(images, adaptation=self.experts[task.index]())[:, 0]


def completed_prototypes(observed: Sequence[Tensor]) -> Tensor:
    """Return a prototype of every class in every subspace (K,T,D).

    A class of task i has none in the subspace of a later task j. Let s be the softmax of its cosines, in subspace i, to
    all classes of tasks j to T-1: its prototype in subspace j is the sum of theirs, weighted by s.

    Args:
        observed: For task i, from 0, the prototypes (classes of the task, i+1, D) in the subspaces up to its own.
    """
    num_subspaces = len(observed)
    rows = [list(part.unbind(dim=1)) for part in observed]
    for own, old in enumerate(rows):
        for newer in range(own + 1, num_subspaces):
            there = torch.cat([part[:, own] for part in observed[newer:]])
            wanted = torch.cat([part[:, newer] for part in observed[newer:]])
            likeness = F.normalize(old[own], dim=1) @ F.normalize(there, dim=1).T
            old.append(likeness.softmax(dim=1) @ wanted)
    return torch.cat([torch.stack(row, dim=1) for row in rows])


def subspace_scores(features: Tensor, observed: Sequence[Tensor], *, alpha: float) -> Tensor:
    """Return, for each class, its cosine in its own subspace + alpha / (T-1) times those in all others (N,K).

    Args:
        features: (N,T,D), one feature for each subspace.
        observed: As for ``completed_prototypes``.
        alpha: Weight of the other subspaces together.
    """
    prototypes = completed_prototypes(observed).to(features)
    num_subspaces = len(observed)
    sizes = torch.tensor([len(part) for part in observed])
    own = torch.eye(num_subspaces).repeat_interleave(sizes, dim=0)
    weights = own + alpha / max(num_subspaces - 1, 1) * (1 - own)
    weighted = F.normalize(prototypes, dim=2) * weights.to(prototypes)[..., None]
    return F.normalize(features, dim=2).flatten(1) @ weighted.flatten(1).T
