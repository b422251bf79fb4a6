"""S-Prompt++: an expert prefix and a key for each task, matched per image, with one head over all tasks.

The variant of S-Prompts that HiDe-Prompt (Wang et al., NeurIPS 2023; repository thu-ml/HiDe-Prompt, configurations
``*_sprompt_5e``) compares with: DualPrompt's experts in the first five blocks without its general prefixes.

Differs from that code in:
  - Keys and values, and the prefixes of different images, cannot be mixed.
  - Evaluation matches each image alone, and only with the keys of tasks that were trained.
  - A head per task; in prediction classes that have not been seen do not compete.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.base import Learner, LearnerConfig, LearnerOutput, ParameterGroup
from vbm_ptm.prompts.blocks import check_blocks
from vbm_ptm.prompts.general_expert import ExpertPrefixes
from vbm_ptm.prompts.queries import Queries


class SPromptPPConfig(LearnerConfig):
    """Settings of S-Prompt++; the defaults are those of HiDe-Prompt's comparison.

    Attributes:
        expert_blocks: Blocks with an expert prefix.
        expert_length: Tokens of a prefix, for keys and values each.
        pull_weight: Weight of the term that pulls the task's key towards the query.
        transfer_prompts: Start a task's prefixes from those of the task before.
    """

    name: str = "s_prompt_pp"
    expert_blocks: tuple[int, ...] = Field(default=(0, 1, 2, 3, 4), min_length=1)
    expert_length: int = Field(default=20, ge=1)
    pull_weight: float = Field(default=1.0, ge=0)
    transfer_prompts: bool = True


class SPromptPP(Learner):
    """Frozen backbone, an expert and a key for each task."""

    config_class = SPromptPPConfig
    trained_parts = "prefixes, keys, heads"
    query_roles = frozenset({"pull"})
    has_task_experts = True
    backbone: PromptableViT

    def __init__(self, backbone: PromptableViT, config: SPromptPPConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        check_blocks(config.expert_blocks, depth=backbone.depth, setting="learner.expert_blocks")
        self.experts = ExpertPrefixes(config.expert_blocks, config.expert_length, backbone.width)
        self.heads = TaskHeads(backbone.width)

    def begin_task(self, task: Task) -> None:
        """Add an expert with its key and a head; freeze what belongs to finished tasks alone."""
        super().begin_task(task)
        self.experts.append(copy_previous=self.config.transfer_prompts)
        self.heads.append(len(task.new_classes))
        self.heads.train_only(task.classes)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the task's expert and key, and the trainable heads."""
        return [
            ParameterGroup("experts", [self.experts.prefixes[-1]]),
            ParameterGroup("keys", [self.experts.keys[-1]]),
            ParameterGroup("heads", self.heads.trainable_parameters()),
        ]

    def forward(self, images: Tensor, labels: Tensor, queries: Queries | None = None) -> LearnerOutput:
        """Return logits (N, K) over the task's classes with the task's own expert, and the pull of every image."""
        similarity = self.experts.similarity(self.query(images) if queries is None else queries.pull)
        logits = self._logits(images, self.experts.of_task(self.task.index))[:, self.task_columns]
        return LearnerOutput(
            logits, self.task_columns, {"pull": -self.config.pull_weight * similarity[:, self.task.index]}
        )

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return logits (N, seen); every image has the expert whose key is nearest to its query."""
        query = self.query(images) if query is None else query
        return self._logits(images, self.experts.of_images(self.experts.similarity(query).argmax(dim=1)))

    def predict_task(self, images: Tensor, task: Task) -> Tensor:
        """Return logits (N, K) over the task's classes with the task's own expert."""
        logits = self._logits(images, self.experts.of_task(task.index))
        return logits[:, self.columns(task.classes, images.device)]

    def _logits(self, images: Tensor, prefixes: dict[int, Tensor]) -> Tensor:
        scores: Tensor = self.heads(self.backbone.encode(images, prefixes=prefixes)[:, 0])
        return scores
