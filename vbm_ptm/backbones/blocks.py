"""One block of a timm ViT and what can be changed in it: prefixes, tokens, adapters, weight updates, affine maps.

The block itself is not modified. Without changes the result is that of timm's own forward pass.
Shapes: N images, T tokens, D width, H heads, L prompt length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones.attention import attend, prefers_fused

Site = Literal["norm1", "qkv", "proj", "norm2", "fc1", "fc2"]
TokenMap = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class BlockChange:
    """How a forward pass through one block differs from the block's own; ``|`` combines changes of different parts.

    Attributes:
        prefix: (N or 1, 2, L, D), put before keys [:, 0] and values [:, 1] after projection.
        tokens: (N or 1, L, D), appended to the sequence for this block only.
        adapter: Tokens after attention (N,T,D) -> what is added to the output (N,T,D), in parallel to the MLP.
        updates: Linear layer -> what is added to its weight; "qkv", "proj", "fc1" or "fc2".
        affines: Layer -> what its output passes through, (N,T,channels) -> (N,T,channels).
    """

    prefix: Tensor | None = None
    tokens: Tensor | None = None
    adapter: TokenMap | None = None
    updates: Mapping[Site, Tensor] = field(default_factory=dict)
    affines: Mapping[Site, TokenMap] = field(default_factory=dict)

    def __or__(self, other: BlockChange) -> BlockChange:
        """Return both changes as one.

        Raises:
            ValueError: Both change the same part.
        """
        return BlockChange(**joined(self, other))

    def after(self, site: Site, output: Tensor) -> Tensor:
        """Return the output of a layer after its affine map, if there is one."""
        affine = self.affines.get(site)
        return output if affine is None else affine(output)

    def linear(self, site: Site, layer: nn.Linear, inputs: Tensor) -> Tensor:
        """Return the output of a linear layer with its weight updated and its output scaled and shifted."""
        update = self.updates.get(site)
        output = layer(inputs) if update is None else F.linear(inputs, layer.weight + update, layer.bias)
        return self.after(site, output)


def joined(one: Any, other: Any) -> dict[str, Any]:
    """Merge the attributes of two dataclasses of one class, whose parts must not overlap.

    Raises:
        ValueError: Both have the same part.
    """
    parts = {}
    for name in (each.name for each in fields(one)):
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            shared = sorted(map(str, mine.keys() & theirs.keys()))
            if shared:
                raise ValueError(f"two changes of one forward pass both have {name} of {', '.join(shared)}")
            parts[name] = {**mine, **theirs}
        elif mine is not None and theirs is not None:
            raise ValueError(f"two changes of one forward pass both have {name}")
        else:
            parts[name] = theirs if mine is None else mine
    return parts


def plain_block(block: Any, sequence: Tensor) -> Tensor:
    """Run a timm block (N,T,D) -> (N,T,D) unchanged, with whichever attention is faster."""
    block.attn.fused_attn = prefers_fused(sequence)
    output: Tensor = block(sequence)
    return output


def changed_block(block: Any, sequence: Tensor, change: BlockChange) -> Tensor:
    """Run a timm block (N,T,D) -> (N,T,D) with changes."""
    num_tokens = sequence.shape[1]
    if change.tokens is not None:
        tokens = change.tokens.to(sequence.dtype).expand(len(sequence), -1, -1)
        sequence = torch.cat([sequence, tokens], dim=1)
    attended = _attention(block.attn, change.after("norm1", block.norm1(sequence)), change)
    sequence = sequence + block.drop_path1(block.ls1(attended))
    processed = _mlp(block.mlp, change.after("norm2", block.norm2(sequence)), change)
    output: Tensor = sequence + block.drop_path2(block.ls2(processed))
    if change.adapter is not None:
        output = output + change.adapter(sequence)
    return output[:, :num_tokens]


def _attention(attention: Any, sequence: Tensor, change: BlockChange) -> Tensor:
    num_images, num_tokens, width = sequence.shape
    head_shape = (attention.num_heads, width // attention.num_heads)
    projected = change.linear("qkv", attention.qkv, sequence).reshape(num_images, num_tokens, 3, *head_shape)
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)  # each (N,H,T,D/H)
    query, key = attention.q_norm(query), attention.k_norm(key)
    if change.prefix is not None:
        prefix = change.prefix.expand(num_images, -1, -1, -1)
        prefix = prefix.unflatten(-1, head_shape).transpose(2, 3)  # (N,2,H,L,D/H)
        key = torch.cat([prefix[:, 0].to(key.dtype), key], dim=2)
        value = torch.cat([prefix[:, 1].to(value.dtype), value], dim=2)
    dropout = attention.attn_drop.p if attention.training else 0.0
    attended = attend(query, key, value, is_fused=prefers_fused(sequence), dropout=dropout)
    attended = attended.transpose(1, 2).reshape(num_images, num_tokens, width)
    output: Tensor = attention.proj_drop(change.linear("proj", attention.proj, attention.norm(attended)))
    return output


def _mlp(mlp: Any, sequence: Tensor, change: BlockChange) -> Tensor:
    output: Tensor
    if {"fc1", "fc2"}.isdisjoint({*change.updates, *change.affines}):
        output = mlp(sequence)
    else:
        hidden = mlp.drop1(mlp.act(change.linear("fc1", mlp.fc1, sequence)))
        output = mlp.drop2(change.linear("fc2", mlp.fc2, mlp.norm(hidden)))
    return output
