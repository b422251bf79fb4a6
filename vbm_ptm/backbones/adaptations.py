"""Small trainable parts that change the forward pass of a frozen ViT: adapters, scales and shifts, tokens, low rank.

Each is a module that a learner owns (one per task, so that those of finished tasks stay frozen to the bit) and calls
to get the ``Adaptation`` that ``PromptableViT.encode`` takes. The ViT knows nothing about them: no layer is replaced,
no hook is set, and its state-dict keys stay the same.
Shapes: N images, T tokens, D width, R rank or bottleneck width, L prompt length.

Sources: adapters as in AdaptFormer (Chen et al., NeurIPS 2022); scales and shifts: Lian et al., "Scaling & Shifting
Your Features", NeurIPS 2022; tokens: Jia et al., "Visual Prompt Tuning", ECCV 2022; low rank: Hu et al., "LoRA", ICLR
2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.layers.mlp import Mlp
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones.blocks import BlockChange, Site, TokenMap, joined
from vbm_ptm.errors import UsageError


@dataclass(frozen=True)
class Adaptation:
    """How a forward pass differs from the backbone's own; ``|`` combines adaptations of different parts.

    Attributes:
        blocks: Block index -> what is changed about it.
        tokens: (N or 1, L, D), placed after the patches from the first block to the last.
        patches: What the embedded patches pass through before positions are added.
        features: What the tokens pass through after the final norm.
    """

    blocks: Mapping[int, BlockChange] = field(default_factory=dict)
    tokens: Tensor | None = None
    patches: TokenMap | None = None
    features: TokenMap | None = None

    def __or__(self, other: Adaptation) -> Adaptation:
        """Return both adaptations as one.

        Raises:
            ValueError: Both change the same part.
        """
        both = {
            index: self.blocks[index] | other.blocks[index]
            for index in self.blocks.keys() & other.blocks.keys()
        }
        mine, theirs = ({k: v for k, v in each.blocks.items() if k not in both} for each in (self, other))
        parts = joined(_without_blocks(self), _without_blocks(other))
        return Adaptation(**{**parts, "blocks": {**mine, **theirs, **both}})


def _without_blocks(adaptation: Adaptation) -> Adaptation:
    return Adaptation({}, adaptation.tokens, adaptation.patches, adaptation.features)


class Adapter(nn.Module):
    """A bottleneck: scale * up(dropout(relu(down(tokens)))), zero at the start.

    Args:
        width: D.
        bottleneck: R.
        scale: Factor on the output.
        dropout: Dropout in the bottleneck.
    """

    def __init__(self, width: int, bottleneck: int, *, scale: float = 0.1, dropout: float = 0.0) -> None:
        super().__init__()
        self.down = nn.Linear(width, bottleneck)
        self.up = nn.Linear(bottleneck, width)
        self.dropout = nn.Dropout(dropout)
        self.scale = scale
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        for parameter in (self.down.bias, self.up.weight, self.up.bias):
            nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what is added (N,T,D) to the output, for tokens (N,T,D)."""
        output: Tensor = self.scale * self.up(self.dropout(F.relu(self.down(tokens))))
        return output


class Adapters(nn.Module):
    """One adapter beside the MLP of every block.

    Args:
        depth: Blocks.
        width: D.
        bottleneck: R.
        scale: Factor on their outputs.
        dropout: Dropout in the bottlenecks.
    """

    def __init__(
        self, depth: int, width: int, bottleneck: int, *, scale: float = 0.1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            Adapter(width, bottleneck, scale=scale, dropout=dropout) for _ in range(depth)
        )

    def forward(self) -> Adaptation:
        """Return the adaptation."""
        return Adaptation({index: BlockChange(adapter=adapter) for index, adapter in enumerate(self.blocks)})


class ChannelAffine(nn.Module):
    """A scale, drawn from N(1, 0.02), and a shift, from N(0, 0.02), for every channel.

    Args:
        num_channels: Channels.
    """

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(num_channels).normal_(1, 0.02))
        self.shift = nn.Parameter(torch.empty(num_channels).normal_(0, 0.02))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens (N,T,channels), scaled and shifted."""
        return tokens * self.scale + self.shift


class ScalesAndShifts(nn.Module):
    """A scale and a shift after the patch embedding, every layer of every block, and the final norm.

    Args:
        backbone: The ``PromptableViT`` that will take them.

    Raises:
        UsageError: Its MLPs are not timm's plain ones.
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        width = backbone.width
        self.patches = ChannelAffine(width)
        self.features = ChannelAffine(width)
        self.blocks = nn.ModuleList()
        for block in backbone.vit.blocks:
            channels = {site: layer.out_features for site, layer in linear_layers(block).items()}
            sites: dict[Site, int] = {"norm1": width, "norm2": width, **channels}
            self.blocks.append(
                nn.ModuleDict({str(site): ChannelAffine(count) for site, count in sites.items()})
            )

    def forward(self) -> Adaptation:
        """Return the adaptation."""
        changes = {
            index: BlockChange(affines=dict(affines.items()))  # type: ignore[operator]
            for index, affines in enumerate(self.blocks)
        }
        return Adaptation(changes, patches=self.patches, features=self.features)


class ShallowTokens(nn.Module):
    """Tokens that pass through all blocks, zero at the start.

    Args:
        num_tokens: L.
        width: D.
    """

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(num_tokens, width))

    def forward(self) -> Adaptation:
        """Return the adaptation."""
        return Adaptation(tokens=self.tokens[None])


class DeepTokens(nn.Module):
    """Separate tokens for every block, zero at the start; the outputs at their places are dropped.

    Args:
        depth: Blocks.
        num_tokens: L, for each block.
        width: D.
    """

    def __init__(self, depth: int, num_tokens: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.zeros(depth, num_tokens, width))

    def forward(self) -> Adaptation:
        """Return the adaptation."""
        return Adaptation({index: BlockChange(tokens=own[None]) for index, own in enumerate(self.tokens)})


class LowRank(nn.Module):
    """A low-rank update of a weight: factor * up @ down, zero at the start.

    Args:
        weight: The weight (out, in) to be updated; only its shape is used.
        rank: R.
        factor: Factor on the update.
    """

    def __init__(self, weight: Tensor, rank: int, *, factor: float = 1.0) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, weight.shape[1]))
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank))
        self.factor = factor
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self) -> Tensor:
        """Return the update (out, in), in the precision of the parameters."""
        with torch.autocast(self.up.device.type, enabled=False):
            return self.factor * (self.up @ self.down)


class LowRankUpdates(nn.Module):
    """A low-rank update of some linear layers of every block.

    Args:
        backbone: The ``PromptableViT`` that will take them.
        rank: R.
        sites: Layers: "qkv", "proj", "fc1", "fc2".
        factor: Factor on the updates.

    Raises:
        UsageError: Its MLPs are not timm's plain ones.
    """

    def __init__(self, backbone: Any, rank: int, *, sites: Sequence[Site], factor: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        for block in backbone.vit.blocks:
            layers = linear_layers(block)
            updates = {str(site): LowRank(layers[site].weight, rank, factor=factor) for site in sites}
            self.blocks.append(nn.ModuleDict(updates))

    def forward(self) -> Adaptation:
        """Return the adaptation."""
        changes = {
            index: BlockChange(updates={site: update() for site, update in updates.items()})  # type: ignore[operator]
            for index, updates in enumerate(self.blocks)
        }
        return Adaptation(changes)


def linear_layers(block: Any) -> dict[Site, nn.Linear]:
    """Return the linear layers of a timm block by their site.

    Raises:
        UsageError: The block's MLP is not timm's plain one.
    """
    mlp: Any = block.mlp
    if type(mlp) is not Mlp:
        raise UsageError(
            f"this backbone cannot take low-rank updates or scales and shifts: its MLP is "
            f"{type(mlp).__name__}; needed: timm's Mlp."
        )
    qkv, proj = block.attn.qkv, block.attn.proj
    return {"qkv": qkv, "proj": proj, "fc1": mlp.fc1, "fc2": mlp.fc2}  # type: ignore[dict-item]
