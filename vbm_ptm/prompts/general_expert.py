"""DualPrompt's prefixes: general ones that all tasks share, and an expert with a key for each task.

Wang et al.: "DualPrompt: Complementary Prompting for Rehearsal-free Continual Learning", ECCV 2022, section 4.
Shapes: N images, D width, B blocks, L tokens of a prefix. Keys are at [..., 0, :, :], values at [..., 1, :, :].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GeneralPrefixes(nn.Module):
    """One prefix (2,L,D) for each of some blocks, the same for every image.

    Args:
        blocks: Blocks that get a prefix.
        length: L.
        width: D.
    """

    def __init__(self, blocks: Sequence[int], length: int, width: int) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        self.prefixes = nn.Parameter(torch.empty(len(self.blocks), 2, length, width).uniform_(-1, 1))

    def forward(self) -> dict[int, Tensor]:
        """Return block -> (1,2,L,D)."""
        return {block: prefix[None] for block, prefix in zip(self.blocks, self.prefixes, strict=True)}


class ExpertPrefixes(nn.Module):
    """For each task one prefix (B,2,L,D) over some blocks and one key (D,), each a parameter of its own.

    A finished task's parameters can so be frozen bit by bit, and samples cannot be mixed: an image's prefixes are
    rows of a stack over tasks, taken by one number.

    Args:
        blocks: Blocks that get a prefix.
        length: L.
        width: D.
        has_keys: Whether each task also has a key; not where something else chooses the prefix.
    """

    def __init__(self, blocks: Sequence[int], length: int, width: int, *, has_keys: bool = True) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        self.length = length
        self.width = width
        self.has_keys = has_keys
        self.prefixes = nn.ParameterList()
        self.keys = nn.ParameterList()

    def append(self, *, copy_previous: bool) -> None:
        """Add the next task's prefix and key, uniform from (-1, 1), and freeze those of the tasks before.

        Args:
            copy_previous: Start the prefix (not the key) from that of the task before.
        """
        self.requires_grad_(False)
        prefix = torch.empty(len(self.blocks), 2, self.length, self.width).uniform_(-1, 1)
        if copy_previous and len(self.prefixes):
            prefix = self.prefixes[-1].detach().clone()
        self.prefixes.append(nn.Parameter(prefix))
        if self.has_keys:
            self.keys.append(nn.Parameter(torch.empty(self.width).uniform_(-1, 1)))

    def similarity(self, query: Tensor) -> Tensor:
        """Return the cosines (N, tasks) of queries (N,D) and keys, not as a product that autocast would round."""
        return F.cosine_similarity(query[:, None], torch.stack(list(self.keys)), dim=2)

    def of_task(self, task_index: int) -> dict[int, Tensor]:
        """Return block -> (1,2,L,D) of one task."""
        return {
            block: prefix[None] for block, prefix in zip(self.blocks, self.prefixes[task_index], strict=True)
        }

    def of_images(self, chosen: Tensor) -> dict[int, Tensor]:
        """Return block -> (N,2,L,D) for the task number (N,) chosen for each image."""
        stacked = torch.stack(list(self.prefixes))[chosen]  # (N,B,2,L,D)
        return {block: stacked[:, position] for position, block in enumerate(self.blocks)}
