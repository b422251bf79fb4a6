"""Losses of several rows at once: agreement of views, and cross-entropy over length-normalised logits.

Shapes: N images, G groups, V views, K columns.
Half types are computed in float32, float64 stays float64. Everything is written in log space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def view_divergence(logits: Tensor, *, detach_weak: bool = True) -> Tensor:
    """Return KL(p_weak || p_strong) in nats of every pair of the weak and a strong view.

    The sum runs over the K classes; there is no temperature. A step that is spread over ranks or
    micro-batches sums these values and divides by the number of pairs of the whole step.

    Args:
        logits: (G,V,K), view 0 weak, the others strong; columns that the learner rules out are left out before:
            over a column of -inf the result is NaN. That is not looked for here, where a device would be waited for.
        detach_weak: Let no gradient flow into the weak view.

    Returns:
        (G,V-1), connected to the graph also when it is empty.
    """
    if logits.ndim != 3:
        raise ValueError(f"view divergence takes logits (G,V,K), not {tuple(logits.shape)}")
    log_probabilities = F.log_softmax(_at_least_float32(logits), dim=-1)
    weak, strong = log_probabilities[:, :1], log_probabilities[:, 1:]
    if detach_weak:
        weak = weak.detach()
    return (weak.exp() * (weak - strong)).sum(dim=-1)


def view_consistency_loss(logits: Tensor, *, detach_weak: bool = True) -> Tensor:
    """Return the mean of ``view_divergence`` over groups and strong views, exactly 0 for one view.

    Args:
        logits: (G,V,K), view 0 weak, the others strong.
        detach_weak: Let no gradient flow into the weak view.

    Raises:
        ValueError: A logit is -inf.
    """
    if bool(torch.isneginf(logits).any()):
        raise ValueError("view consistency takes no logits of -inf: leave out the ruled-out columns first")
    divergence = view_divergence(logits, detach_weak=detach_weak)
    return divergence.sum() / max(divergence.numel(), 1)  # a mean over no pairs would be NaN


def logit_normalized_cross_entropy(
    logits: Tensor, labels: Tensor, task_sizes: Sequence[int], temperature: float
) -> Tensor:
    """Return the mean cross-entropy of ``logits / length / temperature`` (SLCA's classifier alignment).

    The length of a row is the mean over the tasks of (Euclidean norm of the task's logits + 1e-7);
    the gradient flows through it.

    Args:
        logits: (N,K), the columns of all tasks in order.
        labels: (N,) columns.
        task_sizes: Number of columns of each task; their sum is K.
        temperature: Divides the normalised logits; SLCA takes 0.1.
    """
    if logits.ndim != 2 or logits.shape[1] != sum(task_sizes):
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit task sizes {list(task_sizes)}, "
            f"which make {sum(task_sizes)} columns"
        )
    logits = _at_least_float32(logits)
    if len(set(task_sizes)) == 1:
        norms = torch.linalg.vector_norm(logits.unflatten(1, (len(task_sizes), -1)), dim=2)
    else:
        parts = torch.split(logits, list(task_sizes), dim=1)
        norms = torch.stack([torch.linalg.vector_norm(part, dim=1) for part in parts], dim=1)
    length = (norms + 1e-7).mean(dim=1, keepdim=True)
    return F.cross_entropy(logits / length / temperature, labels)


def symmetric_cross_entropy_terms(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy and the reverse cross-entropy of every row, each (N,).

    The reverse one takes the probabilities as the truth and the one-hot label, no less than 1e-4, as the prediction:
    9.21 times the probability of all wrong columns, bounded for any logits (Wang et al., ICCV 2019).

    Args:
        logits: (N,K).
        labels: (N,) columns.
    """
    logits = _at_least_float32(logits)
    probabilities = logits.softmax(dim=1).clamp(1e-7, 1)
    wrong = probabilities.sum(dim=1) - probabilities.gather(1, labels[:, None])[:, 0]
    return F.cross_entropy(logits, labels, reduction="none"), -math.log(1e-4) * wrong


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
