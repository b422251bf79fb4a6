"""FDR: function distance regularisation, which keeps the outputs of the network for past images.

Benjamin, Rolnick, Kording: "Measuring and Regularizing Networks in Function Space", ICLR 2019; as run by Buzzega et al.
(2020), repository mammoth. After each step on current images the optimizer takes a second one, by the Euclidean
distance between the softmax of a draw of past images and that which the network gave them at the end of their task.

Differs from the official code in:
  - The buffer holds ``capacity`` images in total, the same number of each class so far, chosen at random at the end of
    each task.
  - Answers are the outputs of the network in evaluation mode under the test transform; mammoth collects them in
    training mode from an augmented view.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import SharedHead
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput
from vbm_ptm.learners.config import TaskSizes
from vbm_ptm.replay import ExemplarSet, Rehearsal, Replay, kept_sizes


class FDRConfig(LearnerConfig):
    """Settings of FDR.

    Attributes:
        capacity: Images in the buffer, divided equally among the classes, each with its answer.
        draw_size: Images (views counted) that are drawn from it for every second step.
    """

    name: str = "fdr"
    capacity: int = Field(default=200, ge=1)
    draw_size: int = Field(default=32, ge=1)

    def viewed_images(self, sizes: TaskSizes) -> int:
        """Return the images that are chosen, for their answers."""
        return sum(kept_sizes(self.capacity, sizes.own, num_cells=len(sizes.own) + len(sizes.earlier)))

    @property
    def rehearsal(self) -> Rehearsal:
        """One draw of chosen images for every step, and a second step on it."""
        return Rehearsal(
            "stream",
            self.capacity,
            draws=1,
            draw_size=self.draw_size,
            filled_by="tasks",
            passes="successive",
        )


class FDR(Learner):
    """Backbone and one head for all classes, and the answers to the images of a buffer."""

    config_class = FDRConfig
    trained_parts = "backbone, full head"
    backbone_class = Backbone
    answers: Tensor

    def __init__(self, backbone: Backbone, config: FDRConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.backbone.requires_grad_(True)
        self.head = SharedHead(backbone.width)
        self.exemplars = ExemplarSet(config.capacity)
        self.register_buffer("answers", torch.zeros(config.capacity, 0))

    def begin_task(self, task: Task) -> None:
        """Add a column for every class of the run, as far as these are known."""
        super().begin_task(task)
        self.head.widen(max(task.num_planned_classes, task.num_seen_classes))
        self.answers = F.pad(self.answers, (0, self.head.out_features - self.answers.shape[1]))

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return logits (N, K) over all columns."""
        logits = self.head(self.backbone.features(images))
        return LearnerOutput(logits, torch.arange(logits.shape[1], device=logits.device), {})

    def rehearse(self, replay: Replay) -> LearnerOutput:
        """Return logits (R, K) of a draw and the distance of each image from its answer."""
        output = self(replay.images, replay.labels)
        distances = answer_distance(output.logits, self.answers[replay.slots])
        return LearnerOutput(output.logits, output.columns, {}, supervised=distances)

    @property
    def remembered_bytes(self) -> int:
        """Bytes of the answers."""
        return self.answers.nbytes

    def end_task(self, task: Task, features: Features) -> None:
        """Choose images of the task at random, and keep the outputs for them; older outputs do not change."""
        known = dict(zip(self.exemplars.rows.tolist(), self.answers, strict=False))
        self.exemplars.add(None, *features.labels(), task=task.index)
        rows = self.exemplars.rows.tolist()
        new = [row for row in rows if row not in known]
        scores = self.head(features(new)[0].to(self.answers)).detach()
        known |= dict(zip(new, scores.softmax(1), strict=True))
        answers = torch.stack([known[row] for row in rows])
        self.answers = F.pad(answers, (0, 0, 0, self.config.capacity - len(rows)))


def answer_distance(logits: Tensor, answers: Tensor) -> Tensor:
    """Return the Euclidean distance (R,) between the softmax of logits (R, K) and probabilities (R, K)."""
    distances: Tensor = torch.linalg.vector_norm(logits.softmax(1) - answers.to(logits), dim=1)
    return distances
