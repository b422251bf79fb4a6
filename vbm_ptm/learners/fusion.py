"""Feature maps of several backbones, fused by attention (the "feature fusion module" of TCIL), and their distance.

Shapes: N images, C channels of all maps together, h x w places.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Sides to which maps are pooled for their distance; each counts half of the one before.
_SIDES = (4, 2, 1)


class MapFusion(nn.Module):
    """Attention over channels, then over places, beside a shortcut (Woo et al., "CBAM", ECCV 2018); then the mean.

    Args:
        num_channels: C.
        reduction: Channels for each hidden unit of the attention over channels.
    """

    def __init__(self, num_channels: int, *, reduction: int = 16) -> None:
        super().__init__()
        hidden = max(num_channels // reduction, 1)
        self.channels = nn.Sequential(
            nn.Linear(num_channels, hidden, bias=False),
            nn.ReLU(),
            nn.Linear(hidden, num_channels, bias=False),
        )
        self.places = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Return features (N,C) of maps (N,C,h,w)."""
        strengths = (self.channels(maps.mean((2, 3))) + self.channels(maps.amax((2, 3)))).sigmoid()
        attended = maps * strengths[:, :, None, None]
        summary = torch.stack([attended.mean(1), attended.amax(1)], dim=1)
        fused: Tensor = (maps + attended * self.places(summary).sigmoid()).mean((2, 3))
        return fused


def map_distance(maps: Tensor, taught: Tensor) -> Tensor:
    """Return the mean squared difference of each image (N,) between two maps (N,C,h,w), over several sizes of them.

    The maps as they are count 1; pooled to 4, 2 and 1 places a side, where that is smaller, each half of the one
    before; the sum is divided by the sum of these weights. In float32 or better, also under autocast.
    """
    exact = torch.promote_types(maps.dtype, torch.float32)
    difference = maps.to(exact) - taught.to(exact)
    total = difference.square().mean((1, 2, 3))
    weight = sum_of_weights = 1.0
    for side in _SIDES:
        if side < min(maps.shape[2:]):
            weight /= 2
            sum_of_weights += weight
            pooled = F.adaptive_avg_pool2d(difference, side)
            total = total + weight * pooled.square().mean((1, 2, 3))
    return total / sum_of_weights
