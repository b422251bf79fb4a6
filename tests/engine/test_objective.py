"""The objective against hand values, and one step against the same step over several ranks.

Shapes: G groups, V views, N = G * V images, K columns.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from vbm_ptm.engine.objective import ObjectiveConfig, PartSize, ViewBatchObjective, column_of
from vbm_ptm.learners.base import LearnerOutput
from vbm_ptm.losses import view_consistency_loss
from vbm_ptm.replay import ReplayOutput

TWO_GROUPS = torch.tensor(
    [[[1, 0, -1], [0, 0, 0], [1, 0, -1]], [[0, 0, 0], [2, 0, 0], [0, 1, 0]]], dtype=torch.float64
)


def output_of(logits: Tensor, columns: list[int] | None = None, **auxiliary: Tensor) -> LearnerOutput:
    """Return what a learner would for logits (G,V,K) or (N,K)."""
    flat = logits.reshape(-1, logits.shape[-1])
    return LearnerOutput(flat, torch.tensor(columns or list(range(flat.shape[1]))), auxiliary)


def objective(**settings: float | bool) -> ViewBatchObjective:
    return ViewBatchObjective(ObjectiveConfig.model_validate(settings))


def test_objective__has_the_golden_consistency() -> None:
    output = output_of(TWO_GROUPS.clone().requires_grad_())
    loss, parts = objective()(output, torch.tensor([0, 1]), num_views=3, num_global_groups=2)
    assert loss.requires_grad
    assert parts["consistency"].item() == pytest.approx((0.266217 + 0 + 0.474266 + 0.119499) / 4, abs=1e-6)
    # Minus the logarithm of each of six softmax values, label 0 in the first group and 1 in the second.
    by_hand = [
        math.log(1 + math.exp(-1) + math.exp(-2)),
        math.log(3),
        math.log(1 + math.exp(-1) + math.exp(-2)),
        math.log(3),
        math.log(2 + math.exp(2)),
        math.log(2 + math.e) - 1,
    ]
    assert parts["cross_entropy"].item() == pytest.approx(sum(by_hand) / 6, abs=1e-12)
    assert loss.item() == pytest.approx(
        parts["cross_entropy"].item() + parts["consistency"].item(), abs=1e-12
    )
    assert parts["loss"].item() == loss.item()
    assert parts["accuracy"].item() == pytest.approx(4 / 6)  # a tie goes to the first class
    assert set(parts) == {"loss", "cross_entropy", "consistency", "accuracy"}
    assert not any(part.requires_grad for part in parts.values())


@pytest.mark.parametrize("weight", [0.0, 0.5, 2.0])
def test_objective__weights_the_consistency_alone(weight: float) -> None:
    labels = torch.tensor([0, 1])
    _, once = objective()(output_of(TWO_GROUPS), labels, num_views=3, num_global_groups=2)
    _, parts = objective(consistency_weight=weight)(
        output_of(TWO_GROUPS), labels, num_views=3, num_global_groups=2
    )
    assert parts["consistency"].item() == pytest.approx(weight * once["consistency"].item(), abs=1e-12)
    assert parts["cross_entropy"].item() == once["cross_entropy"].item()


def test_objective__consistency_counts_from_its_first_epoch_on() -> None:
    labels = torch.tensor([0, 1])

    def consistency(start_epoch: int, epoch: int) -> float:
        _, parts = objective(start_epoch=start_epoch)(
            output_of(TWO_GROUPS), labels, num_views=3, num_global_groups=2, epoch=epoch
        )
        assert parts["loss"].item() == parts["cross_entropy"].item() + parts["consistency"].item()
        return parts["consistency"].item()

    full = consistency(0, 0)
    assert full > 0.2
    assert [consistency(6, epoch) for epoch in (0, 5, 6, 7)] == [0, 0, full, full]


@pytest.mark.parametrize("detach_weak", [True, False])
def test_objective__weak_view_is_a_target_unless_told_otherwise(detach_weak: bool) -> None:
    weak_gradients = []
    for weight in (0.0, 1.0):
        logits = TWO_GROUPS.clone().requires_grad_()
        loss, _ = objective(consistency_weight=weight, detach_weak=detach_weak)(
            output_of(logits), torch.tensor([0, 1]), num_views=3, num_global_groups=2
        )
        loss.backward()
        weak_gradients.append(logits.grad[:, 0].clone())
    assert torch.allclose(*weak_gradients) == detach_weak


def test_objective__with_one_view_is_the_mean_cross_entropy() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 3.0], [0.5, -1.0, 2.0, 0.0]], dtype=torch.float64)
    loss, parts = objective()(output_of(logits), torch.tensor([3, 0]), num_views=1, num_global_groups=2)
    first = math.log(sum(math.exp(value) for value in (2, 1, 0, 3))) - 3
    second = math.log(sum(math.exp(value) for value in (0.5, -1, 2, 0))) - 0.5
    assert first == pytest.approx(0.4401897, abs=1e-7)
    assert loss.item() == pytest.approx((first + second) / 2, abs=1e-12)
    assert set(parts) == {"loss", "cross_entropy", "accuracy"}


def test_objective__maps_labels_through_the_columns() -> None:
    """Golden value of the masked cross-entropy: two known classes, then the current ones 2 and 3."""
    sliced = torch.tensor([[0.0, 3.0]], dtype=torch.float64)
    loss, parts = objective()(output_of(sliced, [2, 3]), torch.tensor([3]), num_views=1, num_global_groups=1)
    assert loss.item() == pytest.approx(0.0485873, abs=1e-7)
    assert parts["accuracy"].item() == 1.0
    permuted, _ = objective()(
        output_of(sliced.flip(1), [3, 2]), torch.tensor([3]), num_views=1, num_global_groups=1
    )
    assert permuted.item() == loss.item()


def test_objective__of_two_kinds_is_a_mean_over_images_and_pairs() -> None:
    """Two groups of three views and two samples of one view: eight images, four pairs."""
    singles = torch.tensor([[3, 0, 1], [0, 1, 2]], dtype=torch.float64)
    output = output_of(torch.cat([TWO_GROUPS.flatten(0, 1), singles]), bonus=torch.arange(8.0))
    labels, others = torch.tensor([0, 1]), torch.tensor([2, 2])
    _, parts = objective()(
        output, labels, num_views=3, num_global_groups=2, exemplars=(others, PartSize(1, 2))
    )
    _, grouped = objective()(output_of(TWO_GROUPS), labels, num_views=3, num_global_groups=2)
    _, single = objective()(output_of(singles), others, num_views=1, num_global_groups=2)
    for name in ("cross_entropy", "accuracy"):
        assert parts[name].item() == pytest.approx(
            (6 * grouped[name] + 2 * single[name]).item() / 8, abs=1e-12
        )
    assert parts["consistency"].item() == pytest.approx(grouped["consistency"].item(), abs=1e-12)
    assert parts["bonus"].item() == pytest.approx(28 / 8)
    # The other way round: views for the exemplars, behind the current samples.
    output = output_of(torch.cat([singles, TWO_GROUPS.flatten(0, 1)]))
    _, swapped = objective()(
        output, others, num_views=1, num_global_groups=2, exemplars=(labels, PartSize(3, 2))
    )
    for name in ("cross_entropy", "accuracy", "consistency"):
        assert swapped[name].item() == pytest.approx(parts[name].item(), abs=1e-12)


def test_objective__averages_auxiliaries_over_images_or_takes_them_as_they_are() -> None:
    logits = TWO_GROUPS.clone().requires_grad_()
    per_image = torch.arange(6.0, dtype=torch.float64, requires_grad=True)
    of_parameters = torch.tensor(-0.25, dtype=torch.float64, requires_grad=True)
    loss, parts = objective()(
        output_of(logits, None, pull=per_image, orthogonality=of_parameters),
        torch.tensor([0, 1]),
        num_views=3,
        num_global_groups=2,
    )
    assert parts["pull"].item() == pytest.approx(2.5)
    assert parts["orthogonality"].item() == -0.25
    terms = ("cross_entropy", "consistency", "pull", "orthogonality")
    assert loss.item() == pytest.approx(sum(parts[name].item() for name in terms))
    loss.backward()
    assert per_image.grad.tolist() == pytest.approx([1 / 6] * 6)
    assert of_parameters.grad.item() == 1.0


@pytest.mark.parametrize("shares", [(3, 2), (5, 0), (0, 5), (1, 4)])
@pytest.mark.parametrize("num_views", [1, 2, 3])
def test_objective__average_over_ranks_is_the_whole_step(shares: tuple[int, int], num_views: int) -> None:
    """Parallel training averages the ranks' gradients; an empty rank contributes zeros and no NaN."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, num_views, 7, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 3, 1, 3, 2])
    start = torch.randn(7, 4, generator=generator, dtype=torch.float64)

    def of_part(groups: slice, num_ranks: int) -> tuple[Tensor, dict[str, Tensor]]:
        weights = start.clone().requires_grad_()
        logits = inputs[groups] @ weights
        loss, parts = objective()(
            output_of(
                logits,
                None,
                pull=logits.reshape(-1, 4).square().sum(1),
                orthogonality=weights.square().sum(),
            ),
            labels[groups],
            num_views=num_views,
            num_global_groups=5,
            num_ranks=num_ranks,
        )
        loss.backward()
        return weights.grad, parts

    whole, whole_parts = of_part(slice(0, 5), 1)
    one, one_parts = of_part(slice(0, shares[0]), 2)
    two, two_parts = of_part(slice(shares[0], 5), 2)
    torch.testing.assert_close((one + two) / 2, whole, atol=1e-14, rtol=1e-12)
    assert list(one_parts) == list(two_parts) == list(whole_parts)
    for name, value in whole_parts.items():
        torch.testing.assert_close((one_parts[name] + two_parts[name]) / 2, value, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("num_parts", [1, 2, 5, 7])
@pytest.mark.parametrize("num_views", [1, 3])
def test_objective__of_micro_batches_adds_up_to_the_whole_step(num_parts: int, num_views: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, num_views, 7, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 3, 1, 3, 2])
    start = torch.randn(7, 4, generator=generator, dtype=torch.float64)

    def gradient(num_micro_batches: int) -> tuple[Tensor, dict[str, float]]:
        weights = start.clone().requires_grad_()
        sums: dict[str, float] = {}
        bounds = [len(inputs) * part // num_micro_batches for part in range(num_micro_batches + 1)]
        for first, last in itertools.pairwise(bounds):
            logits = inputs[first:last] @ weights
            squares = logits.reshape(-1, 4).square().sum(1)
            loss, parts = objective()(
                output_of(logits, None, pull=squares, orthogonality=weights.square().sum()),
                labels[first:last],
                num_views=num_views,
                num_global_groups=5,
                num_micro_batches=num_micro_batches,
            )
            loss.backward()
            sums = {name: sums.get(name, 0.0) + value.item() for name, value in parts.items()}
        return weights.grad, sums

    whole, expected = gradient(1)
    accumulated, sums = gradient(num_parts)
    torch.testing.assert_close(accumulated, whole, atol=1e-13, rtol=1e-12)
    assert sums == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("label", [0, 4, 9])
def test_objective__refuses_a_label_without_a_column(label: int) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        objective()(
            output_of(torch.zeros(1, 2), [2, 3]), torch.tensor([label]), num_views=1, num_global_groups=1
        )


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_objective__computes_half_types_in_float32(half: torch.dtype) -> None:
    logits = TWO_GROUPS.to(half)
    loss, parts = objective()(output_of(logits), torch.tensor([0, 1]), num_views=3, num_global_groups=2)
    assert loss.dtype == torch.float32
    expected, _ = objective()(
        output_of(TWO_GROUPS.float()), torch.tensor([0, 1]), num_views=3, num_global_groups=2
    )
    assert loss.item() == expected.item()
    double, _ = objective()(output_of(TWO_GROUPS), torch.tensor([0, 1]), num_views=3, num_global_groups=2)
    assert double.dtype == torch.float64
    assert parts["accuracy"].dtype == torch.float32


def test_column_of__finds_positions_and_marks_what_has_none() -> None:
    columns = torch.tensor([7, 2, 5])
    assert column_of(torch.tensor([5, 7, 2, 3, 5]), columns).tolist() == [2, 0, 1, -1, 2]
    assert column_of(torch.tensor([], dtype=torch.long), columns).tolist() == []
    assert column_of(torch.tensor([1, 2]), torch.tensor([], dtype=torch.long)).tolist() == [-1, -1]


def test_objective__averages_losses_over_all_images_of_the_step() -> None:
    """ER's union: the mean over three rows, not the sum of two means."""
    rows = torch.tensor([0.239545, 0.551445, 1.551445], dtype=torch.float64)
    output = output_of(torch.tensor([[2.0, 0, 0], [0, 1, 0]]))._replace(
        supervised=rows, replays=(ReplayOutput(torch.tensor([[0.0, 0, 1]]), {}),)
    )
    loss, parts = objective()(
        output, torch.tensor([0, 1]), num_views=1, num_global_groups=2, replays=[PartSize(1, 1)]
    )
    assert loss.item() == pytest.approx(0.780811, abs=1e-6)
    assert set(parts) == {"loss", "supervised", "accuracy"}


def test_objective__pools_the_agreement_of_current_and_replayed_views() -> None:
    """One group each, two views, and the terms of a draw over its own images."""
    current = torch.tensor([[2.0, 0, 0], [0, 0, 0]], dtype=torch.float64)
    past = torch.tensor([[0.0, 0, 1], [0, 1, 0]], dtype=torch.float64)
    terms = {
        "replay": torch.tensor([1.551445, 1.551445]) * 0.5,
        "dark": 0.1 * torch.tensor([0.666667, 0.666667]),
    }
    output = output_of(current)._replace(replays=(ReplayOutput(past, terms),))
    loss, parts = objective()(
        output, torch.tensor([0]), num_views=2, num_global_groups=1, replays=[PartSize(2, 1)]
    )
    assert parts["cross_entropy"].item() == pytest.approx(0.669079, abs=1e-6)
    assert parts["consistency"].item() == pytest.approx((0.433040 + 0.364175) / 2, abs=1e-6)
    assert parts["replay"].item() == pytest.approx(0.5 * 1.551445, abs=1e-6)
    assert loss.item() == pytest.approx(0.669079 + 0.398607 + 0.5 * 1.551445 + 0.1 * 0.666667, abs=1e-5)


def test_objective__of_one_view_in_one_part_pools_the_other_alone() -> None:
    current = torch.randn(4, 3, dtype=torch.float64)
    past = torch.randn(6, 3, dtype=torch.float64)
    output = output_of(current)._replace(replays=(ReplayOutput(past, {}),))
    _, parts = objective()(
        output, torch.tensor([0, 1, 2, 0]), num_views=1, num_global_groups=4, replays=[PartSize(3, 2)]
    )
    assert parts["consistency"].item() == pytest.approx(
        float(view_consistency_loss(past.unflatten(0, (2, 3)))), abs=1e-12
    )
