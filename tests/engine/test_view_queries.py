"""Whose query chooses and pulls in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vbm_ptm.data.scenario import Task
from vbm_ptm.data.view_batch_config import ViewBatchConfig
from vbm_ptm.engine.view_queries import view_queries
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded

TASK = Task(0, (0, 1, 2), (0, 1, 2), 3)


@pytest.fixture
def images() -> Tensor:
    """Three groups of two views."""
    return torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def begun(new_learner: Callable[..., Learner], name: str, **settings: Any) -> Learner:
    learner = new_learner(name, depth=6, **settings)
    with seeded(1):
        learner.begin_task(TASK)
    return learner


def queries_of(learner: Learner, images: Tensor, **settings: Any) -> Any:
    return view_queries(learner, images, num_views=2, config=ViewBatchConfig(num_views=2, **settings))


@pytest.mark.parametrize("name", ["l2p", "dualprompt", "s_prompt_pp", "coda_prompt"])
def test_view_queries__are_each_image_s_own_by_default(
    new_learner: Callable[..., Learner], images: Tensor, name: str
) -> None:
    learner = begun(new_learner, name)
    assert queries_of(learner, images) is None
    one_view = ViewBatchConfig(num_views=1, query_view="weak", pull_view="weak")
    assert view_queries(learner, images, num_views=1, config=one_view) is None


@pytest.mark.parametrize("roles", [("query",), ("pull",), ("query", "pull")])
def test_view_queries__are_those_of_the_weak_view(
    new_learner: Callable[..., Learner], images: Tensor, roles: tuple[str, ...]
) -> None:
    learner = begun(new_learner, "l2p")
    found = queries_of(learner, images, **{f"{role}_view": "weak" for role in roles})
    own = learner.query(images)
    for role in ("query", "pull"):
        expected = own[[0, 0, 2, 2, 4, 4]] if role in roles else own
        torch.testing.assert_close(getattr(found, role), expected, atol=1e-6, rtol=0)
    assert queries_of(learner, images[:0], query_view="weak").query.shape == (0, 48)


def test_view_queries__ask_for_nothing_that_a_learner_does_not_use(
    new_learner: Callable[..., Learner], images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = begun(new_learner, "dualprompt")
    asked: list[int] = []
    original = learner.query
    monkeypatch.setattr(learner, "query", lambda images: asked.append(len(images)) or original(images))
    queries_of(learner, images, pull_view="weak")
    assert asked == [3]


@pytest.mark.parametrize(
    ("name", "setting"), [("l2p", "query"), ("l2p", "pull"), ("dualprompt", "pull"), ("s_prompt_pp", "pull"),
                          ("coda_prompt", "query")]
)  # fmt: skip
def test_forward__takes_queries_in_place_of_the_images_own(
    new_learner: Callable[..., Learner], images: Tensor, name: str, setting: str
) -> None:
    learner = begun(new_learner, name, **({"pool_size": 30} if name == "coda_prompt" else {}))
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    plain = learner(images, labels)
    given = learner(images, labels, queries_of(learner, images, **{f"{setting}_view": "weak"}))
    weak = learner(images[::2], labels[::2])
    if setting == "pull":
        torch.testing.assert_close(given.logits, plain.logits, atol=1e-6, rtol=0)
        if name != "l2p":  # there the prompts that each view has chosen are pulled
            expected = weak.auxiliary["pull"].repeat_interleave(2)
            torch.testing.assert_close(given.auxiliary["pull"], expected, atol=1e-6, rtol=0)
        assert not torch.allclose(given.auxiliary["pull"][1::2], plain.auxiliary["pull"][1::2], atol=1e-6)
    else:
        torch.testing.assert_close(given.logits[::2], weak.logits, atol=1e-5, rtol=0)
        if name == "coda_prompt":  # a pool of ten may choose the same prompts for both views
            assert not torch.allclose(given.logits[1::2], plain.logits[1::2], atol=1e-6)
