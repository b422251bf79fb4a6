"""A-GEM: steps that do not increase the loss on past images, as estimated from one draw of them.

Chaudhry, Ranzato, Rohrbach, Elhoseiny: "Efficient Lifelong Learning with A-GEM", ICLR 2019. Current images and a draw
of past ones have a pass each. Where their gradients g and r conflict (g r < 0), g loses its component along r:
g - (g r / r r) r.

Differs from the official code and that of Buzzega et al. (2020), repository mammoth, in:
  - The buffer holds ``capacity`` images in total, the same number of each class so far, chosen at random at the end of
    each task. Mammoth keeps one batch per task, whatever the capacity.
  - The network has one head for all classes of the run, as in mammoth; Chaudhry et al. give it the task.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import SharedHead
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput
from vbm_ptm.replay import ExemplarSet, Rehearsal


class AGEMConfig(LearnerConfig):
    """Settings of A-GEM.

    Attributes:
        capacity: Images in the buffer, divided equally among the classes.
        draw_size: Images (views counted) that are drawn from it for every step.
    """

    name: str = "agem"
    capacity: int = Field(default=200, ge=1)
    draw_size: int = Field(default=32, ge=1)

    @property
    def rehearsal(self) -> Rehearsal:
        """One draw of chosen images for every step, with a pass of its own."""
        return Rehearsal(
            "stream",
            self.capacity,
            draws=1,
            draw_size=self.draw_size,
            filled_by="tasks",
            passes="projected",
        )


class AGEM(Learner):
    """Backbone and one head for all classes; past images correct the gradient."""

    config_class = AGEMConfig
    trained_parts = "backbone, full head"
    backbone_class = Backbone

    def __init__(self, backbone: Backbone, config: AGEMConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.head = SharedHead(backbone.width)
        self.exemplars = ExemplarSet(config.capacity)

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

    def end_task(self, task: Task, features: Features) -> None:
        """Choose images of the task at random."""
        self.exemplars.add(None, *features.labels(), task=task.index)


def projected(current: Tensor, past: Tensor) -> Tensor:
    """Return a gradient (P,) without its component along another if they conflict; never synchronises the device."""
    conflict = (current @ past).clamp(max=0)
    return current - conflict / (past @ past).clamp(min=torch.finfo(past.dtype).tiny) * past
