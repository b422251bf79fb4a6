"""Remembered logits: by slot, and in the columns of their time alone."""

from __future__ import annotations

import torch

from vbm_ptm.learners.logit_memory import LogitMemory


def test_logit_memory__measures_the_mean_squared_difference() -> None:
    memory = LogitMemory(4)
    memory.widen(3)
    memory.remember(torch.tensor([2]), torch.tensor([[1.0, 0, 0]]))
    found = memory.distances(torch.tensor([[0.0, 0, 1]]), torch.tensor([2]))
    torch.testing.assert_close(found, torch.tensor([2 / 3]))


def test_logit_memory__leaves_out_columns_that_came_later() -> None:
    memory = LogitMemory(2)
    memory.widen(2)
    memory.remember(torch.tensor([0]), torch.tensor([[1.0, 2]]))
    memory.widen(4)
    memory.remember(torch.tensor([1]), torch.tensor([[1.0, 2, 3, 4]]))
    logits = torch.tensor([[1.0, 2, 9, 9], [1, 2, 3, 6]])
    torch.testing.assert_close(memory.distances(logits, torch.tensor([0, 1])), torch.tensor([0.0, 1.0]))


def test_logit_memory__lets_no_gradient_into_the_table() -> None:
    memory = LogitMemory(2)
    memory.widen(2)
    logits = torch.ones(1, 2, requires_grad=True)
    memory.remember(torch.tensor([0]), logits.detach())
    memory.distances(2 * logits, torch.tensor([0])).sum().backward()
    assert logits.grad.tolist() == [[2.0, 2.0]]
    assert not memory.table.requires_grad
