"""The view-batch objective: one loss for every learner, with one view or many.

Shapes: G groups of this rank, V views, N = G * V images, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.data.views import ViewBatch
from vbm_ptm.learners.base import LearnerOutput
from vbm_ptm.losses import view_divergence
from vbm_ptm.settings import Settings


class ObjectiveConfig(Settings):
    """Settings of the view-batch objective.

    Attributes:
        consistency_weight: Weight of the one-to-many KL term.
        detach_weak: Treat the weak view as a fixed target (as the authors' code does; the paper does not say).
        start_epoch: Epoch of each task, counted from 0, from which the KL term counts (the authors' code starts
            after 6 of 50 epochs; the paper names none).
    """

    consistency_weight: float = Field(default=1.0, ge=0)
    detach_weak: bool = True
    start_epoch: int = Field(default=0, ge=0)


class PartSize(NamedTuple):
    """How large a part of a step is, over all ranks: its current samples, or one draw of past ones."""

    num_views: int
    num_global_groups: int

    @classmethod
    def of(cls, part: ViewBatch) -> PartSize:
        """Return the size of a part."""
        return cls(part.num_views, part.num_global_groups)

    @property
    def num_images(self) -> int:
        """G * V."""
        return self.num_global_groups * self.num_views

    @property
    def num_pairs(self) -> int:
        """Pairs of a weak and a strong view."""
        return self.num_global_groups * (self.num_views - 1)


class ViewBatchObjective:
    """Cross-entropy over all views + weight * KL(weak || strong) + the learner's own terms.

    View-batch model (CVPR 2025), equation 3 and the objective below it. Every term is summed over the rows of this
    rank and divided by the rows of the global step times 1 / ranks, so that the average of the ranks' gradients is
    the gradient of the global mean, however the groups are spread. The micro-batches of a step, summed, give the
    loss of the whole step. With one view it is the baseline's loss. The views of replayed samples agree like those of
    current ones: one mean over the pairs of all parts of the step.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        self.config = config

    def __call__(
        self,
        output: LearnerOutput,
        labels: Tensor,
        *,
        num_views: int,
        epoch: int = 0,
        num_global_groups: int,
        num_ranks: int = 1,
        num_micro_batches: int = 1,
        exemplars: tuple[Tensor, PartSize] | None = None,
        replays: Sequence[PartSize] = (),
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this rank's loss and its detached parts by name, "accuracy" among them.

        Args:
            output: What the learner's forward returned for N = G * V images, the views of a group side by side, and for
                those of exemplars behind them.
            labels: (G,) int64 class indices, each in ``output.columns``.
            num_views: V.
            epoch: Epoch of the task, counted from 0.
            num_global_groups: Groups of the step over all ranks.
            num_ranks: Ranks whose gradients will be averaged.
            num_micro_batches: Parts of this rank's step whose losses will be summed.
            exemplars: Class indices and size of the samples among the N images that have another number of views.
            replays: Size of each draw in ``output.replays``.
        """
        logits = output.logits
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        kinds = [(labels, PartSize(num_views, num_global_groups)), *([exemplars] if exemplars else [])]
        targets = torch.cat(
            [column_of(own, output.columns).repeat_interleave(size.num_views) for own, size in kinds]
        )
        num_images = sum(size.num_images for _, size in kinds)
        per_image = num_ranks / num_images

        if output.supervised is None:
            parts = {"cross_entropy": F.cross_entropy(logits, targets, reduction="sum") * per_image}
        else:
            num_seen = num_images + sum(replay.num_images for replay in replays)
            parts = {"supervised": output.supervised.sum() * (num_ranks / num_seen)}
        of_kinds = logits.split([len(own) * size.num_views for own, size in kinds])
        seen = [
            *zip(of_kinds, (size for _, size in kinds), strict=True),
            *zip((replay.logits for replay in output.replays), replays, strict=True),
        ]
        if num_pairs := sum(part.num_pairs for _, part in seen):
            divergences = [self._divergence(values, part) for values, part in seen if part.num_pairs]
            weight = self.config.consistency_weight if epoch >= self.config.start_epoch else 0.0
            parts["consistency"] = torch.stack(divergences).sum() * (weight * (num_ranks / num_pairs))
        for name, value in output.auxiliary.items():
            parts[name] = value.sum() * per_image if value.dim() else value / num_micro_batches
        for replay, part in zip(output.replays, replays, strict=True):
            for name, value in replay.terms.items():
                parts[name] = value.sum() * (num_ranks / part.num_images)
        loss = torch.stack(list(parts.values())).sum()

        report = {"loss": loss, **parts}
        report["accuracy"] = (logits.argmax(1) == targets).sum() * per_image
        return loss, {name: value.detach() for name, value in report.items()}

    def _divergence(self, logits: Tensor, size: PartSize) -> Tensor:
        grouped = logits.unflatten(0, (-1, size.num_views))
        return view_divergence(grouped, detach_weak=self.config.detach_weak).sum()


def column_of(labels: Tensor, columns: Tensor) -> Tensor:
    """Return the position (n,) of each label among the columns (K,), without waiting for the device.

    A label that has no column gets -1, which the cross-entropy refuses: its loss would be undefined.
    """
    matches = labels[:, None] == columns
    return torch.where(matches.any(1), matches.int().argmax(1), -1) if len(columns) else labels * 0 - 1
