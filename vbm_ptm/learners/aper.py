"""APER: prototypes on features of the frozen and of an adapted backbone, side by side.

Zhou, Cai, Ye, Zhan, Liu: "Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and
Adaptivity are All You Need", IJCV 2024 (section 5; repository LAMDA-CL/RevisitingCIL, where it is called ADAM). The
first task adapts the backbone in one of five ways; from then on nothing is trained. A feature is [f(x), f*(x)] (2D,),
of the frozen and of the adapted backbone; a class is the mean of its features under the test transform; the score is
the cosine over the joint vector, with one norm for both halves.

Differs from the official code in:
  - Prototypes are sums over tasks, so a class may recur; domain-incremental, the backbone is adapted on the
    first domain.
  - The variant is a setting, not read from the name of the backbone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from vbm_ptm.backbones import Backbone, evaluating
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput, ParameterGroup
from vbm_ptm.learners.config import TRAINING_PASSES, Passes, TrainedTasks
from vbm_ptm.learners.first_session import FirstSession, FirstSessionConfig
from vbm_ptm.learners.prototypes import class_cosines, keep_class_sums


class APERConfig(LearnerConfig):
    """Settings of APER.

    Attributes:
        first_session: What the first task trains; with "none" the features are those of ``nearest_mean``, twice.
    """

    feature_passes: ClassVar[int] = 1
    usual_passes: ClassVar[Passes] = Passes(TRAINING_PASSES, 2, testing=0, querying=2)
    name: str = "aper"
    first_session: FirstSessionConfig = FirstSessionConfig(kind="adapter")

    @property
    def trained_tasks(self) -> TrainedTasks:
        """The first task is trained."""
        return "first" if self.first_session.kind != "none" else "none"


class APER(Learner):
    """Frozen backbone, an adaptation that the first task trains, and one prototype per class."""

    config_class = APERConfig
    trained_parts = "an adaptation, in the first task"
    predicts_from_query = True
    predicts_while_training = False
    backbone_class = Backbone

    def __init__(self, backbone: Backbone, config: APERConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.first_session = FirstSession(backbone, config.first_session)

    def begin_task(self, task: Task) -> None:
        """Make the adaptation trainable for the first task, with a cosine head over its classes."""
        super().begin_task(task)
        self.first_session.begin(task)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the adaptation and its head in the first task, then nothing."""
        return self.first_session.parameter_groups()

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return the logits (N, K) of the first session's head, afterwards the scores of the task's classes."""
        if self.first_session.head is None:
            return LearnerOutput(self.predict(images)[:, self.task_columns], self.task_columns, {})
        logits = self.first_session.head(self.first_session.encode(self.backbone, images))
        return LearnerOutput(logits, self.task_columns, {})

    @property
    def query_parts(self) -> tuple[tuple[nn.Module, ...], ...]:
        """The backbone and its adaptation."""
        return ((self.backbone, self.first_session),)

    def query(self, images: Tensor) -> Tensor:
        """Return the features (N, 2D) of the frozen and of the adapted backbone."""
        with evaluating(self):
            adapted = self.first_session.encode(self.backbone, images)
            return torch.cat([self.backbone.query(images), adapted], dim=1)

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return cosines (N, seen) between joint features and prototypes."""
        return class_cosines(self, self.query(images) if query is None else query)

    def end_task(self, task: Task, features: Features) -> None:
        """Freeze the adaptation after the first task; keep the sums of the task's classes."""
        self.first_session.finish()
        keep_class_sums(self, task, features)

    def allocate(self, task: Task, shapes: Mapping[str, Sequence[int]]) -> None:
        """Make room for the sums, and drop the head of the first session."""
        super().allocate(task, shapes)
        self.first_session.finish()

    def statistics_size(self, class_sizes: Sequence[int]) -> int:
        """Return the numbers in a sum per class."""
        return len(class_sizes) * 2 * self.backbone.width
