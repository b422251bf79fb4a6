"""The forward and backward passes of a step: one, or a second one for the draws of past samples.

Shapes: P numbers of all trained parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from vbm_ptm.data.views import ViewBatch
from vbm_ptm.learners.base import Learner


def take_passes(
    learner: Learner,
    batch: ViewBatch,
    *,
    gradient: Callable[[ViewBatch], dict[str, Tensor]],
    update: Callable[[], Tensor],
    parameters: Sequence[nn.Parameter],
) -> dict[str, Tensor]:
    """Leave the last gradient to apply with the parameters; return the loss parts of all passes.

    Args:
        learner: Its ``Rehearsal.passes`` says how many there are.
        batch: Of the step.
        gradient: Leaves the gradient of a pass over samples with the parameters, and returns its loss parts.
        update: Applies that gradient, and forgets it.
        parameters: Those that are trained.
    """
    rehearsal = learner.rehearsal
    if rehearsal is None or rehearsal.passes == "one" or not batch.replays:
        return gradient(batch)
    parts = gradient(replace(batch, replays=()))
    current = _joined(parameters)
    if rehearsal.passes == "successive":
        update()
    for parameter in parameters:
        parameter.grad = None
    for draw in batch.replays:
        parts |= {f"replay_{name}": value for name, value in gradient(draw).items()}
    if rehearsal.passes == "projected":
        projected = learner.project_gradient(current, _joined(parameters))
        for parameter, own in zip(
            parameters, projected.split([each.numel() for each in parameters]), strict=True
        ):
            parameter.grad = own.view_as(parameter).to(parameter.dtype)
    return parts


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients (P,) of parameters, zeros where there is none."""
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters
    ]
    return torch.cat([each.flatten() for each in gradients])
