"""The logits that a network gave when an image entered the buffer (Buzzega et al., NeurIPS 2020: "dark knowledge").

Shapes: R replayed images, K columns, M slots of the buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LogitMemory(nn.Module):
    """A table of logits by slot; where the head has grown since, only the columns of that time count.

    Args:
        capacity: M.
    """

    table: Tensor
    widths: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(capacity, 0))
        self.register_buffer("widths", torch.zeros(capacity, dtype=torch.int64))

    def widen(self, num_columns: int) -> None:
        """Have room for this many columns."""
        self.table = F.pad(self.table, (0, max(num_columns - self.table.shape[1], 0)))

    def remember(self, slots: Tensor, logits: Tensor) -> None:
        """Replace the logits (n, K) of slots (n,)."""
        self.table[slots] = logits.to(self.table)
        self.widths[slots] = logits.shape[1]

    def distances(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Return the mean squared difference (R,) between logits (R, K) and those remembered in slots (R,)."""
        widths = self.widths[slots][:, None]
        is_known = torch.arange(logits.shape[1], device=logits.device) < widths
        squares = (logits - self.table[slots].to(logits)).square() * is_known
        return squares.sum(1) / widths[:, 0].clamp(min=1)
