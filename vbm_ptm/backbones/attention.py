"""Attention by the fused kernel or by plain products, whichever is faster on the device in use.

Shapes: N images, H heads, Q queries, T keys, d width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Most tokens for which plain products beat the fused kernel, by device and dtype; elsewhere the kernel wins or ties.
# CPU, bf16 (AMX): a training step of ViT-B/16 with 197 tokens takes 1.25 s plain and 1.40 s fused, one of the small
# ViT with 65 tokens 0.093 and 0.164 s. CPU, fp32: 23.9 and 23.2 ms for forward and backward of one layer of ViT-B/16
# with 4 images and 197 tokens, 88 and 76 ms with 2 images and 577, forward alone 8.0 and 6.3, 32.6 and 20.8 ms.
_PLAIN_UP_TO = {"cpu": {torch.bfloat16: 256}}


def prefers_fused(sequence: Tensor) -> bool:
    """Return whether the fused kernel is the faster attention for tokens (N,T,D) entering a block.

    Under autocast, the dtype of autocast counts.
    """
    device, dtype = sequence.device.type, sequence.dtype
    if device not in _PLAIN_UP_TO:
        return True
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return sequence.shape[1] > _PLAIN_UP_TO[device].get(dtype, 0)


def attend(query: Tensor, key: Tensor, value: Tensor, *, is_fused: bool, dropout: float = 0.0) -> Tensor:
    """Return the values (N,H,Q,d), averaged by the softmax of the scaled products of queries and keys.

    Args:
        query: (N,H,Q,d).
        key: (N,H,T,d).
        value: (N,H,T,d).
        is_fused: Use one kernel that never stores the table (N,H,Q,T), or products as timm's blocks compute them.
        dropout: Probability with which a weight is left out.
    """
    if is_fused:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
    weights = (query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)).softmax(dim=-1)
    return F.dropout(weights, dropout) @ value
