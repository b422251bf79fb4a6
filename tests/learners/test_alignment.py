"""Alignment apart from the learners: what is kept of a task, and heads trained on draws.

Shapes: D width (3), M Gaussians, K classes.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.learners.alignment import AlignmentConfig, Gaussians, align, class_gaussians, gaussians_size
from vbm_ptm.randomness import seeded

CONFIG = AlignmentConfig(name="test", alignment_epochs=3, alignment_samples_per_class=8)


def corners(ages: Tensor | None = None) -> Gaussians:
    """Four classes along axes, without any spread of their own."""
    means = torch.cat([torch.eye(3), -torch.ones(1, 3)])
    return Gaussians(
        means, [torch.zeros(0, 3)] * 4, torch.tensor([2, 0, 3, 1]), torch.zeros(4) if ages is None else ages
    )


class Recording(nn.Linear):
    """A head that keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(3, 4)
        self.given: list[Tensor] = []

    def forward(self, features: Tensor) -> Tensor:
        self.given.append(features.clone())
        return super().forward(features)


def test_align__trains_heads_on_every_draw_once_an_epoch() -> None:
    heads = Recording()
    with seeded(0):
        align(heads, corners(), CONFIG, loss=F.cross_entropy)
    assert [len(given) for given in heads.given] == [8] * (4 * 3)
    for epoch in range(3):
        rows = torch.cat(heads.given[4 * epoch : 4 * epoch + 4])
        nearest = torch.cdist(rows, corners().means).argmin(dim=1)
        assert torch.bincount(nearest).tolist() == [8] * 4
        assert len(rows.unique(dim=0)) == 32
    assert not any(parameter.requires_grad for parameter in heads.parameters())
    with seeded(0):
        long = CONFIG.model_copy(update={"alignment_epochs": 100, "alignment_learning_rate": 1.0})
        align(heads, corners(), long, loss=F.cross_entropy)
    assert heads(corners().means).argmax(dim=1).tolist() == [2, 0, 3, 1]


def test_align__scales_means_once_and_draws_anew_in_every_epoch() -> None:
    heads, asked = Recording(), []

    def draw_scales(generator: torch.Generator) -> Tensor:
        asked.append(torch.rand(4, 8, generator=generator) + 1)
        return asked[-1]

    with seeded(0):
        align(
            heads,
            corners(),
            CONFIG,
            loss=F.cross_entropy,
            mean_scales=torch.full((4,), 100.0),
            draw_scales=draw_scales,
        )
    assert len(asked) == 3
    assert not torch.equal(asked[0], asked[1])
    lengths = torch.cat(heads.given[:4]).abs().amax(dim=1).sort().values
    torch.testing.assert_close(lengths, 100 * asked[0].flatten().sort().values, atol=0.1, rtol=0)


def test_align__is_the_same_under_the_same_seed_and_leaves_the_generator_one_draw_further() -> None:
    results, states = [], []
    for seed in (1, 1, 2):
        with seeded(seed):
            heads = nn.Linear(3, 4)
            align(heads, corners(), CONFIG, loss=F.cross_entropy)
            states.append(torch.rand(()))
        results.append(heads.weight)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert states[0] == states[1]


@pytest.mark.parametrize(("covariance", "numbers"), [("full", 3 * 3), ("diagonal", 4 * 3), ("shared", 3 * 3)])
def test_class_gaussians__keep_as_much_as_is_announced(covariance: str, numbers: int) -> None:
    """Classes of two images and of one: full and shared keep two means and one direction."""
    values = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    kept = class_gaussians(values, torch.tensor([4, 7, 4]), [4, 7], covariance=covariance)
    assert sum(tensor.numel() for tensor in kept.values()) == numbers
    assert gaussians_size([2, 1], 3, covariance=covariance) == numbers
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}
    torch.testing.assert_close(kept["mean_4"], (values[0] + values[2]) / 2)
