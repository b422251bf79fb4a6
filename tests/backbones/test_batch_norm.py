"""Batch norm over ranks equals batch norm over the whole batch, whatever share each rank has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from launching import become_rank
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn

from vbm_ptm.backbones.batch_norm import with_global_batch_norm
from vbm_ptm.errors import UsageError

SHARES = {"4 and 3": [4, 3], "7 and 0": [7, 0]}


def networks() -> dict[str, nn.Module]:
    torch.default_generator.manual_seed(0)
    return {
        "plain": nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 1)).double(),
        "with activation": nn.Sequential(nn.Conv2d(3, 5, 3), BatchNormAct2d(5)).double(),
    }


def batch() -> Tensor:
    return torch.randn(7, 3, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 3


def loss_of(network: nn.Module, images: Tensor) -> Tensor:
    values = network(images)
    return (values.square() * torch.arange(values.shape[1]).view(-1, 1, 1)).sum()


def facts_of(network: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Two training steps' gradients and what they leave behind."""
    leaf = images.clone().requires_grad_()
    for _ in range(2):
        loss_of(network, leaf).backward()
    return {
        "images": leaf.grad if leaf.grad is not None else torch.zeros_like(leaf),
        **{name: parameter.grad for name, parameter in network.named_parameters()},
        **dict(network.named_buffers()),
    }


def _run_rank(rank: int, port: int, folder: Path) -> None:
    become_rank(rank, port)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for share, counts in SHARES.items():
        for name, network in networks().items():
            own = batch().split(counts)[rank]
            facts = facts_of(with_global_batch_norm(network), own)
            for key, parameter in network.named_parameters():
                torch.distributed.all_reduce(parameter.grad)
                facts[key] = parameter.grad
            torch.save(facts, folder / f"{share} {name} {rank}")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", name="outcomes")
def outcomes_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("batch_norm")
    torch.multiprocessing.start_processes(_run_rank, args=(port, folder), nprocs=2, start_method="fork")
    return folder


@pytest.mark.distributed
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["plain", "with activation"])
def test_global_batch_norm__is_that_of_the_whole_batch_on_uneven_ranks(
    outcomes: Path, share: str, name: str
) -> None:
    alone = facts_of(networks()[name], batch())
    both = [torch.load(outcomes / f"{share} {name} {rank}", weights_only=True) for rank in (0, 1)]
    images = torch.cat([facts.pop("images") for facts in both])
    torch.testing.assert_close(images, alone.pop("images"), atol=1e-12, rtol=1e-12)
    for key, expected in alone.items():
        for facts in both:
            torch.testing.assert_close(facts[key], expected, atol=1e-11, rtol=1e-12, msg=key)


@pytest.mark.parametrize("name", ["plain", "with activation"])
def test_global_batch_norm__on_one_rank_is_torchs_own_bit_for_bit(name: str) -> None:
    plain, converted = networks()[name], with_global_batch_norm(networks()[name])
    assert list(plain.state_dict()) == list(converted.state_dict())
    one, two = (facts_of(network, batch()) for network in (plain, converted))
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert torch.equal(plain.eval()(batch()), converted.eval()(batch()))


def test_with_global_batch_norm__refuses_norms_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="BatchNorm1d"):
        with_global_batch_norm(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))


def test_global_batch_norm__says_what_to_do_with_a_single_value() -> None:
    norm = with_global_batch_norm(nn.Sequential(nn.BatchNorm2d(5)))
    with pytest.raises(UsageError, match="a single value per channel: a step of one image"):
        norm(torch.randn(1, 5, 1, 1))
    assert norm.eval()(torch.randn(1, 5, 1, 1)).shape == (1, 5, 1, 1)
