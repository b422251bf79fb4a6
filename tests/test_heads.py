"""One head per task: growth, initial values, and what stays untouched."""

from __future__ import annotations

import warnings

import pytest
import torch

from vbm_ptm.heads import CosineHead, CosineTaskHead, TaskHeads
from vbm_ptm.randomness import seeded


def build_heads(*sizes: int, width: int = 8) -> TaskHeads:
    heads = TaskHeads(width)
    for size in sizes:
        heads.append(size)
    return heads


def test_task_heads__concatenates_the_heads_in_task_order() -> None:
    heads = build_heads(2, 3)
    features = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    logits = heads(features)
    assert heads.sizes == (2, 3)
    for index, columns in enumerate([slice(0, 2), slice(2, 5)]):
        weight = heads.get_parameter(f"tasks.{index}.weight")
        torch.testing.assert_close(logits[:, columns], features @ weight.T)
        assert torch.equal(heads.forward_task(index, features), logits[:, columns])


def test_task_heads__adds_the_bias() -> None:
    heads = build_heads(2)
    with torch.no_grad():
        heads.get_parameter("tasks.0.bias").copy_(torch.tensor([1.0, -1.0]))
    assert heads(torch.zeros(1, 8)).tolist() == [[1.0, -1.0]]


@pytest.mark.parametrize(("sizes", "num_images", "columns"), [((), 3, 0), ((), 0, 0), ((2, 3), 0, 5)])
def test_task_heads__takes_no_images_and_no_heads(
    sizes: tuple[int, ...], num_images: int, columns: int
) -> None:
    assert build_heads(*sizes)(torch.zeros(num_images, 8)).shape == (num_images, columns)


def test_task_heads__has_no_column_for_a_task_without_new_classes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heads = build_heads(2, 0, 1)
    assert heads.sizes == (2, 0, 1)
    assert heads(torch.ones(3, 8)).shape == (3, 3)


def test_task_heads__starts_from_a_truncated_normal_and_zero_bias() -> None:
    with seeded(0):
        heads = build_heads(100, width=100)
    weight, bias = heads.get_parameter("tasks.0.weight"), heads.get_parameter("tasks.0.bias")
    assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert abs(weight.mean().item()) < 1e-3
    assert bool((bias == 0).all())


def test_task_heads__draws_from_the_callers_generator() -> None:
    with seeded(1):
        first = build_heads(3, 4)
    with seeded(1):
        again = build_heads(3, 4)
    with seeded(2):
        other = build_heads(3, 4)
    pairs = zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    assert not torch.equal(first.get_parameter("tasks.0.weight"), other.get_parameter("tasks.0.weight"))


def test_train_only__freezes_every_head_without_one_of_the_classes() -> None:
    heads = build_heads(2, 3, 0, 1)
    heads.train_only([2, 5])
    frozen = [not heads.get_parameter(f"tasks.{index}.weight").requires_grad for index in range(4)]
    assert frozen == [True, False, True, False]
    shapes = [tuple(parameter.shape) for parameter in heads.trainable_parameters()]
    assert shapes == [(3, 8), (3,), (1, 8), (1,)]


def test_train_only__makes_a_frozen_head_trainable_again() -> None:
    heads = build_heads(2, 3)
    heads.train_only([4])
    heads.train_only([0, 4])
    assert len(heads.trainable_parameters()) == 4


def test_train_only__keeps_an_old_head_bit_frozen_under_weight_decay_and_momentum() -> None:
    """Masking alone would let weight decay move the old rows."""
    with seeded(0):
        heads = build_heads(2, 2)
    before = {name: value.clone() for name, value in heads.state_dict().items()}
    heads.train_only([2, 3])
    optimizer = torch.optim.SGD(heads.trainable_parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        logits = heads(torch.ones(4, 8))[:, 2:]
        torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1, 0, 0])).backward()
        optimizer.step()
    for name, value in heads.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("tasks.0."), name


def test_task_heads__logits_are_not_rounded_by_autocast() -> None:
    with seeded(0):
        heads = TaskHeads(48)
        heads.append(3)
        heads.append(2)
        features = torch.randn(6, 48)
    expected = heads(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(heads(features), expected)
        assert torch.equal(heads.forward_task(1, features), expected[:, 3:])
        assert heads(features.bfloat16()).dtype == torch.float32


def test_joined__gives_the_same_logits_and_goes_back_row_by_row() -> None:
    heads, features = TaskHeads(6), torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    with seeded(0):
        for size in (2, 0, 3):
            heads.append(size)
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter)
    joined = heads.joined()
    torch.testing.assert_close(joined(features), heads(features))
    before = heads(features)
    with torch.no_grad():
        joined.weight[3] += 1
        joined.bias[0] -= 2
    assert torch.equal(heads(features), before)  # a copy, until it is taken back
    heads.load_joined(joined)
    torch.testing.assert_close(heads(features), joined(features))
    assert not torch.equal(heads(features), before)


def test_cosine_head__scales_cosines_and_sees_no_length() -> None:
    with seeded(0):
        head = CosineHead(768, 500)
    assert head.scale.item() == 1
    assert 0.99 / 768**0.5 < head.weight.abs().max() <= 1 / 768**0.5
    features = torch.randn(3, 768, generator=torch.Generator().manual_seed(0))
    expected = torch.nn.functional.cosine_similarity(features[:, None], head.weight, dim=2)
    torch.testing.assert_close(head(features), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(head(7 * features), expected, atol=1e-6, rtol=0)
    with torch.no_grad():
        head.scale.fill_(20)
    torch.testing.assert_close(head(features), 20 * expected, atol=2e-5, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(features), head(features.float()))
        assert head(features.bfloat16()).dtype == torch.float32


def test_cosine_task_heads__join_and_come_apart() -> None:
    heads, features = TaskHeads(6, head_class=CosineTaskHead), torch.randn(4, 6)
    for size in (2, 0, 3):
        heads.append(size)
    rows = torch.cat([head.weight for head in heads.tasks])
    expected = torch.nn.functional.cosine_similarity(features[:, None], rows, dim=2)
    torch.testing.assert_close(heads(features), expected, atol=1e-6, rtol=0)
    assert [name for name, _ in heads.named_parameters()] == [f"tasks.{index}.weight" for index in range(3)]
    joined = heads.joined()
    torch.testing.assert_close(joined(features), expected, atol=1e-6, rtol=0)
    with torch.no_grad():
        joined.weight.neg_()
    heads.load_joined(joined)
    torch.testing.assert_close(heads(features), -expected, atol=1e-6, rtol=0)
