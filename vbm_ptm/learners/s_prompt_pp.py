"""S-Prompt++: an expert prefix and a key for each task, matched per image, with one head over all tasks.

The variant of S-Prompts that HiDe-Prompt (Wang et al., NeurIPS 2023; repository thu-ml/HiDe-Prompt, configurations
``*_sprompt_5e``) compares with: DualPrompt's experts in the first five blocks without its general prefixes.

Differs from that code in:
  - Keys and values, and the prefixes of different images, cannot be mixed.
  - Evaluation matches each image independently, and only with the keys of tasks that were trained.
  - A head per task; in prediction classes that have not been seen do not compete.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from vbm_ptm.learners.base import LearnerConfig
from vbm_ptm.learners.config import QUERIED, Passes
from vbm_ptm.learners.dualprompt import DualPrompt


class SPromptPPConfig(LearnerConfig):
    """Settings of S-Prompt++; the defaults are those of HiDe-Prompt's comparison.

    Attributes:
        expert_blocks: Blocks with an expert prefix.
        expert_length: Tokens of a prefix, for keys and values each.
        pull_weight: Weight of the term that pulls the task's key towards the query.
        transfer_prompts: Start a task's prefixes from those of the task before.
    """

    general_blocks: ClassVar[tuple[int, ...]] = ()  # what DualPrompt has beside its experts

    usual_passes: ClassVar[Passes] = QUERIED
    name: str = "s_prompt_pp"
    expert_blocks: tuple[int, ...] = Field(default=(0, 1, 2, 3, 4), min_length=1)
    expert_length: int = Field(default=20, ge=1)
    pull_weight: float = Field(default=1.0, ge=0)
    transfer_prompts: bool = True


class SPromptPP(DualPrompt):
    """DualPrompt without general prefixes: frozen backbone, an expert and a key for each task."""

    config_class = SPromptPPConfig
