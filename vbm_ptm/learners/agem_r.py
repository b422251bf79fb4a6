"""A-GEM-R: A-GEM with a reservoir of past images.

Chaudhry et al., ICLR 2019, as ``agem``; the reservoir of Buzzega et al. (2020), repository mammoth, holds images of the
current task too.

Differs from the official code in:
  - Past images are transformed like current ones; mammoth uses them raw, without normalisation.
  - The reservoir is a function of (seed, task, epoch, row): the same distribution, whatever the order of the images.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import SharedHead
from vbm_ptm.learners.agem import projected
from vbm_ptm.learners.base import Learner, LearnerConfig, LearnerOutput
from vbm_ptm.replay import Rehearsal


class AGEMRConfig(LearnerConfig):
    """Settings of A-GEM-R.

    Attributes:
        capacity: Images in the reservoir.
        draw_size: Images (views counted) that are drawn from it for every step.
    """

    name: str = "agem_r"
    capacity: int = Field(default=200, ge=1)
    draw_size: int = Field(default=32, ge=1)

    @property
    def rehearsal(self) -> Rehearsal:
        """One draw for every step, with a pass of its own."""
        return Rehearsal("stream", self.capacity, draws=1, draw_size=self.draw_size, passes="projected")


class AGEMR(Learner):
    """Backbone and one head for all classes; past images correct the gradient."""

    config_class = AGEMRConfig
    trained_parts = "backbone, full head"
    backbone_class = Backbone

    def __init__(self, backbone: Backbone, config: AGEMRConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.head = SharedHead(backbone.width)

    def begin_task(self, task: Task) -> None:
        """Add a column for every class of the run, as far as these are known."""
        super().begin_task(task)
        self.head.widen(max(task.num_planned_classes, task.num_seen_classes))

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) over all columns, of current images or of a draw."""
        logits = self.head(self.backbone.features(images))
        return LearnerOutput(logits, torch.arange(logits.shape[1], device=logits.device), {})

    def project_gradient(self, current: Tensor, past: Tensor) -> Tensor:
        """Return the current gradient (P,) without its component against the past one."""
        return projected(current, past)
