"""Classifiers by cosines.

Shapes: N images, D width, K columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.heads.task_heads import TaskHead


class CosineTaskHead(TaskHead):
    """Cosines between features and rows of a weight from a truncated normal with std 0.02; there is no bias.

    Args:
        width: D.
        num_classes: K.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__(width, num_classes, bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Return cosines (N,K) for features (N,D)."""
        return F.normalize(features, dim=1) @ F.normalize(self.weight, dim=1).T


class CosineHead(nn.Module):
    """scale * cos(feature, row of the weight), with a scale that is trained and starts at 1.

    Args:
        width: D.
        num_classes: K.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(num_classes, width).uniform_(-bound, bound))
        self.scale = nn.Parameter(torch.ones(()))

    def widen(self, num_classes: int) -> None:
        """Have this many columns; new ones are drawn from the global generator, the others stay."""
        old, width = self.weight.shape
        wider = CosineHead(width, num_classes).weight.detach().to(self.weight)
        wider[:old] = self.weight.detach()
        self.weight = nn.Parameter(wider)

    def forward(self, features: Tensor, *, num_fixed: int = 0) -> Tensor:
        """Return logits (N,K) for features (N,D), not rounded by autocast; the first rows may get no gradient."""
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(self.weight.dtype)
            rows = F.normalize(torch.cat([self.weight[:num_fixed].detach(), self.weight[num_fixed:]]), dim=1)
            return self.scale * (F.normalize(features, dim=1) @ rows.T)
