"""L2P: learning to prompt from a shared pool.

Wang et al.: "Learning to Prompt for Continual Learning", CVPR 2022 (section 4, equations 3 to 5; details follow the
PyTorch port JH-LEE-KR/l2p-pytorch, options of the JAX original are settings).

Differs from the PyTorch port in:
  - Evaluation chooses prompts for each image independently; the vote over a batch is an option of training only.
  - Equal votes and equal matches go to the lower prompt number, where the port's choice is undefined.
  - A head per task instead of one for all classes, so that nothing moves the rows of finished tasks; in prediction
    classes that have not been seen do not compete.
"""

from __future__ import annotations

import logging
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.base import Learner, LearnerConfig, LearnerOutput, ParameterGroup
from vbm_ptm.learners.config import QUERIED, Passes
from vbm_ptm.prompts.pool import PromptPool
from vbm_ptm.prompts.queries import Queries

logger = logging.getLogger(__name__)


class L2PConfig(LearnerConfig):
    """Settings of L2P; the defaults are those of the PyTorch port for CIFAR-100.

    Attributes:
        pool_size: Prompts in the pool.
        prompt_length: Tokens of a prompt.
        top_k: Prompts that an image is given.
        pull_weight: Weight of the term that pulls the chosen keys towards the query.
        prompt_position: Position embedding of prompt tokens: that of the class token (PyTorch port) or none (JAX).
        batchwise_prompt: In training, give all images of a step the prompts that most of them choose.
        transfer_prompts: Start the prompts number t * k to (t + 1) * k of task t from those of the task before.
    """

    usual_passes: ClassVar[Passes] = QUERIED
    name: str = "l2p"
    pool_size: int = Field(default=10, ge=1)
    prompt_length: int = Field(default=5, ge=1)
    top_k: int = Field(default=5, ge=1)
    pull_weight: float = Field(default=0.1, ge=0)
    prompt_position: Literal["class_token", "none"] = "class_token"
    batchwise_prompt: bool = False
    transfer_prompts: bool = False

    @property
    def forbids_accumulation(self) -> str | None:
        """Why a step cannot be cut: its images vote for their prompts."""
        vote = "learner.batchwise_prompt is true, so that all images of a step choose their prompts together"
        return vote if self.batchwise_prompt else None

    @model_validator(mode="after")
    def _check_top_k(self) -> L2PConfig:
        if self.top_k > self.pool_size:
            raise ValueError(f"top_k {self.top_k} prompts cannot be chosen from pool_size {self.pool_size}")
        return self


class L2P(Learner):
    """Frozen backbone, a pool of prompts before the patches, heads on the mean of the prompts' outputs."""

    config_class = L2PConfig
    trained_parts = "prompts, keys, heads"
    query_roles = frozenset({"query", "pull"})
    backbone: PromptableViT

    def __init__(self, backbone: PromptableViT, config: L2PConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.pool = PromptPool(config.pool_size, config.prompt_length, backbone.width, top_k=config.top_k)
        self.heads = TaskHeads(backbone.width)

    def begin_task(self, task: Task) -> None:
        """Add a head for the new classes, freeze heads without the task's classes, transfer prompts if asked to."""
        super().begin_task(task)
        self.heads.append(len(task.new_classes))
        self.heads.train_only(task.classes)
        if self.config.transfer_prompts and task.index > 0:
            self._transfer(task.index)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return prompts, keys and the trainable heads."""
        return [
            ParameterGroup("prompts", [self.pool.prompts]),
            ParameterGroup("keys", [self.pool.keys]),
            ParameterGroup("heads", self.heads.trainable_parameters()),
        ]

    def forward(self, images: Tensor, labels: Tensor, queries: Queries | None = None) -> LearnerOutput:
        """Return logits (N, K) over the task's classes, and the pull term of every image."""
        similarity = self.pool.similarity(self.query(images) if queries is None else queries.query)
        selected = self.pool.select(similarity)
        if self.config.batchwise_prompt:
            selected = self.pool.vote(selected)
        if self.training:
            self._tally(selected)
        drawn = similarity if queries is None else self.pool.similarity(queries.pull)
        pull = -self.config.pull_weight * self.pool.pull(drawn, selected)
        return LearnerOutput(
            self._logits(images, selected)[:, self.task_columns], self.task_columns, {"pull": pull}
        )

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return logits (N, seen); every image has the prompts of its own query."""
        query = self.query(images) if query is None else query
        return self._logits(images, self.pool.select(self.pool.similarity(query)))

    def _logits(self, images: Tensor, selected: Tensor) -> Tensor:
        tokens = self.pool.gather(selected)
        if self.config.prompt_position == "class_token":
            tokens = tokens + self.backbone.class_position
        encoded = self.backbone.encode(images, tokens=tokens)
        scores: Tensor = self.heads(encoded[:, 1 : 1 + tokens.shape[1]].mean(dim=1))
        return scores

    @torch.no_grad()
    def _tally(self, selected: Tensor) -> None:
        """Count how often each prompt is given to an image; ``selected`` (N, k)."""
        numbers = selected.flatten()
        counts = self.tallies.setdefault("prompt_selections", numbers.new_zeros(len(self.pool.keys)))
        counts.scatter_add_(0, numbers, torch.ones_like(numbers))

    @torch.no_grad()
    def _transfer(self, task_index: int) -> None:
        top_k, size = self.pool.top_k, self.config.pool_size
        first, last = task_index * top_k, (task_index + 1) * top_k
        if last > size:
            logger.info("task %d: no prompts left in the pool of %d to transfer to", task_index + 1, size)
            return
        self.pool.prompts[first:last] = self.pool.prompts[first - top_k : first].clone()
