"""Dark-ER: replay of the logits that the network gave when an image entered the buffer.

Buzzega, Boschini, Porrello, Abati, Calderara: "Dark Experience for General Continual Learning: a Strong, Simple
Baseline", NeurIPS 2020 (their DER; repository mammoth). The cross-entropy uses current images; images of a draw from a
reservoir are trained to reproduce their stored logits, by the mean squared difference over all columns of the run.
Current and past images have a forward pass each.

Differs from the official code in:
  - The reservoir is a function of (seed, task, epoch, row): the same distribution, whatever the order of the images.
  - If the head grows beyond the plan of the run, older logits count only in the columns that they have.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import SharedHead
from vbm_ptm.learners.base import Learner, LearnerConfig, LearnerOutput
from vbm_ptm.learners.logit_memory import LogitMemory
from vbm_ptm.replay import Rehearsal, Replay, ReplayOutput


class DarkERConfig(LearnerConfig):
    """Settings of dark experience replay.

    Attributes:
        capacity: Images in the reservoir, each with its logits.
        draw_size: Images (views counted) that are drawn from it for every step.
        alpha: Weight of the difference from the remembered logits.
    """

    name: str = "dark_er"
    capacity: int = Field(default=200, ge=1)
    draw_size: int = Field(default=32, ge=1)
    alpha: float = Field(default=0.3, ge=0)

    @property
    def rehearsal(self) -> Rehearsal:
        """One draw for every step, and the logits."""
        return Rehearsal("stream", self.capacity, draws=1, draw_size=self.draw_size, remembers_logits=True)


class DarkER(Learner):
    """Backbone and one head for all classes, trained to reproduce its own earlier logits."""

    config_class = DarkERConfig
    trained_parts = "backbone, full head"
    backbone_class = Backbone

    def __init__(self, backbone: Backbone, config: DarkERConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.head = SharedHead(backbone.width)
        self.memory = LogitMemory(config.capacity)

    def begin_task(self, task: Task) -> None:
        """Add a column for every class of the run, as far as these are known."""
        super().begin_task(task)
        self.head.widen(max(task.num_planned_classes, task.num_seen_classes))
        self.memory.widen(self.head.out_features)

    def forward(self, images: Tensor, labels: Tensor, replays: tuple[Replay, ...] = ()) -> LearnerOutput:
        """Return logits (N, K) over all columns, and of the draw its distance from the remembered logits."""
        logits = self._logits(images)
        outputs = []
        for past in replays:
            recalled = self._logits(past.images)
            distances = self.memory.distances(recalled, past.slots)
            outputs.append(ReplayOutput(recalled, {"dark": self.config.alpha * distances}))
        columns = torch.arange(logits.shape[1], device=logits.device)
        return LearnerOutput(logits, columns, {}, replays=tuple(outputs))

    @property
    def remembered_bytes(self) -> int:
        """Bytes of the logits."""
        return self.memory.table.nbytes

    def remember(self, slots: Tensor, logits: Tensor) -> None:
        """Keep the logits of images that have entered the buffer."""
        self.memory.remember(slots, logits)

    def _logits(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone.features(images))
        return logits
