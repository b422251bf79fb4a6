"""The network as it was before a task, for distillation.

Shapes: N images, K columns of the logits at that time.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones import Backbone


class Teacher(nn.ModuleDict):
    """Frozen copies of what a learner was before a task, applied one after the other; empty where there is none.

    They stay in evaluation mode, so that their batch norms never move. A teacher is part of the learner's state: it is
    made with the learner, holds the network from ``begin_task`` on, before anything grows, and is cleared in
    ``end_task``. A state without a teacher clears it as well.

    Args:
        parts: What it holds from the beginning, as of ``hold``.
    """

    backbone: Backbone

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        self.hold(**parts)

    def hold(self, **parts: nn.Module) -> None:
        """Hold copies of these modules, and of nothing else; a backbone gives its features."""
        self.clear()
        self.update(copy.deepcopy(parts))
        self.requires_grad_(False)
        self.train(False)

    def train(self, mode: bool = True) -> Teacher:
        """Stay in evaluation mode, whatever the learner's mode is."""
        super().train(False)
        return self

    @torch.no_grad()
    def forward(self, values: Tensor) -> Tensor:
        """Return what the parts make of images (N, C, H, W), or of maps; with a head last, logits (N, K)."""
        for part in self.values():
            values = part.features(values) if isinstance(part, Backbone) else part(values)
        return values

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        if not any(name.startswith(prefix) for name in state_dict):
            self.clear()
        super()._load_from_state_dict(state_dict, prefix, *others)


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
