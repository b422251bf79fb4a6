"""S-iPrompt: independent prompts and heads for each session, with the session inferred from the nearest centre.

Wang, Huang, Hong: "S-Prompts Learning with Pre-trained Transformers: An Occam's Razor for Domain Incremental
Learning", NeurIPS 2022 (section 3, image-end prompts; details follow iamwangyabin/S-Prompts, net_type "sip").

Differs from the official code in:
  - Centres are computed from features under the test transform, not from augmented images.
  - Heads start from a truncated normal with std 0.02 and bias 0, as with the other learners here, not from PyTorch's
    default.
  - A session with fewer images than centres gets a centre for each image; n_init of k-means is pinned to 10.
  - Class-incremental use: a session knows its own classes only, all others are ruled out (-inf), so that top-5 counts
    at most the classes of one session.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.backbones import PromptableViT
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
from vbm_ptm.learners.clusters import k_means
from vbm_ptm.learners.config import QUERIED, TRAINING_PASSES, Passes
from vbm_ptm.prompts.task_tokens import TaskTokens, nearest_session

logger = logging.getLogger(__name__)


class SIPromptConfig(LearnerConfig):
    """Settings of S-iPrompt; the defaults are the official ones for DomainNet.

    Attributes:
        prompt_length: Tokens of a session's prompt.
        num_centres: Centres of k-means per session.
        distance: Norm of the distance to a centre; the official code uses L1, the paper L2.
    """

    feature_passes: ClassVar[int] = 1
    usual_passes: ClassVar[Passes] = QUERIED._replace(training=TRAINING_PASSES)
    name: str = "s_iprompt"
    prompt_length: int = Field(default=10, ge=1)
    num_centres: int = Field(default=5, ge=1)
    distance: Literal["l1", "l2"] = "l1"


class SIPrompt(Learner):
    """Frozen backbone; tokens, head and centres for each session."""

    config_class = SIPromptConfig
    trained_parts = "tokens and a head per session"
    has_task_experts = True
    rules_out_classes = True
    backbone: PromptableViT

    def __init__(self, backbone: PromptableViT, config: SIPromptConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.tokens = TaskTokens(config.prompt_length, backbone.width)
        self.heads = TaskHeads(backbone.width)

    def begin_task(self, task: Task) -> None:
        """Add tokens and a head over all classes of the session; freeze those of the sessions before."""
        super().begin_task(task)
        self.tokens.append()
        self.heads.requires_grad_(False)
        self.heads.append(len(task.classes))

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the session's tokens and head."""
        return [
            ParameterGroup("tokens", [self.tokens.tokens[-1]]),
            ParameterGroup("heads", self.heads.trainable_parameters()),
        ]

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) of the session's head."""
        encoded = self.backbone.encode(images, tokens=self.tokens.of_task(self.task.index))
        logits = self.heads.forward_task(self.task.index, encoded[:, 0])
        return LearnerOutput(logits, self.task_columns, {})

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return logits (N, seen) of the nearest session's head; classes unknown to it get -inf."""
        chosen = self.chosen_tasks(self.query(images) if query is None else query)
        encoded = self.backbone.encode(images, tokens=self.tokens.of_images(chosen))
        shape = len(images), self.num_seen_classes
        scores = next(self.heads.parameters()).new_full(shape, -torch.inf)
        for task in self.tasks:
            mine = (chosen == task.index).nonzero()
            columns = self.columns(task.classes, images.device)
            scores[mine, columns] = self.heads.forward_task(task.index, encoded[mine[:, 0], 0])
        return scores

    def chosen_tasks(self, query: Tensor) -> Tensor:
        """Return the session (N,) with the centre nearest to each query."""
        centres = [self.statistics_of(task)["centres"] for task in self.tasks if self.statistics_of(task)]
        if not centres:  # inside the first session there is nothing to choose
            return torch.zeros(len(query), dtype=torch.long, device=query.device)
        return nearest_session(F.normalize(query, dim=1), centres, norm=self.config.distance)

    def predict_task(self, images: Tensor, task: Task) -> Tensor:
        """Return logits (N, K) of the session's own prompt and head."""
        encoded = self.backbone.encode(images, tokens=self.tokens.of_task(task.index))
        return self.heads.forward_task(task.index, encoded[:, 0])

    def end_task(self, task: Task, features: Features) -> None:
        """Find the centres of the session's normalised, un-prompted features."""
        values, _, _ = features()
        points = F.normalize(values, dim=1).double().numpy()
        num_centres = min(self.config.num_centres, len(points))
        if num_centres < self.config.num_centres:
            logger.info("session %d has %d images: as many centres", task.index + 1, num_centres)
        centres, _ = k_means(points, count=num_centres)
        tensor = torch.from_numpy(centres).to(next(self.heads.parameters()))
        self.statistics[str(task.index)] = TaskStatistics({"centres": tensor})

    def statistics_size(self, class_sizes: Sequence[int]) -> int:
        """Return the numbers in a session's centres."""
        numbers: int = min(self.config.num_centres, sum(class_sizes)) * self.backbone.width
        return numbers
