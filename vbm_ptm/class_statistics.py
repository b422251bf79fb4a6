"""Gaussians of class features, kept as a mean and a factor of the covariance, and draws from them.

With the factor F (R,D) the covariance is F'F + 1e-4 I. Nothing is decomposed when drawing, and F'F is the
exact sample covariance for every class size from 1 up, where a Cholesky factor of it fails or is NaN. A diagonal
covariance has a vector of standard deviations in place of F.
Shapes: N images of one class, or of K classes, D width, R = min(N-1, D), or min(N-K, D), rows of a factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def gaussian_factor(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (D,) and the covariance factor (R,D) of features (N,D), both float64.

    ``factor.T @ factor`` is the unbiased covariance. One image has no spread: its factor has no rows.
    """
    if features.ndim != 2 or not len(features):
        raise ValueError(f"class statistics need features (N,D) with N >= 1, not {tuple(features.shape)}")
    if features.device.type == "mps":  # has no float64
        features = features.cpu()
    features = features.detach().to(torch.float64)
    num_images, width = features.shape
    mean = features.mean(dim=0)
    rank = min(num_images - 1, width)  # centring takes one dimension away; one image leaves none
    return mean, _scaled_directions(features - mean, rank) / math.sqrt(num_images - 1)


def diagonal_factor(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (D,) and the standard deviations (D,) of features (N,D), both float64; 0 for one image."""
    mean, factor = gaussian_factor(features)
    deviations: Tensor = factor.square().sum(dim=0).sqrt()
    return mean, deviations


def pooled_factor(features: Tensor, labels: Tensor) -> Tensor:
    """Return the float64 factor (R,D) of the covariance within classes, of features (N,D) with labels (N,)."""
    classes, positions = labels.unique(return_inverse=True)
    means = torch.stack([features[labels == each].double().mean(dim=0) for each in classes])
    freedom = len(labels) - len(classes)
    rank = min(freedom, features.shape[1])
    return _scaled_directions(features.double() - means[positions], rank) / math.sqrt(max(freedom, 1))


def _scaled_directions(rows: Tensor, rank: int) -> Tensor:
    """Return the first principal directions (rank,D) of rows (N,D), each as long as its singular value.

    The largest component of each is positive: the sign of a singular vector would depend on the last bit of the rows.
    """
    _, scales, directions = torch.linalg.svd(rows, full_matrices=False)
    directions = directions[:rank]
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    scaled: Tensor = scales[:rank, None] * directions * largest.sign()
    return scaled


def draw(
    means: Tensor,
    factors: Sequence[Tensor],
    *,
    out: Tensor,
    mean_scales: Tensor | None = None,
    jitter_std: float = 0.01,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Fill ``out`` (M,count,D) with draws from N(scale * mean, F'F + jitter_std**2 I) of M Gaussians, and return it.

    Args:
        means: (M,D).
        factors: M of them: (R,D) of ``gaussian_factor`` or ``pooled_factor``, where R may differ, or (D,) of
            ``diagonal_factor``.
        out: On the device and of the dtype of ``means``.
        mean_scales: (M,) factors on the means alone; SLCA lets old classes' means decay with them.
        jitter_std: Standard deviation of what is added in every direction.
        generator: On the device of ``means``; without one the global generator is used.
    """
    centres = means if mean_scales is None else means * mean_scales.to(means)[:, None]
    out.normal_(generator=generator).mul_(jitter_std).add_(centres[:, None])
    # One product for each Gaussian, added where the draws lie: a stack of the factors would be a copy of them, and
    # costs a third more than what it saves.
    for draws, factor in zip(out, factors, strict=True):
        noise = out.new_empty(len(draws), factor.shape[0]).normal_(generator=generator)
        draws.addmm_(noise, factor) if factor.ndim == 2 else draws.addcmul_(noise, factor)
    return out
