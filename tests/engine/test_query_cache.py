"""What is kept of queries, and when it is forgotten.

Shapes: n rows, D width.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from vbm_ptm.engine import query_cache
from vbm_ptm.engine.query_cache import QueryCache, query_is_fixed
from vbm_ptm.learners.base import Learner

CPU = torch.device("cpu")


@pytest.mark.parametrize("memory", [0, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_query_cache__returns_what_was_put_in_memory_or_in_a_file(
    monkeypatch: pytest.MonkeyPatch, memory: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(query_cache, "_MEMORY_BYTES", memory)
    cache = QueryCache(9)
    values = torch.randn(4, 5).to(dtype)
    cache.put([7, 0, 3, 8], values)
    assert torch.equal(cache.get([8, 0], CPU), values[[3, 1]])
    assert cache.get([8], CPU).dtype == dtype
    assert cache.knows([3, 7])
    assert not cache.knows([3, 1])


@pytest.mark.parametrize("memory", [0, 2**20])
def test_query_cache__is_filled_in_any_mode(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    monkeypatch.setattr(query_cache, "_MEMORY_BYTES", memory)
    cache = QueryCache(4)
    with torch.inference_mode():  # an evaluation comes first where a run goes on at the end of a task
        cache.put([0, 1], torch.ones(2, 3))
    with torch.no_grad():  # the measurement after an epoch
        cache.put([2, 3], torch.zeros(2, 3))
    assert cache.get([1, 2], CPU).tolist() == [[1] * 3, [0] * 3]


def test_query_cache__belongs_to_the_weights(new_learner: Callable[..., Learner]) -> None:
    learner, cache = new_learner("linear_probe"), QueryCache(3)
    cache.begin(learner.query_parts[0])
    cache.put([1], torch.ones(1, 48))
    cache.begin(learner.query_parts[0])
    assert cache.knows([1])
    with torch.no_grad():
        learner.backbone.vit.norm.bias[0] = 1.0
    cache.begin(learner.query_parts[0])
    assert not cache.knows([1])
    cache.put([1], torch.ones(1, 48))
    cache.begin(new_learner("linear_probe").query_parts[0])
    assert not cache.knows([1])


def test_query_is_fixed__of_a_frozen_backbone_alone(new_learner: Callable[..., Learner]) -> None:
    assert query_is_fixed(new_learner("l2p"))
    assert query_is_fixed(new_learner("nearest_mean"))
    assert not query_is_fixed(new_learner("slca"))
    assert not query_is_fixed(new_learner("finetune"))


@pytest.mark.parametrize("name", ["ran_pac", "aper"])
def test_query_is_fixed__once_an_adaptation_is_trained(
    new_learner: Callable[..., Learner], name: str
) -> None:
    learner = new_learner(name)
    assert learner.first_session in learner.query_parts[0]
    for parameter in learner.first_session.parameters():
        parameter.requires_grad_(True)
    assert query_is_fixed(learner) is not any(True for _ in learner.first_session.parameters())
    learner.first_session.requires_grad_(False)
    assert query_is_fixed(learner)
