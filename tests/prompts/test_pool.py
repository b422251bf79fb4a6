"""L2P's pool against golden numbers and hand values.

Shapes: N images (8), D width (48), P prompts (10), L tokens of a prompt, k chosen prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.prompts.pool import PromptPool
from vbm_ptm.randomness import seeded

Golden = Callable[[str], dict[str, Tensor]]

KEYS = [[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]
QUERIES = [[1.0, 0.0], [3.0, 4.0], [-2.0, 0.0]]


def pool_of(prompts: Tensor, keys: Tensor, *, top_k: int) -> PromptPool:
    pool = PromptPool(*prompts.shape, top_k=top_k)
    with torch.no_grad():
        pool.prompts.copy_(prompts)
        pool.keys.copy_(keys)
    return pool


@pytest.fixture(name="small")
def pool_of_hand_values() -> PromptPool:
    return pool_of(torch.arange(12.0).reshape(3, 2, 2), torch.tensor(KEYS), top_k=2)


@pytest.mark.parametrize("name", ["l2p_pool_samplewise", "l2p_pool_batchwise"])
def test_pool__equals_the_reference(golden: Golden, name: str) -> None:
    expected = golden(name)
    pool = pool_of(expected["pool"], expected["keys"], top_k=3)
    similarity = pool.similarity(expected["query"])
    torch.testing.assert_close(similarity, expected["similarity"], atol=1e-8, rtol=0)
    selected = pool.select(similarity)
    if name == "l2p_pool_batchwise":
        selected = pool.vote(selected)
    assert torch.equal(selected.sort(dim=1).values, expected["selected"].sort(dim=1).values)
    prompts = pool.gather(expected["selected"])
    torch.testing.assert_close(prompts, expected["prompts"], atol=1e-8, rtol=0)
    pull = pool.pull(similarity, selected)
    assert pull.shape == (8,)
    torch.testing.assert_close(pull.mean(), expected["reduce_sim"][0], atol=1e-8, rtol=0)
    ((prompts**2).sum() - 0.1 * pull.mean()).backward()
    torch.testing.assert_close(pool.prompts.grad, expected["grad_pool"], atol=1e-6, rtol=0)
    torch.testing.assert_close(pool.keys.grad, expected["grad_keys"], atol=1e-6, rtol=0)


def test_pool__chooses_by_cosine(small: PromptPool) -> None:
    similarity = small.similarity(torch.tensor(QUERIES))
    assert similarity.tolist() == [[1, 0, -1], pytest.approx([0.6, 0.8, -0.6]), [-1, 0, 1]]
    selected = small.select(similarity)
    assert selected.tolist() == [[0, 1], [1, 0], [2, 1]]
    assert small.pull(similarity, selected).tolist() == pytest.approx([1.0, 1.4, 1.0])
    assert small.pull(similarity, selected).mean().item() == pytest.approx(1.133333, abs=1e-6)
    assert small.gather(selected)[1].tolist() == [[4, 5], [6, 7], [0, 1], [2, 3]]


def test_pool__votes_over_the_step(small: PromptPool) -> None:
    similarity = small.similarity(torch.tensor(QUERIES))
    voted = small.vote(small.select(similarity))
    assert voted.tolist() == [[1, 0]] * 3
    assert small.pull(similarity, voted).mean().item() == pytest.approx(0.466667, abs=1e-6)
    assert small.vote(torch.zeros(0, 2, dtype=torch.long)).shape == (0, 2)


def test_pool__votes_without_waiting_for_the_device(small: PromptPool) -> None:
    """A tensor of the meta device has no values that could be looked at."""
    assert small.to("meta").vote(torch.zeros(4, 2, dtype=torch.long, device="meta")).shape == (4, 2)


def test_pool__prefers_the_lower_number_where_equal(small: PromptPool) -> None:
    equal = torch.zeros(2, 3)
    assert small.select(equal).tolist() == [[0, 1]] * 2
    # 0 and 2 have two votes each, 1 has three.
    assert small.vote(torch.tensor([[2, 1], [1, 0], [0, 1], [2, 2]])).tolist() == [[1, 2]] * 4
    assert small.vote(torch.tensor([[2, 1], [0, 1], [2, 0]])).tolist() == [[0, 1]] * 3
    many = PromptPool(40, 1, 2, top_k=5)
    assert many.select(torch.zeros(1, 40)).tolist() == [[0, 1, 2, 3, 4]]
    assert many.vote(torch.arange(39, -1, -1)[None]).tolist() == [[0, 1, 2, 3, 4]]


def _vote_on_a_rank(rank: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    pool = PromptPool(3, 1, 2, top_k=1)
    # Alone rank 0 would choose 0; all three images together choose 2.
    mine = [torch.tensor([[0]]), torch.tensor([[2], [2]])][rank]
    assert pool.vote(mine).tolist() == [[2]] * len(mine)
    torch.distributed.destroy_process_group()


def test_pool__counts_the_votes_of_all_ranks(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(
        _vote_on_a_rank, args=(str(tmp_path / "store"),), nprocs=2, start_method="fork"
    )


def test_pool__keys_learn_from_the_pull_alone(small: PromptPool) -> None:
    query = torch.tensor(QUERIES, requires_grad=True)
    similarity = small.similarity(query)
    selected = small.select(similarity)
    small.gather(selected).square().sum().backward()
    assert small.keys.grad is None
    assert query.grad is None
    small.pull(similarity, selected).sum().backward()
    assert bool(small.keys.grad.any())


def test_pool__draws_prompts_and_keys_from_the_whole_interval() -> None:
    with seeded(0):
        pool = PromptPool(50, 4, 30, top_k=3)
    for parameter in (pool.prompts, pool.keys):
        assert -1 <= parameter.min() < -0.99
        assert 0.99 < parameter.max() <= 1
        assert abs(parameter.mean()) < 0.05


def test_pool__cosines_are_not_rounded_by_autocast() -> None:
    with seeded(0):
        pool = PromptPool(20, 1, 48, top_k=3).float()
        query = torch.randn(6, 48, dtype=torch.float32)
    expected = pool.similarity(query)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(pool.similarity(query), expected)


def test_pool__as_prefixes_equals_the_shallow_reference(
    golden: Golden,
    backbone: PromptableViT,
    images: Tensor,
    class_token: Callable[[Mapping[int, Tensor]], Tensor],
) -> None:
    """L2P++ of the CODA repository: 8 tokens are 4 keys and 4 values, cut prompt by prompt."""
    expected = golden("l2p_plusplus_shallow")
    pool = pool_of(expected["param.e_p_0"], expected["param.e_k_0"], top_k=5)
    selected = pool.select(pool.similarity(backbone.query(images)))
    halves = pool.gather(selected).unflatten(1, (5, 2, 4)).transpose(1, 2).flatten(2, 3)  # (N, 2, 5 * 4, D)
    output = class_token({0: halves})
    torch.testing.assert_close(output, expected["train.cls"], atol=1e-8, rtol=0)
    torch.testing.assert_close(output, expected["eval.cls"], atol=1e-8, rtol=0)
    output.square().sum().backward()
    torch.testing.assert_close(pool.prompts.grad, expected["grad.e_p_0"], atol=1e-6, rtol=0)
