"""One linear classifier for the classes of all tasks, to which columns may be added.

Shapes: N images, D width, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SharedHead(nn.Linear):
    """One linear layer for all classes, with torch's initialisation; columns may be added.

    Args:
        width: D.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, 0)

    def reset_parameters(self) -> None:
        """Draw all weights from the global generator."""
        if self.out_features:
            super().reset_parameters()

    def widen(self, num_columns: int) -> None:
        """Have at least this many columns; new ones are drawn from the global generator, the others stay."""
        old = self.out_features
        if num_columns <= old:
            return
        wider = nn.Linear(self.in_features, num_columns).to(self.weight)
        with torch.no_grad():
            wider.weight[:old], wider.bias[:old] = self.weight, self.bias
        self.out_features, self.weight, self.bias = num_columns, wider.weight, wider.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits (N,K) of features (N,D), as ``TaskHeads.forward_task`` without autocast."""
        with torch.autocast(input.device.type, enabled=False):
            return super().forward(input.to(self.weight.dtype))
