"""Gaussian factors against the float64 covariance, and draws against the Gaussian they come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vbm_ptm import class_statistics
from vbm_ptm.class_statistics import diagonal_factor, gaussian_factor, pooled_factor
from vbm_ptm.randomness import seeded


def covariance(features: Tensor) -> Tensor:
    return torch.from_numpy(np.atleast_2d(np.cov(features.double().numpy(), rowvar=False)))


def random_features(num_images: int, width: int, *, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator, dtype=torch.float64)
    noise = torch.randn(num_images, width, generator=generator, dtype=torch.float64)
    return scale * (noise @ mixing + 3)


def draw(mean: Tensor, factor: Tensor, count: int, *, mean_scale: float = 1.0, **options: Any) -> Tensor:
    """Draw (count,D) from one Gaussian."""
    out = mean.new_empty(1, count, len(mean))
    return class_statistics.draw(
        mean[None], [factor], out=out, mean_scales=torch.tensor([mean_scale]), **options
    )[0]


def test_gaussian_factor__matches_hand_values() -> None:
    mean, factor = gaussian_factor(torch.tensor([[1, 2], [3, 2], [5, 8]]))
    assert mean.tolist() == [3.0, 4.0]
    assert factor.shape == (2, 2)
    expected = torch.tensor([[4, 6], [6, 12]], dtype=torch.float64)
    torch.testing.assert_close(factor.T @ factor, expected, atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=50)
@given(num_images=st.integers(2, 30), width=st.integers(1, 20), seed=st.integers(0, 99))
def test_gaussian_factor__is_exact_for_every_class_size(num_images: int, width: int, seed: int) -> None:
    features = random_features(num_images, width, seed=seed)
    mean, factor = gaussian_factor(features)
    assert factor.shape == (min(num_images - 1, width), width)
    torch.testing.assert_close(mean, features.mean(0))
    expected = covariance(features)
    torch.testing.assert_close(factor.T @ factor, expected, rtol=0, atol=1e-12 * expected.abs().max().item())


@pytest.mark.parametrize("num_images", [2, 38, 200])
def test_gaussian_factor__keeps_large_scales(num_images: int) -> None:
    """A float32 Cholesky factor fails here: few images, many directions, large features."""
    features = random_features(num_images, 96, scale=1e4).float()
    _, factor = gaussian_factor(features)
    expected = covariance(features)
    atol = 1e-12 * expected.abs().max().item()
    torch.testing.assert_close(factor.T @ factor, expected, rtol=0, atol=atol)


def test_gaussian_factor__of_one_image_is_empty() -> None:
    mean, factor = gaussian_factor(torch.tensor([[1.0, 2.0, 3.0]]))
    assert mean.tolist() == [1.0, 2.0, 3.0]
    assert factor.shape == (0, 3)


def test_gaussian_factor__of_equal_images_is_zero() -> None:
    _, factor = gaussian_factor(torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]))
    assert factor.abs().max().item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_gaussian_factor__is_float64_and_without_gradient(dtype: torch.dtype) -> None:
    features = random_features(5, 3).to(dtype).requires_grad_()
    for tensor in gaussian_factor(features):
        assert tensor.dtype == torch.float64
        assert not tensor.requires_grad


@pytest.mark.parametrize("shape", [(0, 4), (4,)])
def test_gaussian_factor__refuses_no_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="N >= 1"):
        gaussian_factor(torch.zeros(shape))


@pytest.mark.parametrize("num_images", [1, 3, 40])
def test_draw__has_the_mean_and_covariance_of_the_class(num_images: int) -> None:
    features = random_features(num_images, 4)
    mean, factor = gaussian_factor(features)
    count = 200_000
    draws = draw(
        mean, factor, count, mean_scale=0.9, jitter_std=0.5, generator=torch.Generator().manual_seed(0)
    )
    expected = factor.T @ factor + 0.25 * torch.eye(4, dtype=torch.float64)
    assert draws.shape == (count, 4)
    spread = expected.diagonal().sqrt()
    # Five standard errors of a mean and of a covariance entry.
    assert bool(((draws.mean(0) - 0.9 * mean).abs() < 5 * spread / count**0.5).all())
    tolerance = 5 * (2 / count) ** 0.5 * spread[:, None] * spread
    assert bool(((covariance(draws) - expected).abs() < tolerance).all())


def test_draw__adds_a_ten_thousandth_of_variance_by_default() -> None:
    """One image has no spread of its own: what is left is 1e-4 I."""
    mean, factor = gaussian_factor(torch.tensor([[1.0, 2.0]]))
    draws = draw(mean, factor, 100_000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.mean(0), mean, rtol=0, atol=2e-4)
    torch.testing.assert_close(covariance(draws), 1e-4 * torch.eye(2).double(), rtol=0, atol=3e-6)


def test_draw__scales_the_mean_alone() -> None:
    mean, factor = gaussian_factor(random_features(6, 3))
    plain = draw(mean, factor, 5, generator=torch.Generator().manual_seed(0))
    scaled = draw(mean, factor, 5, mean_scale=0.25, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain - scaled, (0.75 * mean).expand(5, 3))


def test_draw__uses_the_global_generator_or_the_given_one() -> None:
    mean, factor = (tensor.float() for tensor in gaussian_factor(random_features(6, 3)))
    with seeded(3):
        first = draw(mean, factor, 5)
    with seeded(3):
        state = torch.default_generator.get_state()
        given_one = draw(mean, factor, 5, generator=torch.Generator().manual_seed(3))
        assert torch.equal(state, torch.default_generator.get_state())
    assert first.dtype == torch.float32
    assert torch.equal(first, given_one)


def test_diagonal_factor__holds_standard_deviations_and_draws_by_them() -> None:
    features = random_features(40, 5)
    mean, deviations = diagonal_factor(features)
    torch.testing.assert_close(mean, features.mean(dim=0))
    torch.testing.assert_close(deviations, features.std(dim=0))
    assert diagonal_factor(features[:1])[1].tolist() == [0.0] * 5
    draws = draw(mean, deviations, 200_000, generator=torch.Generator().manual_seed(0))
    expected = torch.diag(deviations.square() + 1e-4)
    torch.testing.assert_close(covariance(draws), expected, atol=0.02 * float(expected.max()), rtol=0)


def test_pooled_factor__is_the_covariance_within_classes() -> None:
    sizes = (7, 4, 1)
    labels = torch.tensor([5] * 7 + [2] * 4 + [9])
    features = random_features(12, 3) + labels[:, None]
    parts = [features[labels == each] for each in (5, 2, 9)]
    scatter = sum((part - part.mean(dim=0)).T @ (part - part.mean(dim=0)) for part in parts)
    factor = pooled_factor(features, labels)
    assert factor.shape == (3, 3)
    torch.testing.assert_close(factor.T @ factor, scatter / (12 - len(sizes)), atol=1e-9, rtol=1e-9)
    assert pooled_factor(features[-2:], labels[-2:]).shape == (0, 3)


def test_draw__of_several_gaussians_keeps_them_apart() -> None:
    """Ranks of 0, 2 and 5, scales of their own: every class has its own mean and covariance."""
    given = [gaussian_factor(random_features(size, 4, seed=size)) for size in (1, 3, 6)]
    means, factors = torch.stack([mean for mean, _ in given]), [factor for _, factor in given]
    scales, count = torch.tensor([0.5, 1.0, 2.0]), 100_000
    out = torch.empty(3, count, 4, dtype=torch.float64)
    draws = class_statistics.draw(
        means, factors, out=out, mean_scales=scales, generator=torch.Generator().manual_seed(0)
    )
    assert draws is out
    for own, mean, factor, scale in zip(draws, means, factors, scales, strict=True):
        expected = factor.T @ factor + 1e-4 * torch.eye(4, dtype=torch.float64)
        spread = expected.diagonal().sqrt()
        assert bool(((own.mean(0) - scale * mean).abs() < 5 * spread / count**0.5).all())
        tolerance = 5 * (2 / count) ** 0.5 * spread[:, None] * spread
        assert bool(((covariance(own) - expected).abs() < tolerance).all())


def test_factors__do_not_hang_on_the_last_bit() -> None:
    features, labels = random_features(6, 4), torch.tensor([0, 0, 0, 1, 1, 1])
    noise = 1e-13 * torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for factor in (lambda values: gaussian_factor(values)[1], lambda values: pooled_factor(values, labels)):
        turned = -features  # the decomposition of what is turned round begins elsewhere
        torch.testing.assert_close(factor(features + noise), factor(features), atol=1e-10, rtol=0)
        torch.testing.assert_close(factor(turned), factor(features), atol=1e-10, rtol=0)
