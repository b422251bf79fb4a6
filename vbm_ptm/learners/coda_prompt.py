"""CODA-Prompt: prefixes as attention-weighted sums of components that grow with the tasks.

Smith et al.: "CODA-Prompt: COntinual Decomposed Attention-based Prompting for Rehearsal-Free Continual Learning",
CVPR 2023 (section 4; details follow GT-RIPL/CODA-Prompt).

Differs from the official code in:
  - New components, keys and attention vectors are exactly orthonormal to the span of the old ones.
  - Components of each task are parameters of their own, so that finished ones are frozen bit by bit. Components that
    no task has reached do not exist; a task beyond those planned gets as many as the others.
  - The last, incomplete batch of an epoch is used (the official loader drops it).
  - A head per task instead of one for all classes; it starts from a truncated normal with std 0.02 and bias 0, as
    with the other learners here, not from PyTorch's default.
  - ``orthogonality_weight`` defaults to 0 as in the released scripts: the paper's penalty (0.1) came before
    orthonormal initialisation, which makes it needless.
"""

from __future__ import annotations

import logging
from typing import ClassVar

import torch
from pydantic import Field, field_validator
from torch import Tensor, nn

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.base import Learner, LearnerConfig, LearnerOutput, ParameterGroup
from vbm_ptm.learners.config import QUERIED, Passes
from vbm_ptm.prompts.blocks import check_blocks
from vbm_ptm.prompts.decomposed import DecomposedPrompt
from vbm_ptm.prompts.queries import Queries

logger = logging.getLogger(__name__)


class CodaPromptConfig(LearnerConfig):
    """Settings of CODA-Prompt; the defaults are the official ones.

    Attributes:
        pool_size: Components of a block over all planned tasks; each task gets pool_size // tasks.
        prompt_length: Tokens of a prompt: the first half are keys, the second half values.
        blocks: Blocks with a prompt.
        orthogonality_weight: Weight of the penalty on components, keys and attention vectors.
    """

    usual_passes: ClassVar[Passes] = QUERIED
    name: str = "coda_prompt"
    pool_size: int = Field(default=100, ge=1)
    prompt_length: int = Field(default=8, ge=2)
    blocks: tuple[int, ...] = Field(default=(0, 1, 2, 3, 4), min_length=1)
    orthogonality_weight: float = Field(default=0.0, ge=0)

    @field_validator("prompt_length")
    @classmethod
    def _check_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("a prompt is cut into keys and values, so that its length must be even")
        return value


class CodaPrompt(Learner):
    """Frozen backbone, decomposed prompts in its first blocks, heads on the class token."""

    config_class = CodaPromptConfig
    trained_parts = "components, keys, attention vectors, heads"
    query_roles = frozenset({"query"})
    backbone: PromptableViT

    def __init__(self, backbone: PromptableViT, config: CodaPromptConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        check_blocks(config.blocks, depth=backbone.depth, setting="learner.blocks")
        self.num_components = config.pool_size // num_tasks
        if self.num_components < 1:
            raise UsageError(
                f"learner.pool_size {config.pool_size} gives none of {num_tasks} tasks a component; "
                f"it must be at least {num_tasks}."
            )
        if config.pool_size % num_tasks:
            logger.info(
                "pool of %d for %d tasks: %d components each, %d unused",
                config.pool_size,
                num_tasks,
                self.num_components,
                config.pool_size % num_tasks,
            )
        self.check_room(num_tasks)
        self.prompts = nn.ModuleDict(
            {str(block): DecomposedPrompt(config.prompt_length, backbone.width) for block in config.blocks}
        )
        self.heads = TaskHeads(backbone.width)

    def begin_task(self, task: Task) -> None:
        """Add the task's components and a head; freeze what belongs to finished tasks alone.

        Raises:
            UsageError: The width leaves no room for components orthogonal to the old ones.
        """
        super().begin_task(task)
        self.check_room(task.index + 1)
        for prompt in self._prompts().values():
            prompt.append(self.num_components)
        self.heads.append(len(task.new_classes))
        self.heads.train_only(task.classes)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the task's components, keys and attention vectors of all blocks, and the trainable heads."""
        prompts = self._prompts().values()
        return [
            ParameterGroup("components", [prompt.components[-1] for prompt in prompts]),
            ParameterGroup("keys", [prompt.keys[-1] for prompt in prompts]),
            ParameterGroup("attentions", [prompt.attentions[-1] for prompt in prompts]),
            ParameterGroup("heads", self.heads.trainable_parameters()),
        ]

    def forward(self, images: Tensor, labels: Tensor, queries: Queries | None = None) -> LearnerOutput:
        """Return logits (N, K) over the task's classes, and the penalty if it has a weight."""
        query = self.query(images) if queries is None else queries.query
        logits = self._logits(images, query)[:, self.task_columns]
        if not self.config.orthogonality_weight:
            return LearnerOutput(logits, self.task_columns, {})
        penalty = torch.stack([prompt.orthogonality_penalty() for prompt in self._prompts().values()]).sum()
        return LearnerOutput(
            logits, self.task_columns, {"orthogonality": self.config.orthogonality_weight * penalty}
        )

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return logits (N, seen)."""
        return self._logits(images, self.query(images) if query is None else query)

    def check_room(self, num_tasks: int) -> None:
        """Refuse more tasks than the width has room for, each with as many components as one that was planned."""
        needed, width = num_tasks * self.num_components, self.backbone.width
        if needed > width:
            raise UsageError(
                f"{num_tasks} tasks with {self.num_components} components each need {needed} orthogonal keys, but the "
                f"backbone has {width} dimensions: a run that begins with a learner.pool_size of at most "
                f"{width // num_tasks * self.num_tasks} has room for them."
            )

    def _prompts(self) -> dict[int, DecomposedPrompt]:
        return {
            int(block): prompt
            for block, prompt in self.prompts.items()
            if isinstance(prompt, DecomposedPrompt)
        }

    def _logits(self, images: Tensor, query: Tensor) -> Tensor:
        prefixes = {block: prompt.prefix(query) for block, prompt in self._prompts().items()}
        scores: Tensor = self.heads(self.backbone.encode(images, prefixes=prefixes)[:, 0])
        return scores
