"""RanPAC: a frozen random projection and a ridge regression on its features.

McDonnell, Gong, Parvaneh, Abbasnejad, van den Hengel: "RanPAC: Random Projections and Pre-trained Models for
Continual Learning", NeurIPS 2023 (sections 3 and 4; repository RanPAC/RanPAC). Features f (D,) of the test transform
become h = relu(f W) with W (D,M) drawn once from N(0, 1). Sums over all images seen are all that is kept:

    G = sum h h' (M,M),   Q = sum h y' (M,K),   y one-hot;   scores = h (G + ridge I)^-1 Q.

The sums do not depend on the order of the images, so nothing is forgotten, with new classes or with new domains. The
first task may adapt the backbone before anything is summed (the paper's "first-session" adaptation).

Differs from the official code in:
  - The ridge is searched through one eigendecomposition for all candidates, in float64; the error is the same.
  - The system is solved in float64 by a Cholesky factor; if there is none, the ridge grows tenfold until there is.
  - Q grows with the classes; the official code knows their number in advance.
  - ``class_balanced`` is an addition: every class of a task counts as 100 images, however many it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone, evaluating
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Features, Learner, LearnerConfig, LearnerOutput, ParameterGroup
from vbm_ptm.learners.config import TRAINING_PASSES, Passes, TrainedTasks
from vbm_ptm.learners.first_session import FirstSession, FirstSessionConfig

# Images that a class counts as where classes are balanced.
_BALANCED_SIZE = 100


class RanPACConfig(LearnerConfig):
    """Settings of RanPAC; the defaults are the official ones without adaptation.

    Attributes:
        projection_width: M, random features; 0 for a ridge regression on the features themselves.
        ridges: Candidates for the ridge, tried on the images of each task.
        fit_fraction: Part of a task's images that the candidates are fitted to; the rest validates them.
        class_balanced: Give every class of a task the same weight, however many images it has.
        first_session: What the first task trains before its features are summed; nothing by default.
    """

    feature_passes: ClassVar[int] = 1
    usual_passes: ClassVar[Passes] = Passes(TRAINING_PASSES, 1, testing=0, querying=1)
    name: str = "ran_pac"
    projection_width: int = Field(default=10_000, ge=0)
    ridges: tuple[PositiveFloat, ...] = Field(
        default=tuple(10.0**power for power in range(-8, 9)), min_length=1
    )
    fit_fraction: float = Field(default=0.8, gt=0, lt=1)
    class_balanced: bool = False
    first_session: FirstSessionConfig = FirstSessionConfig()

    @property
    def trained_tasks(self) -> TrainedTasks:
        """The first task is trained if it adapts the backbone."""
        return "first" if self.first_session.kind != "none" else "none"


class RanPAC(Learner):
    """Frozen backbone, frozen projection, sums over all images and the regression solved from them."""

    config_class = RanPACConfig
    trained_parts = "nothing, or an adaptation in the first task"
    predicts_from_query = True
    predicts_while_training = False
    backbone_class = Backbone
    projection: Tensor | None
    gram: Tensor
    moments: Tensor
    weight: Tensor

    def __init__(self, backbone: Backbone, config: RanPACConfig, *, num_tasks: int) -> None:
        super().__init__(backbone, config, num_tasks=num_tasks)
        self.first_session = FirstSession(backbone, config.first_session)
        width = config.projection_width or backbone.width
        projection = torch.randn(backbone.width, width) if config.projection_width else None
        self.register_buffer("projection", projection)
        self.register_buffer("gram", torch.zeros(width, width))
        self.register_buffer("moments", torch.zeros(width, 0))
        self.register_buffer("weight", torch.zeros(0, width))
        self.ridge = 0.0

    def begin_task(self, task: Task) -> None:
        """Add a column of zeros for every new class; the first task makes the adaptation trainable."""
        super().begin_task(task)
        self.first_session.begin(task)
        self.moments = F.pad(self.moments, (0, len(task.new_classes)))
        self.weight = F.pad(self.weight, (0, 0, 0, len(task.new_classes)))

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return the adaptation and its head in a first task that has them, otherwise nothing."""
        return self.first_session.parameter_groups()

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return the logits (N, K) of the first session's head, otherwise the scores of the task's classes."""
        if self.first_session.head is None:
            return LearnerOutput(self.predict(images)[:, self.task_columns], self.task_columns, {})
        logits = self.first_session.head(self.first_session.encode(self.backbone, images))
        return LearnerOutput(logits, self.task_columns, {})

    @property
    def query_parts(self) -> tuple[tuple[nn.Module, ...], ...]:
        """The backbone and its adaptation."""
        return ((self.backbone, self.first_session),)

    def query(self, images: Tensor) -> Tensor:
        """Return the class-token features (N, D) of the backbone, adapted if it is."""
        with evaluating(self):
            return self.first_session.encode(self.backbone, images)

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return the regression's scores (N, seen); those of classes without an image so far are 0."""
        features = self.query(images) if query is None else query
        with torch.autocast(features.device.type, enabled=False):
            return self._hidden(features) @ self.weight.T

    def end_task(self, task: Task, features: Features) -> None:
        """Freeze the adaptation; add the task's images to the sums, choose the ridge on them, and solve."""
        self.first_session.finish()
        values, labels, _ = features()
        order = torch.randperm(len(labels))
        hidden = self._hidden(values[order].to(self.gram.device))
        labels = labels[order].to(self.gram.device)
        targets = F.one_hot(labels, self.num_seen_classes).to(hidden)
        if self.config.class_balanced:
            scale = (_BALANCED_SIZE / labels.bincount()[labels]).sqrt()[:, None].to(hidden)
            hidden, targets = hidden * scale, targets * scale
        self.gram += hidden.T @ hidden
        self.moments += hidden.T @ targets
        cut = math.floor(self.config.fit_fraction * len(labels))
        errors = ridge_errors(hidden, targets, cut=cut, ridges=self.config.ridges)
        chosen = min(zip(errors, self.config.ridges, strict=True))[1]  # the smallest ridge wins a tie
        weight, self.ridge = solve_ridge(self.gram, self.moments, chosen)
        self.weight.copy_(weight.T)

    def allocate(self, task: Task, shapes: Mapping[str, Sequence[int]]) -> None:
        """Drop the first session's head, which a finished task no longer has."""
        super().allocate(task, shapes)
        self.first_session.finish()

    def report(self, task: Task) -> dict[str, Any]:
        """Return the ridge that the task was solved with."""
        return {"ridge": self.ridge}

    def _hidden(self, features: Tensor) -> Tensor:
        """Return random features (N,M) of features (N,D), in the precision of the sums."""
        features = features.to(self.gram.dtype)
        return features if self.projection is None else F.relu(features @ self.projection)


def ridge_errors(hidden: Tensor, targets: Tensor, *, cut: int, ridges: Sequence[float]) -> list[float]:
    """Return the mean squared error of a ridge regression for each ridge.

    One eigendecomposition serves all ridges: of H H' where there are fewer rows than columns, else of H' H.

    Args:
        hidden: (n,M); the first ``cut`` rows are fitted, the others judge.
        targets: (n,K).
        cut: Rows to fit.
        ridges: What is added to the diagonal of H' H.
    """
    device = "cpu" if hidden.device.type == "mps" else hidden.device  # has no float64
    hidden, targets = hidden.to(device, torch.float64), targets.to(device, torch.float64)
    fit, judge = hidden[:cut], hidden[cut:]
    is_dual = cut <= hidden.shape[1]
    values, vectors = torch.linalg.eigh(fit @ fit.T if is_dual else fit.T @ fit)
    if is_dual:
        left, right = judge @ (fit.T @ vectors), vectors.T @ targets[:cut]
    else:
        left, right = judge @ vectors, vectors.T @ (fit.T @ targets[:cut])
    values = values.clamp(min=0)[:, None]
    return [F.mse_loss(left @ (right / (values + ridge)), targets[cut:]).item() for ridge in ridges]


def solve_ridge(gram: Tensor, moments: Tensor, ridge: float) -> tuple[Tensor, float]:
    """Return (G + ridge I)^-1 Q (M,K) in float64, and the ridge.

    Rounded sums may have negative eigenvalues that a small ridge does not lift: it then grows tenfold.

    Args:
        gram: G (M,M), symmetric.
        moments: Q (M,K).
        ridge: What is added to the diagonal.

    Raises:
        FloatingPointError: A sum is not finite, which no ridge would mend.
    """
    if not bool(gram.isfinite().all() and moments.isfinite().all()):
        raise FloatingPointError(
            "the sums over the training images are not finite: features are too large, or the weights have diverged. "
            "Finished tasks are saved; lower optimization.learning_rate."
        )
    device = "cpu" if gram.device.type == "mps" else gram.device
    gram, moments = gram.to(device, torch.float64), moments.to(device, torch.float64)
    while True:
        system = gram.clone()
        system.diagonal().add_(ridge)
        factor, failure = torch.linalg.cholesky_ex(system)
        if not failure:
            return torch.cholesky_solve(moments, factor), ridge
        ridge *= 10
