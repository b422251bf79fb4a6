"""S-iPrompt's tokens: a row of prompt tokens for each session, independent of all others.

Wang, Huang, Hong: "S-Prompts Learning with Pre-trained Transformers: An Occam's Razor for Domain Incremental
Learning", NeurIPS 2022, section 3. Shapes: N images, D width, L tokens of a prompt, S sessions, k centres.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn


class TaskTokens(nn.Module):
    """One prompt (L,D) per session, each a parameter of its own, uniform from +-1/sqrt(D).

    Args:
        length: L.
        width: D.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.width = width
        self.tokens = nn.ParameterList()

    def append(self) -> None:
        """Add the next session's prompt and freeze those before."""
        self.requires_grad_(False)
        bound = 1 / math.sqrt(self.width)
        self.tokens.append(nn.Parameter(torch.empty(self.length, self.width).uniform_(-bound, bound)))

    def of_task(self, task_index: int) -> Tensor:
        """Return the prompt (1,L,D) of one session."""
        tokens: Tensor = self.tokens[task_index]
        return tokens[None]

    def of_images(self, chosen: Tensor) -> Tensor:
        """Return the prompts (N,L,D) of the session number (N,) chosen for each image."""
        return torch.stack(list(self.tokens))[chosen]


def nearest_session(
    features: Tensor, centres: Sequence[Tensor], *, norm: Literal["l1", "l2"] = "l1"
) -> Tensor:
    """Return for features (N,D) the session number (N,) with the nearest of its centres (k,D).

    Distances are sums of differences: the product of matrices that ``cdist`` takes for many rows is inexact.
    """
    power, mode = 1.0 if norm == "l1" else 2.0, "donot_use_mm_for_euclid_dist"
    distances = [
        torch.cdist(features, own.to(features), p=power, compute_mode=mode).amin(dim=1) for own in centres
    ]
    return torch.stack(distances, dim=1).argmin(dim=1)
