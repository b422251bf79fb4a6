"""BiC: bias correction, a scale and a shift of the newest logits, fitted to held-out images.

Wu et al.: "Large Scale Incremental Learning", CVPR 2019. Exemplars of earlier classes are training images of the task,
and the network before the task provides soft targets for each image: with n_old of n classes seen before,
lambda = n_old / n, the loss is (1 - lambda) * cross-entropy + lambda * KL(old || new) by temperature. A few images of
every class, exemplars included, are held out of training; after the task, alpha and beta are fitted to them, which turn
the logits o of new classes into alpha o + beta.

Differs from the official code in:
  - The number of images held out of each class is the given part of the smallest class, at least one.
  - alpha and beta minimise the cross-entropy, with a weak regularisation towards 1 and 0, to convergence instead of for
    some epochs of Adam.
  - They are merged into the classifier, so that the next task also starts from the corrected logits.
  - Herding takes the running mean nearest to the class's, in float64.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import SharedHead
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput
from vbm_ptm.learners.config import TaskSizes
from vbm_ptm.learners.teacher import Teacher, softened_divergence
from vbm_ptm.replay import ExemplarSet, Rehearsal, is_held_out, kept_sizes, num_held_out

logger = logging.getLogger(__name__)

# Regularisation towards alpha = 1 and beta = 0: for separable classes the cross-entropy alone has no minimum.
_PULL = 1e-3


class BiCConfig(LearnerConfig):
    """Settings of bias correction.

    Attributes:
        capacity: Exemplars in total, divided equally among the classes.
        temperature: Temperature that divides the logits of both networks in the distillation.
        held_out: Fraction of the smallest class; this number of images of each class is held out for the correction.
    """

    has_teacher: ClassVar[bool] = True
    name: str = "bic"
    capacity: int = Field(default=2000, ge=1)
    temperature: float = Field(default=2.0, gt=0)
    held_out: float = Field(default=0.1, gt=0, lt=1)

    def viewed_images(self, sizes: TaskSizes) -> int:
        """Return the task's images, and those that are held out for the correction."""
        counts = [*sizes.own, *kept_sizes(self.capacity, sizes.earlier, num_cells=len(sizes.earlier))]
        held_out = num_held_out(min(counts), share=self.held_out) * len(counts) if sizes.task_index else 0
        return sum(sizes.own) + held_out

    @property
    def rehearsal(self) -> Rehearsal:
        """Exemplars among the training images, some of which are held out."""
        return Rehearsal("merged", self.capacity, held_out=self.held_out)


class BiC(Learner):
    """Backbone and one head, a teacher, exemplars and a correction of the newest columns."""

    config_class = BiCConfig
    trained_parts = "backbone, head, a correction of new logits"
    backbone_class = Backbone
    takes_domains = False
    correction: Tensor

    def __init__(self, backbone: Backbone, config: BiCConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.head = SharedHead(backbone.width)
        self.exemplars = ExemplarSet(config.capacity)
        self.teacher = Teacher()
        self.register_buffer("correction", torch.tensor([1.0, 0.0]))

    def begin_task(self, task: Task) -> None:
        """Keep a copy of the network as the teacher, and add columns."""
        super().begin_task(task)
        if task.index:
            self.teacher.hold(backbone=self.backbone, head=self.head)
        self.head.widen(task.num_seen_classes)

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, seen), and of each image the weighted cross-entropy and distillation."""
        logits = self.head(self.backbone.features(images))
        share, auxiliary = self.num_known_classes / self.num_seen_classes, {}
        if self.teacher:
            taught, temperature = self.teacher(images), self.config.temperature
            divergence = softened_divergence(logits[:, : taught.shape[1]], taught, temperature=temperature)
            auxiliary["distillation"] = share * divergence
        losses = (1 - share) * F.cross_entropy(logits, labels, reduction="none")
        columns = torch.arange(logits.shape[1], device=logits.device)
        return LearnerOutput(logits, columns, auxiliary, supervised=losses)

    def end_task(self, task: Task, features: Features) -> None:
        """Correct the new columns by the held-out images, and choose the task's exemplars."""
        self.teacher.clear()
        self.correction = torch.tensor([1.0, 0.0]).to(self.correction)
        values, labels, rows = features()
        if task.index:
            all_rows = torch.cat([rows, self.exemplars.rows])
            all_labels = torch.cat([labels, self.exemplars.labels])
            held = all_rows[is_held_out(all_rows, all_labels, share=self.config.held_out)].tolist()
            if held:
                self._correct(*features(held)[:2])
            else:
                logger.warning(
                    "task %d: a class has a single image, so that none is held out: BiC does not correct its columns",
                    task.index + 1,
                )
        self.exemplars.add(values, labels, rows, task=task.index)

    def report(self, task: Task) -> dict[str, Any]:
        """Return the correction of the task's columns."""
        return {"correction": self.correction.tolist()}

    @torch.no_grad()
    def _correct(self, features: Tensor, labels: Tensor) -> None:
        known = self.num_known_classes
        logits = self.head(features.to(self.head.weight))
        self.correction = fitted_correction(logits, labels, num_known=known).to(self.correction)
        alpha, beta = self.correction
        self.head.weight[known:] *= alpha
        self.head.bias[known:] = alpha * self.head.bias[known:] + beta


@torch.enable_grad()
def fitted_correction(logits: Tensor, labels: Tensor, *, num_known: int) -> Tensor:
    """Return alpha and beta (2,), float64: the best of alpha o + beta for the logits (n, K) of new classes."""
    logits, labels = logits.detach().to("cpu", torch.float64), labels.cpu()
    neutral = torch.tensor([1.0, 0.0], dtype=torch.float64)
    found = neutral.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([found], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        corrected = torch.cat([logits[:, :num_known], found[0] * logits[:, num_known:] + found[1]], dim=1)
        value = F.cross_entropy(corrected, labels) + _PULL * (found - neutral).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return found.detach()
