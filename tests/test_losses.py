"""The losses against hand values, float64 restatements and the stored fixtures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from vbm_ptm.losses import (
    logit_normalized_cross_entropy,
    symmetric_cross_entropy_terms,
    view_consistency_loss,
    view_divergence,
)

GOLDEN = Path(__file__).parent / "golden"


def softmax_by_hand(logits: Tensor) -> list[float]:
    exponentials = [math.exp(value) for value in logits.tolist()]
    return [value / sum(exponentials) for value in exponentials]


def divergence_by_hand(weak: Tensor, strong: Tensor) -> float:
    pairs = zip(softmax_by_hand(weak), softmax_by_hand(strong), strict=True)
    return sum(p * (math.log(p) - math.log(q)) for p, q in pairs)


class TestViewDivergence:
    def test_view_divergence__matches_hand_values(self) -> None:
        logits = torch.tensor(
            [[[1, 0, -1], [0, 0, 0], [1, 0, -1]], [[0, 0, 0], [2, 0, 0], [0, 1, 0]]], dtype=torch.float64
        )
        expected = torch.tensor([[0.266217, 0.0], [0.474266, 0.119499]], dtype=torch.float64)
        torch.testing.assert_close(view_divergence(logits), expected, atol=1e-6, rtol=0)
        assert view_divergence(logits)[0, 1] == 0.0
        assert view_consistency_loss(logits).item() == pytest.approx(0.214995, abs=1e-6)

    def test_view_divergence__goes_from_weak_to_strong(self) -> None:
        probabilities = torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]]], dtype=torch.float64)
        assert view_divergence(probabilities.log()).item() == pytest.approx(0.085123, abs=1e-6)
        assert view_divergence(probabilities.log().flip(1)).item() == pytest.approx(0.092033, abs=1e-6)
        two_classes = torch.tensor([[[0, math.log(3)], [0, 0]]], dtype=torch.float64)
        assert view_divergence(two_classes).item() == pytest.approx(0.130812, abs=1e-6)
        assert view_divergence(two_classes.flip(1)).item() == pytest.approx(0.143841, abs=1e-6)

    @settings(deadline=None, max_examples=40)
    @given(
        groups=st.integers(0, 4), views=st.integers(1, 5), classes=st.integers(1, 7), seed=st.integers(0, 99)
    )
    def test_view_divergence__pairs_each_strong_view_with_its_own_weak_one(
        self, groups: int, views: int, classes: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(groups, views, classes, generator=generator, dtype=torch.float64) * 3
        divergence = view_divergence(logits)
        assert divergence.shape == (groups, views - 1)
        assert bool((divergence > -1e-12).all())
        for group in range(groups):
            for view in range(1, views):
                by_hand = divergence_by_hand(logits[group, 0], logits[group, view])
                assert divergence[group, view - 1].item() == pytest.approx(by_hand, abs=1e-9)

    def test_view_divergence__of_a_ruled_out_column_is_no_number(self) -> None:
        logits = torch.zeros(2, 3, 4)
        logits[1, :, 0] = -torch.inf
        assert bool(view_divergence(logits)[1].isnan().all())
        with pytest.raises(ValueError, match="-inf"):
            view_consistency_loss(logits)

    def test_view_divergence__refuses_a_missing_view_axis(self) -> None:
        with pytest.raises(ValueError, match=r"\(4, 3\)"):
            view_divergence(torch.zeros(4, 3))


class TestViewConsistencyLoss:
    @pytest.mark.parametrize("name", ["view_kl_v2", "view_kl_v4"])
    @pytest.mark.parametrize(("mode", "detach_weak"), [("full", False), ("detached", True)])
    def test_view_consistency_loss__equals_the_fixture(self, name: str, mode: str, detach_weak: bool) -> None:
        fixture = load_file(GOLDEN / f"{name}.safetensors")
        logits = fixture["logits"].requires_grad_()
        loss = view_consistency_loss(logits, detach_weak=detach_weak)
        loss.backward()
        torch.testing.assert_close(loss, fixture[f"loss_{mode}"][0], atol=1e-12, rtol=0)
        torch.testing.assert_close(logits.grad, fixture[f"grad_{mode}"], atol=1e-12, rtol=0)

    def test_view_consistency_loss__detaches_the_weak_view_by_default(self) -> None:
        logits = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0), requires_grad=True)
        view_consistency_loss(logits).backward()
        assert logits.grad is not None
        assert bool((logits.grad[:, 0] == 0).all())
        assert bool((logits.grad[:, 1:] != 0).any())

    @pytest.mark.parametrize("shape", [(3, 1, 5), (0, 4, 5), (0, 1, 5)])
    def test_view_consistency_loss__is_zero_without_pairs(self, shape: tuple[int, ...]) -> None:
        logits = torch.ones(shape, requires_grad=True)
        loss = view_consistency_loss(logits)
        loss.backward()
        assert loss.item() == 0.0
        assert logits.grad is not None
        assert bool((logits.grad == 0).all())

    def test_view_consistency_loss__is_zero_for_equal_views(self) -> None:
        row = torch.randn(6, 1, 9, generator=torch.Generator().manual_seed(0)) * 20
        assert view_consistency_loss(row.expand(6, 4, 9)).item() == 0.0

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("detach_weak", [True, False])
    def test_view_consistency_loss__stays_finite_where_softmax_underflows(
        self, dtype: torch.dtype, detach_weak: bool
    ) -> None:
        logits = torch.tensor([[[60, 0, -60], [-60, 0, 60]]], dtype=dtype).div(0.1).requires_grad_()
        loss = view_consistency_loss(logits, detach_weak=detach_weak)
        loss.backward()
        assert loss.item() == pytest.approx(1200, rel=1e-2)
        assert logits.grad is not None
        assert bool(torch.isfinite(logits.grad).all())

    @pytest.mark.parametrize(
        ("given_dtype", "computed"),
        [
            (torch.float16, torch.float32),
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
        ],
    )
    def test_view_consistency_loss__computes_in_float32_at_least(
        self, given_dtype: torch.dtype, computed: torch.dtype
    ) -> None:
        logits = torch.randn(4, 3, 50, generator=torch.Generator().manual_seed(1)).to(given_dtype)
        loss = view_consistency_loss(logits)
        assert loss.dtype == computed
        torch.testing.assert_close(loss.double(), view_consistency_loss(logits.double()), rtol=1e-5, atol=0)


class TestLogitNormalizedCrossEntropy:
    def test_logit_normalized_cross_entropy__equals_the_fixture(self) -> None:
        fixture = load_file(GOLDEN / "slca_logit_norm.safetensors")
        logits = fixture["logits"].requires_grad_()
        loss = logit_normalized_cross_entropy(
            logits, fixture["labels"], fixture["task_sizes"].tolist(), fixture["tau"].item()
        )
        loss.backward()
        torch.testing.assert_close(loss, fixture["loss"][0], atol=1e-12, rtol=0)
        torch.testing.assert_close(logits.grad, fixture["grad"], atol=1e-12, rtol=0)

    @pytest.mark.parametrize(("label", "expected"), [(5, 0.00060531087), (1, 8.88949410)])
    def test_logit_normalized_cross_entropy__matches_hand_values_of_unequal_tasks(
        self, label: int, expected: float
    ) -> None:
        logits = torch.tensor([[3, 4, 0, 0, 5, 12]], dtype=torch.float64)
        loss = logit_normalized_cross_entropy(logits, torch.tensor([label]), (2, 4), 0.1)
        assert loss.item() == pytest.approx(expected, abs=1e-8)

    def test_logit_normalized_cross_entropy__has_a_finite_gradient_at_zero_logits(self) -> None:
        logits = torch.zeros(2, 5, requires_grad=True)
        logit_normalized_cross_entropy(logits, torch.tensor([0, 4]), (2, 3), 0.1).backward()
        assert logits.grad is not None
        assert bool(torch.isfinite(logits.grad).all())

    def test_logit_normalized_cross_entropy__computes_half_types_in_float32(self) -> None:
        logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
        labels = torch.arange(6) % 5
        loss = logit_normalized_cross_entropy(logits, labels, (2, 3), 0.1)
        reference = logit_normalized_cross_entropy(logits.double(), labels, (2, 3), 0.1)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=0)

    def test_logit_normalized_cross_entropy__refuses_sizes_that_do_not_fit(self) -> None:
        with pytest.raises(ValueError, match=r"\[2, 2\].* 4 columns"):
            logit_normalized_cross_entropy(torch.zeros(1, 5), torch.tensor([0]), (2, 2), 0.1)


def test_symmetric_cross_entropy__equals_the_reference_and_hand_values() -> None:
    golden = load_file(Path(__file__).parent / "golden2" / "slcapp.safetensors")
    logits = golden["sce.logits"].requires_grad_()
    plain, reverse = symmetric_cross_entropy_terms(logits, golden["sce.labels"])
    torch.testing.assert_close(plain.mean(), golden["sce.cross_entropy"])
    torch.testing.assert_close(reverse.mean(), golden["sce.reverse"])
    torch.testing.assert_close((plain + 0.1 * reverse).mean(), golden["sce.loss_1_01"])
    loss = (0.5 * plain + 0.5 * reverse).mean()
    torch.testing.assert_close(loss, golden["sce.loss_half_half"])
    loss.backward()
    torch.testing.assert_close(logits.grad, golden["sce.grad"])
    by_hand = symmetric_cross_entropy_terms(torch.tensor([[math.log(3.0), 0.0]]), torch.tensor([0]))
    assert [term.item() for term in by_hand] == pytest.approx([0.2876821, 2.3025851], abs=1e-6)
    _, bounded = symmetric_cross_entropy_terms(torch.tensor([[0.0, 1e4]]), torch.tensor([0]))
    assert bounded.item() <= 9.2104
