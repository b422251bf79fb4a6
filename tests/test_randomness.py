"""Seeds by purpose, and borrowed generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from vbm_ptm.randomness import seed_for, seed_step, seeded


def draws() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def test_seed_for__is_the_same_in_every_process_and_version() -> None:
    # From: printf '%s' 'view|1993|2|3|4|5' | b2sum -l 64, read as a number and halved.
    assert seed_for("view", seed=1993, task=2, epoch=3, sample=4, view=5) == 0xB1C4005833ECDE3E >> 1
    assert seed_for("learner", seed=0) == 0xFD210971EA9F206E >> 1


def test_seed_for__depends_on_every_argument() -> None:
    base: dict[str, Any] = {
        "purpose": "view",
        "seed": 1,
        "task": 1,
        "epoch": 1,
        "sample": 1,
        "view": 1,
        "rank": 1,
    }
    variants = [base, *({**base, name: 11 if name != "purpose" else "step"} for name in base)]
    seeds = {seed_for(values.pop("purpose"), **values) for values in variants}
    assert len(seeds) == len(variants)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_for("view", seed=1, task=11) != seed_for("view", seed=11, task=1)


def test_seeded__gives_the_same_draws_and_restores_the_generators() -> None:
    before = draws()
    with seeded(7):
        first = draws()
    after = draws()
    with seeded(7):
        assert draws() == first
    assert len({str(before), str(first), str(after)}) == 3
    state = torch.default_generator.get_state()
    with seeded(2**63 - 1), seeded(8):
        draws()
    assert torch.equal(torch.default_generator.get_state(), state)


def test_seeded__leaves_no_trace() -> None:
    with seeded(3):
        expected = draws(), draws()
    with seeded(3):
        first = draws()
        with seeded(4):
            draws()
        assert (first, draws()) == expected


def test_seeded__restores_after_an_error() -> None:
    with seeded(3):
        expected = draws()

    def fail() -> None:
        with seeded(4):
            draws()
            raise RuntimeError("inside")

    with seeded(3):
        with pytest.raises(RuntimeError, match="inside"):
            fail()
        assert draws() == expected


def test_seed_step__seeds_all_global_generators() -> None:
    with seeded(0):
        seed_step(5)
        first = draws()
        seed_step(5)
        assert draws() == first
