"""The network before a task: what distillation compares with."""

from __future__ import annotations

import pytest
import torch

from vbm_ptm.learners.teacher import softened_divergence


def test_softened_divergence__has_the_golden_value() -> None:
    """TCIL's term of z = [1, 0] against a teacher's [0, 1], T = 2, with its factor T^2."""
    logits, taught = torch.tensor([[1.0, 0]]).double(), torch.tensor([[0, 1.0]]).double()
    assert 4 * softened_divergence(logits, taught, temperature=2).item() == pytest.approx(0.489837, abs=1e-6)
