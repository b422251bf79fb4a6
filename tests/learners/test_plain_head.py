"""A classifier without bias: growth, and rows of equal length."""

from __future__ import annotations

import warnings

import pytest
import torch

from vbm_ptm.learners.plain_head import PlainHead, length_ratio
from vbm_ptm.randomness import seeded


def test_length_ratio__has_the_golden_value() -> None:
    weight = torch.tensor([[3.0, 4], [0, 5], [6, 8], [8, 6]]).double()
    assert length_ratio(weight, 2).item() == pytest.approx(0.5, abs=1e-12)
    assert length_ratio(weight, 0).item() == length_ratio(weight, 4).item() == 1


def test_plain_head__keeps_its_rows_when_it_grows_and_aligns_the_new_ones() -> None:
    with warnings.catch_warnings(), seeded(0):
        warnings.simplefilter("error")  # torch warns of layers without elements
        head = PlainHead(4, 0)
        head.widen(2)
    old = head.weight.detach().clone()
    head.widen(5)
    assert head(torch.zeros(3, 4)).shape == (3, 5)
    assert torch.equal(head.weight[:2], old)
    head.align(2)
    lengths = torch.linalg.vector_norm(head.weight.detach(), dim=1)
    assert float(lengths[2:].mean()) == pytest.approx(float(lengths[:2].mean()), rel=1e-5)
    assert torch.equal(head.weight[:2], old)


def test_plain_head__is_drawn_anew_from_the_generator_of_the_cpu_on_every_device() -> None:
    with seeded(3):
        expected = torch.nn.Linear(4, 3, bias=False).weight
    head = PlainHead(4, 3)
    with seeded(3):
        head.reset_parameters()
    assert torch.equal(head.weight, expected)
    elsewhere = PlainHead(4, 3).to("meta")  # draws on the device itself would leave the generator alone
    with seeded(3):
        before = torch.default_generator.get_state()
        elsewhere.reset_parameters()
        assert not torch.equal(torch.default_generator.get_state(), before)
