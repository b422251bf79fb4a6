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

    @property
    def rows(self) -> Tensor:
        """The row (K, D) of each class."""
        return self.weight

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (N,K) for features (N,D), not rounded by autocast."""
        with torch.autocast(features.device.type, enabled=False):
            features = features.to(self.weight.dtype)
            return self.scale * (F.normalize(features, dim=1) @ F.normalize(self.rows, dim=1).T)


class GrowingCosineHead(CosineHead):
    """A ``CosineHead`` whose rows of earlier classes stay as they are: no gradient and no weight decay changes them.

    ``known`` (K_old, D) holds these, ``weight`` (K - K_old, D) those of the task's classes.

    Args:
        width: D.
    """

    known: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width, 0)
        self.register_buffer("known", torch.empty(0, width))

    def widen(self, num_classes: int) -> None:
        """Have this many columns: those that are there become known, new ones are drawn from the global generator."""
        self.known = self.rows.detach().clone()
        num_known, width = self.known.shape
        new = CosineHead(width, num_classes - num_known).weight.detach()
        self.weight = nn.Parameter(new.to(self.known))

    @property
    def rows(self) -> Tensor:
        """The row (K, D) of each class, earlier ones first."""
        return torch.cat([self.known, self.weight])
