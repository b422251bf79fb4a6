"""L2P's shared pool of prompts, chosen for each image by the match of its query with the prompts' keys.

Wang et al.: "Learning to Prompt for Continual Learning", CVPR 2022, section 4.
Shapes: N images, D width, P prompts of the pool, L tokens of a prompt, k chosen prompts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PromptPool(nn.Module):
    """Prompts (P,L,D) and their keys (P,D), all drawn uniformly from (-1, 1) as in the PyTorch port.

    Args:
        pool_size: P.
        length: L.
        width: D.
        top_k: Prompts that an image is given.
    """

    def __init__(self, pool_size: int, length: int, width: int, *, top_k: int) -> None:
        super().__init__()
        self.prompts = nn.Parameter(torch.empty(pool_size, length, width).uniform_(-1, 1))
        self.keys = nn.Parameter(torch.empty(pool_size, width).uniform_(-1, 1))
        self.top_k = top_k

    def similarity(self, query: Tensor) -> Tensor:
        """Return the cosines (N,P) of queries (N,D) and keys, not as a product that autocast would round."""
        return F.cosine_similarity(query[:, None], self.keys, dim=2)

    def select(self, similarity: Tensor) -> Tensor:
        """Return the numbers (N,k) of the best prompts of each image, best first, the lower one if equal."""
        return similarity.sort(dim=1, descending=True, stable=True).indices[:, : self.top_k]

    def vote(self, selected: Tensor) -> Tensor:
        """Return the k prompts (N,k) that the images of the step choose most often, the same for all of them.

        The votes of all ranks are counted. Only training may use it: a prediction would depend on its batch.
        """
        # As a bincount would, but without waiting for the device.
        votes = (selected[..., None] == torch.arange(len(self.keys), device=selected.device)).sum((0, 1))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(votes)
        winners = votes.sort(descending=True, stable=True).indices[: self.top_k]
        return winners.expand(len(selected), -1)

    def gather(self, selected: Tensor) -> Tensor:
        """Return the chosen prompts side by side, (N, k * L, D)."""
        return self.prompts[selected].flatten(1, 2)

    def pull(self, similarity: Tensor, selected: Tensor) -> Tensor:
        """Return for each image (N,) the sum of the cosines with the keys of its prompts."""
        return similarity.gather(1, selected).sum(dim=1)
