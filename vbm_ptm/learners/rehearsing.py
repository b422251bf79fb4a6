"""What a method that sees past images again offers to the engine; other methods keep the defaults.

Shapes: n images, R images of a draw, K columns of the logits, P numbers of all trained parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vbm_ptm.replay import ExemplarSet, Rehearsal, Replay

if TYPE_CHECKING:
    from vbm_ptm.learners.base import LearnerOutput


class Rehearsing(nn.Module):
    """The part of a learner that has to do with a buffer of past images."""

    config: Any

    @property
    def rehearsal(self) -> Rehearsal | None:
        """Which past images the method needs to see again."""
        asked: Rehearsal | None = self.config.rehearsal
        return asked

    def rehearse(self, replay: Replay) -> LearnerOutput:
        """Return what the objective needs of a draw that has a pass of its own (``Rehearsal.passes``).

        By default it is trained on like current images.

        Args:
            replay: The draw of R images; it may be empty.
        """
        output: LearnerOutput = self(replay.images, replay.labels)
        return output

    def project_gradient(self, current: Tensor, past: Tensor) -> Tensor:
        """Return the gradient to apply where ``Rehearsal.passes`` is "projected".

        Args:
            current: (P,) gradient of the current images, over all parameters in the order of ``parameter_groups``.
            past: (P,) gradient of the step's draws.
        """
        raise NotImplementedError

    def rehearsed_rows(self) -> Tensor:
        """Return the rows (n,) of the training split that the next task sees beside its own.

        They are trained on like its own, or, with a "stream", are the source of its draws. Unless overridden, they are
        those of the learner's ``ExemplarSet``.
        """
        held = [module.rows for module in self.children() if isinstance(module, ExemplarSet)]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *held])

    @property
    def remembered_bytes(self) -> int:
        """Bytes that the method keeps for the images of its buffer: logits or answers."""
        return 0

    def remember(self, slots: Tensor, logits: Tensor) -> None:
        """Keep the logits (n, K) of images that have entered the buffer in these slots (n,)."""
        raise NotImplementedError
