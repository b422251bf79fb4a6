"""A-GEM: a step that does not raise the loss on past images, as far as one draw of them tells.

Chaudhry, Ranzato, Rohrbach, Elhoseiny: "Efficient Lifelong Learning with A-GEM", ICLR 2019. Current images and a draw
of past ones have a pass each. Where their gradients g and r point apart (g r < 0), g loses its part along r:
g - (g r / r r) r.

Differs from the official code and that of Buzzega et al. (2020), repository mammoth, in:
  - The buffer holds ``capacity`` images in all, equally many of each class so far, chosen by chance at the end of each
    task. Mammoth keeps one batch of a task, whatever the capacity.
  - The network has one head for all classes of the run, as in mammoth; Chaudhry et al. tell it the task.
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
    """Backbone and one head for all classes; past images bend the gradient."""

    config_class = AGEMConfig
    trained_parts = "backbone, full head"
    backbone_class = Backbone

    def __init__(self, backbone: Backbone, config: AGEMConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.head = SharedHead(backbone.width)
        self.exemplars = ExemplarSet(config.capacity)

    def begin_task(self, task: Task) -> None:
        """Make a column for every class of the run, as far as it is known."""
        super().begin_task(task)
        self.head.widen(max(task.num_planned_classes, task.num_seen_classes))

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) over all columns, of current images or of a draw."""
        logits = self.head(self.backbone.features(images))
        return LearnerOutput(logits, torch.arange(logits.shape[1], device=logits.device), {})

    def project_gradient(self, current: Tensor, past: Tensor) -> Tensor:
        """Return the current gradient (P,) without its part against the past one."""
        return projected(current, past)

    def end_task(self, task: Task, features: Features) -> None:
        """Choose images of the task by chance."""
        self.exemplars.add(None, *features.labels(), task=task.index)


def projected(current: Tensor, past: Tensor) -> Tensor:
    """Return a gradient (P,) without its part along another one where both point apart; the device is not asked."""
    conflict = (current @ past).clamp(max=0)
    return current - conflict / (past @ past).clamp(min=torch.finfo(past.dtype).tiny) * past
