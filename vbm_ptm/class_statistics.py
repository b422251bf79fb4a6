"""Gaussians of class features, kept as a mean and a factor of the covariance, and draws from them.

With the factor F (R,D) the covariance is F'F + 1e-4 I. Nothing is decomposed when drawing, and F'F is the
exact sample covariance for every class size from 1 up, where a Cholesky factor of it fails or is NaN. A diagonal
covariance has a vector of standard deviations in place of F.
Shapes: N images of one class, or of K classes, D width, R = min(N-1, D), or min(N-K, D), rows of a factor.
"""

from __future__ import annotations

import math

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
    _, scales, directions = torch.linalg.svd(features - mean, full_matrices=False)
    rank = min(num_images - 1, width)  # centring takes one dimension away; one image leaves none
    return mean, scales[:rank, None] * directions[:rank] / math.sqrt(num_images - 1)


def diagonal_factor(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (D,) and the standard deviations (D,) of features (N,D), both float64; 0 for one image."""
    mean, factor = gaussian_factor(features)
    deviations: Tensor = factor.square().sum(dim=0).sqrt()
    return mean, deviations


def pooled_factor(features: Tensor, labels: Tensor) -> Tensor:
    """Return the float64 factor (R,D) of the covariance within classes, of features (N,D) with labels (N,)."""
    classes, positions = labels.unique(return_inverse=True)
    means = torch.stack([features[labels == each].double().mean(dim=0) for each in classes])
    _, scales, directions = torch.linalg.svd(features.double() - means[positions], full_matrices=False)
    freedom = len(labels) - len(classes)
    rank = min(freedom, features.shape[1])
    factor: Tensor = scales[:rank, None] * directions[:rank] / math.sqrt(max(freedom, 1))
    return factor


def draw(
    mean: Tensor,
    factor: Tensor,
    count: int,
    *,
    mean_scale: float = 1.0,
    jitter_std: float = 0.01,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw (count,D) features from N(mean_scale * mean, F'F + jitter_std**2 I).

    Args:
        mean: (D,).
        factor: (R,D) of ``gaussian_factor`` or ``pooled_factor``, or (D,) of ``diagonal_factor``.
        count: Number of draws.
        mean_scale: Factor on the mean alone; SLCA lets old classes' means decay with it.
        jitter_std: Standard deviation of what is added in every direction.
        generator: On the device of ``mean``; without one the global generator is used.
    """

    def noise(columns: int) -> Tensor:
        return torch.randn(count, columns, generator=generator, dtype=mean.dtype, device=mean.device)

    spread = noise(len(factor)) @ factor if factor.ndim == 2 else noise(len(mean)) * factor
    return mean_scale * mean + spread + jitter_std * noise(len(mean))
