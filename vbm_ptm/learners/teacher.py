"""A network as it was before a task: what distillation compares with.

Shapes: N images, K columns of the logits at that time.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone


class Teacher(nn.Module):
    """A frozen copy that stays in evaluation mode, so that its batch norms never move.

    It is part of the learner's state: make it in ``begin_task``, before anything grows, and drop it in ``end_task`` and
    ``allocate``.

    Args:
        backbone: Is copied.
        head: Features (N, D) -> logits (N, K); is copied.
    """

    def __init__(self, backbone: Backbone, head: nn.Module) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(backbone)
        self.head = copy.deepcopy(head)
        self.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> Teacher:
        """Stay in evaluation mode, whatever the learner's mode is."""
        super().train(False)
        return self

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, K) without gradient."""
        logits: Tensor = self.head(self.backbone.features(images))
        return logits


def softened_divergence(logits: Tensor, taught: Tensor, *, temperature: float) -> Tensor:
    """Return KL(softmax(taught / T) || softmax(logits / T)) in nats of every row (N,), without a factor T^2.

    Args:
        logits: (N,K) of the network that learns.
        taught: (N,K) of the network that teaches.
        temperature: T.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_probabilities = F.log_softmax(logits.to(dtype) / temperature, dim=1)
    log_targets = F.log_softmax(taught.to(dtype) / temperature, dim=1)
    return (log_targets.exp() * (log_targets - log_probabilities)).sum(dim=1)
