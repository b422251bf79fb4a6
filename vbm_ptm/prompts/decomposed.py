"""CODA-Prompt's prefixes: weighted sums of components, old ones frozen, new ones orthonormal to them.

Smith et al.: "CODA-Prompt: COntinual Decomposed Attention-based Prompting for Rehearsal-Free Continual Learning",
CVPR 2023, section 4. Shapes: N images, D width, M components, L tokens of a prompt (the first half are keys, the
second half values).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DecomposedPrompt(nn.Module):
    """Components (M,L,D), keys (M,D) and attention vectors (M,D) of one block, a parameter of each per task.

    Args:
        length: L, even.
        width: D.
    """

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.width = width
        self.components = nn.ParameterList()
        self.keys = nn.ParameterList()
        self.attentions = nn.ParameterList()

    def append(self, num_components: int) -> None:
        """Add the next task's components, orthonormal to all others and to each other; freeze the others.

        Raises:
            ValueError: There are not enough dimensions left.
        """
        self.requires_grad_(False)
        for parameters, length in ((self.components, self.length), (self.keys, 1), (self.attentions, 1)):
            old = [parameter.detach().flatten(1) for parameter in parameters]
            rows = orthonormal_rows(num_components, length * self.width, torch.cat(old) if old else None)
            is_component = parameters is self.components
            parameters.append(nn.Parameter(rows.unflatten(1, (length, self.width)) if is_component else rows))

    def weights(self, query: Tensor) -> Tensor:
        """Return the weight (N,M) of every component: cos(query * attention, key)."""
        attended = query[:, None] * torch.cat(list(self.attentions))
        return F.cosine_similarity(attended, torch.cat(list(self.keys)), dim=2)

    def prefix(self, query: Tensor) -> Tensor:
        """Return the prefix (N, 2, L / 2, D) for queries (N,D)."""
        prompt = torch.einsum("nm,mld->nld", self.weights(query), torch.cat(list(self.components)))
        prefix: Tensor = prompt.unflatten(1, (2, self.length // 2))
        return prefix

    def orthogonality_penalty(self) -> Tensor:
        """Return the sum over components, keys and attentions of mean((X X' - I)^2)."""
        penalties = []
        for parameters in (self.components, self.keys, self.attentions):
            rows = torch.cat([parameter.flatten(1) for parameter in parameters])
            with torch.autocast(rows.device.type, enabled=False):  # what is left of it is below bf16's digits
                gram = rows @ rows.T
            penalties.append(
                (gram - torch.eye(len(gram), device=gram.device, dtype=gram.dtype)).square().mean()
            )
        total: Tensor = torch.stack(penalties).sum()
        return total


def orthonormal_rows(count: int, dimension: int, others: Tensor | None) -> Tensor:
    """Draw rows (count, dimension) that are orthonormal, and orthogonal to the span of other rows.

    The official code subtracts projections on the other rows one by one, which leaves a part of them where the
    others are not orthogonal to each other; here an orthonormal basis of their span is projected out.

    Raises:
        ValueError: The rows do not fit into the dimension.
    """
    num_others = 0 if others is None else len(others)
    if num_others + count > dimension:
        raise ValueError(f"{num_others} + {count} rows cannot be independent in {dimension} dimensions")
    drawn = torch.randn(dimension, count, dtype=torch.float64)
    if others is not None:
        basis = torch.linalg.qr(others.double().cpu().T).Q
        for _ in range(2):  # the second pass removes what rounding has left
            drawn -= basis @ (basis.T @ drawn)
    orthonormal, triangular = torch.linalg.qr(drawn)
    # Gram-Schmidt's signs; those of the routine would make some coordinates negative in every draw.
    rows: Tensor = (orthonormal * triangular.diagonal().sign()).T
    return rows.to(torch.get_default_dtype() if others is None else others.dtype)
