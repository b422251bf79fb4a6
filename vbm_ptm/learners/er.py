"""ER: experience replay, the simplest rehearsal.

Each step also trains on a draw from a reservoir of past images (Riemer et al., "Learning to Learn without Forgetting by
Maximizing Transfer and Minimizing Interference", ICLR 2019; Chaudhry et al., "On Tiny Episodic Memories in Continual
Learning", 2019; compared in Buzzega et al., "Dark Experience for General Continual Learning", NeurIPS 2020, repository
mammoth). One forward pass, one cross-entropy over the union of both, over the columns of all classes of the run.

Differs from the official code in:
  - The reservoir is a function of (seed, task, epoch, row): the same distribution, whatever the order of the images.
  - Every replayed image has its own crop and flip.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import SharedHead
from vbm_ptm.learners.base import Learner, LearnerConfig, LearnerOutput
from vbm_ptm.replay import Rehearsal, Replay, ReplayOutput


class ERConfig(LearnerConfig):
    """Settings of experience replay.

    Attributes:
        capacity: Images in the reservoir.
        draw_size: Images (views counted) that are drawn from it for every step.
        distinct: Hold an image at most once; by default, as published, each of its presentations may be held.
    """

    name: str = "er"
    capacity: int = Field(default=200, ge=1)
    draw_size: int = Field(default=32, ge=1)
    distinct: bool = False

    @property
    def rehearsal(self) -> Rehearsal:
        """One draw for every step."""
        return Rehearsal(
            "stream", self.capacity, draws=1, draw_size=self.draw_size, is_distinct=self.distinct
        )


class ER(Learner):
    """Backbone and one head for all classes, trained on current and past images alike."""

    config_class = ERConfig
    trained_parts = "backbone, full head"
    backbone_class = Backbone

    def __init__(self, backbone: Backbone, config: ERConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.head = SharedHead(backbone.width)

    def begin_task(self, task: Task) -> None:
        """Add a column for every class of the run, as far as these are known."""
        super().begin_task(task)
        self.head.widen(max(task.num_planned_classes, task.num_seen_classes))

    def forward(self, images: Tensor, labels: Tensor, replays: tuple[Replay, ...] = ()) -> LearnerOutput:
        """Return logits (N, K) over all columns and the cross-entropy of current and past images."""
        together = torch.cat([images, *(replay.images for replay in replays)])
        logits = self.head(self.backbone.features(together))
        targets = torch.cat([labels, *(replay.labels for replay in replays)])
        current, *past = logits.split([len(images), *(len(replay.images) for replay in replays)])
        return LearnerOutput(
            current,
            torch.arange(logits.shape[1], device=logits.device),
            {},
            supervised=F.cross_entropy(logits, targets, reduction="none"),
            replays=tuple(ReplayOutput(own, {}) for own in past),
        )
