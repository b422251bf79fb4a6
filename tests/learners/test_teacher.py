"""The network before a task: what distillation compares with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vbm_ptm.learners.teacher import Teacher, softened_divergence


def test_softened_divergence__has_the_golden_value() -> None:
    """TCIL's term of z = [1, 0] against a teacher's [0, 1], T = 2, with its factor T^2."""
    logits, taught = torch.tensor([[1.0, 0]]).double(), torch.tensor([[0, 1.0]]).double()
    assert 4 * softened_divergence(logits, taught, temperature=2).item() == pytest.approx(0.489837, abs=1e-6)


def test_teacher__holds_frozen_copies_in_evaluation_mode() -> None:
    layer = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    teacher, rows = Teacher(), torch.randn(4, 3)
    assert not teacher
    teacher.hold(head=layer)
    taught = teacher.train()(rows)
    assert not taught.requires_grad
    assert not any(module.training for module in teacher.modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    nn.init.zeros_(layer[0].weight)
    layer(rows)
    assert torch.equal(teacher(rows), taught)
    teacher.clear()
    assert teacher.state_dict() == {}


def test_teacher__is_cleared_by_a_state_without_one() -> None:
    """What restoring has made for finished tasks is gone; a state from inside a task brings its own."""
    net = nn.ModuleDict({"teacher": Teacher(head=nn.Linear(3, 2))})
    inside = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert list(inside) == ["teacher.head.weight", "teacher.head.bias"]
    net.load_state_dict({})
    assert not net["teacher"]
    fresh = nn.ModuleDict({"teacher": Teacher(head=nn.Linear(3, 2))})
    fresh.load_state_dict(inside)
    assert torch.equal(
        fresh["teacher"](torch.eye(3)), inside["teacher.head.weight"].T + inside["teacher.head.bias"]
    )
