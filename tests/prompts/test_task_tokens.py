"""S-iPrompt's tokens and the choice of a session.

Shapes: N images, D width, L tokens of a prompt, k centres of a session.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from vbm_ptm.prompts.task_tokens import TaskTokens, nearest_session
from vbm_ptm.randomness import seeded


def test_tokens__are_drawn_for_each_session_alone() -> None:
    with seeded(0):
        tokens = TaskTokens(40, 64)
        for _ in range(3):
            tokens.append()
    for prompt in tokens.tokens:
        assert prompt.shape == (40, 64)
        assert -0.125 <= prompt.min() < -0.124  # 1 / sqrt(64)
        assert 0.124 < prompt.max() <= 0.125
    assert not torch.equal(tokens.tokens[1], tokens.tokens[0])
    assert [prompt.requires_grad for prompt in tokens.tokens] == [False, False, True]


def test_tokens__belong_to_the_images_that_chose_them() -> None:
    tokens = TaskTokens(2, 3)
    for session in range(3):
        tokens.append()
        torch.nn.init.constant_(tokens.tokens[session], session)
    chosen = tokens.of_images(torch.tensor([2, 0, 2, 1]))
    assert chosen.shape == (4, 2, 3)
    assert chosen[:, 1, 2].tolist() == [2, 0, 2, 1]
    assert tokens.of_task(1).tolist() == [[[1.0] * 3] * 2]


@pytest.mark.parametrize(("norm", "nearest"), [("l1", 0), ("l2", 1)])
def test_nearest_session__norms_disagree(norm: Literal["l1", "l2"], nearest: int) -> None:
    """From the origin (3, 0) is at 3 and 3, (2, 2) at 4 and 2.83."""
    centres = [torch.tensor([[3.0, 0.0]]), torch.tensor([[2.0, 2.0]])]
    origin = torch.zeros(1, 2)
    assert nearest_session(origin, centres, norm=norm).tolist() == [nearest]
    assert nearest_session(origin, centres).tolist() == [0]
    assert nearest_session(origin, centres[::-1], norm=norm).tolist() == [1 - nearest]


def test_nearest_session__asks_for_the_nearest_of_all_centres() -> None:
    centres = [torch.tensor([[0.0, 9.0], [1.0, 0.0]]), torch.tensor([[0.0, 2.0], [50.0, 50.0], [9.0, 0.0]])]
    features = torch.tensor([[0.0, 0.0], [0.0, 3.0], [0.0, 8.0], [9.0, 1.0], [0.0, 1.5]])
    assert nearest_session(features, centres).tolist() == [0, 1, 0, 1, 1]
    assert nearest_session(features[:0], centres).tolist() == []
    assert nearest_session(torch.zeros(1, 2), [centres[0], centres[0]]).tolist() == [0]


def test_nearest_session__is_exact_however_many_images_there_are() -> None:
    """Many rows tempt to a product of matrices, in which differences of this size are lost."""
    generator = torch.Generator().manual_seed(0)
    features, *centres = (1000 + torch.rand(rows, 4, generator=generator).float() for rows in (100, 30, 40))
    distances = [((features[:, None] - own) ** 2).sum(2).amin(1) for own in centres]
    expected = (distances[1] < distances[0]).long()
    assert 20 < expected.sum() < 80
    assert torch.equal(nearest_session(features, centres, norm="l2"), expected)
