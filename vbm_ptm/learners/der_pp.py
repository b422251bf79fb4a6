"""DER++: Dark-ER with the labels of a second draw.

Buzzega, Boschini, Porrello, Abati, Calderara: "Dark Experience for General Continual Learning: a Strong, Simple
Baseline", NeurIPS 2020 (repository mammoth). In addition to the cross-entropy of current images, one draw from the
reservoir is trained to reproduce its stored logits, and another, independent one its labels. Each has its own forward
pass.

Differs from the official code in:
  - The reservoir is a function of (seed, task, epoch, row): the same distribution, whatever the order of the images.
  - If the head grows beyond the plan of the run, older logits count only in the columns that they have.
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
from vbm_ptm.learners.logit_memory import LogitMemory
from vbm_ptm.replay import Rehearsal, Replay, ReplayOutput


class DERPPConfig(LearnerConfig):
    """Settings of DER++.

    Attributes:
        capacity: Images in the reservoir, each with its logits.
        draw_size: Images (views counted) of each of the two draws of a step.
        alpha: Weight of the difference from the remembered logits.
        beta: Weight of the cross-entropy of the second draw.
    """

    name: str = "der_pp"
    capacity: int = Field(default=200, ge=1)
    draw_size: int = Field(default=32, ge=1)
    alpha: float = Field(default=0.1, ge=0)
    beta: float = Field(default=0.5, ge=0)

    @property
    def rehearsal(self) -> Rehearsal:
        """Two draws for every step, and the logits."""
        return Rehearsal("stream", self.capacity, draws=2, draw_size=self.draw_size, remembers_logits=True)


class DERPP(Learner):
    """Backbone and one head for all classes, trained on its own earlier logits and on labels."""

    config_class = DERPPConfig
    trained_parts = "backbone, full head"
    backbone_class = Backbone

    def __init__(self, backbone: Backbone, config: DERPPConfig, *, num_tasks: int) -> None:
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
        """Return logits (N, K) over all columns, and for each draw its distance from its targets."""
        logits = self._logits(images)
        columns = torch.arange(logits.shape[1], device=logits.device)
        if not replays:
            return LearnerOutput(logits, columns, {})
        past, labelled = replays
        recalled, replayed = self._logits(past.images), self._logits(labelled.images)
        distances = self.memory.distances(recalled, past.slots)
        losses = F.cross_entropy(replayed, labelled.labels, reduction="none")
        outputs = (
            ReplayOutput(recalled, {"dark": self.config.alpha * distances}),
            ReplayOutput(replayed, {"replay": self.config.beta * losses}),
        )
        return LearnerOutput(logits, columns, {}, replays=outputs)

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
