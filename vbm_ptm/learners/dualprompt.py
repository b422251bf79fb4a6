"""DualPrompt: general and expert prefixes on a frozen backbone.

Wang et al.: "DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning", ECCV 2022 (section 4; details
follow the PyTorch port JH-LEE-KR/dualprompt-pytorch).

Differs from the PyTorch port in:
  - Keys and values, and the prefixes of different images, cannot be mixed (the port reshapes where it should permute).
  - Evaluation matches each image independently, and only with the keys of tasks that were trained; there is no pool
    that can be too small or hold keys that were never trained.
  - A head per task instead of one for all classes; in prediction classes that have not been seen do not compete.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.base import Learner, LearnerConfig, LearnerOutput, ParameterGroup
from vbm_ptm.learners.config import QUERIED, Passes
from vbm_ptm.prompts.blocks import check_blocks
from vbm_ptm.prompts.general_expert import ExpertPrefixes, GeneralPrefixes
from vbm_ptm.prompts.queries import Queries


class DualPromptConfig(LearnerConfig):
    """Settings of DualPrompt; the defaults are those of the PyTorch port for CIFAR-100.

    Attributes:
        general_blocks: Blocks with a general prefix.
        general_length: Tokens of a general prefix, for keys and values each.
        expert_blocks: Blocks with an expert prefix.
        expert_length: Tokens of an expert prefix, for keys and values each.
        pull_weight: Weight of the term that pulls the task's key towards the query.
        transfer_prompts: Start a task's expert prefixes from those of the task before.
    """

    usual_passes: ClassVar[Passes] = QUERIED
    name: str = "dualprompt"
    general_blocks: tuple[int, ...] = Field(default=(0, 1), min_length=1)
    general_length: int = Field(default=5, ge=1)
    expert_blocks: tuple[int, ...] = Field(default=(2, 3, 4), min_length=1)
    expert_length: int = Field(default=5, ge=1)
    pull_weight: float = Field(default=1.0, ge=0)
    transfer_prompts: bool = True


class DualPrompt(Learner):
    """Frozen backbone, general prefixes for all tasks if there are any, an expert and a key for each task."""

    config_class: ClassVar[type[LearnerConfig]] = DualPromptConfig
    trained_parts = "prefixes, keys, heads"
    query_roles = frozenset({"pull"})
    has_task_experts = True
    backbone: PromptableViT

    def __init__(self, backbone: PromptableViT, config: DualPromptConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        general = config.general_blocks
        setting = "learner.general_blocks and learner.expert_blocks" if general else "learner.expert_blocks"
        check_blocks(general + config.expert_blocks, depth=backbone.depth, setting=setting)
        self.general: GeneralPrefixes | None = None
        if general:
            self.general = GeneralPrefixes(general, config.general_length, backbone.width)
        self.experts = ExpertPrefixes(config.expert_blocks, config.expert_length, backbone.width)
        self.heads = TaskHeads(backbone.width)

    def begin_task(self, task: Task) -> None:
        """Add an expert with its key and a head; freeze what belongs to finished tasks alone."""
        super().begin_task(task)
        self.experts.append(copy_previous=self.config.transfer_prompts)
        self.heads.append(len(task.new_classes))
        self.heads.train_only(task.classes)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return general prefixes, the task's expert and key, and the trainable heads."""
        return [
            *([] if self.general is None else [ParameterGroup("general", [self.general.prefixes])]),
            ParameterGroup("experts", [self.experts.prefixes[-1]]),
            ParameterGroup("keys", [self.experts.keys[-1]]),
            ParameterGroup("heads", self.heads.trainable_parameters()),
        ]

    def forward(self, images: Tensor, labels: Tensor, queries: Queries | None = None) -> LearnerOutput:
        """Return logits (N, K) over the task's classes with the task's own expert, and the pull of every image."""
        similarity = self.experts.similarity(self.query(images) if queries is None else queries.pull)
        logits = self._logits(images, self.experts.of_task(self.task.index))[:, self.task_columns]
        pull = -self.config.pull_weight * similarity[:, self.task.index]
        return LearnerOutput(logits, self.task_columns, {"pull": pull})

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return logits (N, seen); every image has the expert whose key is nearest to its query."""
        chosen = self.chosen_tasks(self.query(images) if query is None else query)
        return self._logits(images, self.experts.of_images(chosen))

    def chosen_tasks(self, query: Tensor) -> Tensor:
        """Return the task (N,) with the key nearest to each query."""
        return self.experts.similarity(query).argmax(dim=1)

    def predict_task(self, images: Tensor, task: Task) -> Tensor:
        """Return logits (N, K) over the task's classes with the task's own expert."""
        logits = self._logits(images, self.experts.of_task(task.index))
        return logits[:, self.columns(task.classes, images.device)]

    def _logits(self, images: Tensor, experts: dict[int, Tensor]) -> Tensor:
        """Return logits (N, seen) with expert prefixes, (N or 1, 2, L, D) for each of their blocks."""
        prefixes = experts if self.general is None else self.general() | experts
        scores: Tensor = self.heads(self.backbone.encode(images, prefixes=prefixes)[:, 0])
        return scores
