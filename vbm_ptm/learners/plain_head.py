"""A classifier without bias whose rows can be given equal length: Yan et al. (2021), and weight aligning after it.

Shapes: N images, D width, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PlainHead(nn.Linear):
    """A linear layer without bias that autocast leaves alone, drawn by Kaiming's normal law for linear outputs.

    Args:
        width: D.
        num_columns: K; columns may be added.
    """

    def __init__(self, width: int, num_columns: int) -> None:
        super().__init__(width, num_columns, bias=False)
        if num_columns:
            nn.init.kaiming_normal_(self.weight, nonlinearity="linear")

    def reset_parameters(self) -> None:
        """Draw all weights by torch's law from the CPU's generator, which is seeded alike on all ranks."""
        if self.out_features:
            drawn = nn.Linear(self.in_features, self.out_features, bias=False, dtype=self.weight.dtype).weight
            with torch.no_grad():
                self.weight.copy_(drawn)

    def widen(self, num_columns: int) -> None:
        """Have this many columns; new ones are drawn from the global generator, the others stay."""
        old = self.out_features
        wider = PlainHead(self.in_features, num_columns).weight.to(self.weight)
        with torch.no_grad():
            wider[:old] = self.weight
        self.out_features, self.weight = num_columns, nn.Parameter(wider)

    @torch.no_grad()
    def align(self, num_known: int) -> None:
        """Give the columns behind the first ones the mean length of these ("weight aligning", Zhao et al. 2020)."""
        self.weight[num_known:] *= length_ratio(self.weight, num_known)

    def forward(self, input: Tensor) -> Tensor:
        """Return logits (N, K) of features (N, D)."""
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.to(self.weight.dtype))


def length_ratio(weight: Tensor, num_known: int) -> Tensor:
    """Return the mean length () of the first rows of a weight (K, D) over that of the others; 1 without either."""
    lengths = torch.linalg.vector_norm(weight, dim=1)
    if not 0 < num_known < len(weight):
        return torch.ones((), device=weight.device, dtype=weight.dtype)
    ratio: Tensor = lengths[:num_known].mean() / lengths[num_known:].mean().clamp(min=1e-12)
    return ratio
