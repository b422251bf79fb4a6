"""A run on two ranks, in two real processes, against the same run on one."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.errors import TrainingInterrupted
from vbm_ptm.learners.base import Learner


def _join(rank: int, port: int) -> None:
    """Tell this process what a launcher would."""
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _fit_on_a_rank(rank: int, port: int, new_run: Callable[..., Any], arguments: Any, folder: Path) -> None:
    """Train in a process of its own; leave the learner's tensors behind."""
    _join(rank, port)
    sent = []
    send = DistributedDataParallel._sync_buffers
    DistributedDataParallel._sync_buffers = lambda wrapper: sent.append(send(wrapper))  # type: ignore[method-assign]
    learner, benchmark, settings = arguments
    run = new_run(learner, benchmark, name=f"rank {rank}", **settings)
    assert run.accelerator.num_processes == 2
    run.trainer.fit()
    assert not sent  # class statistics would travel in every step
    safetensors.torch.save_file(
        {name: tensor.contiguous() for name, tensor in learner.state_dict().items()},
        folder / f"{rank}.safetensors",
    )
    counts = [record.num_images for record in run.trainer.records]
    (folder / f"{rank}.txt").write_text(str((run.trainer.matrix.to_dict(), counts)))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["slca", "l2p"])
def test_fit__is_the_same_on_two_ranks(
    new_benchmark: Callable[..., Benchmark],
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    tmp_path: Path,
    name: str,
) -> None:
    """Five samples a task in steps of two or three groups, and a last task that leaves a rank without any."""
    benchmark = new_benchmark([3, 2, 3, 2, 1], num_tasks=3)
    settings = {"num_views": 2, "batch_size": 4, "epochs": 2}
    own = {"slca": {"alignment_epochs": 1}, "l2p": {"batchwise_prompt": True}}[name]
    arguments = new_learner(name, **own), benchmark, settings
    torch.multiprocessing.start_processes(
        _fit_on_a_rank, args=(_free_port(), new_run, arguments, tmp_path), nprocs=2, start_method="fork"
    )

    alone = new_run(new_learner(name, **own), benchmark, **settings)
    alone.trainer.fit()
    first, second = (safetensors.torch.load_file(tmp_path / f"{rank}.safetensors") for rank in (0, 1))
    assert all(torch.equal(first[key], second[key]) for key in first)
    for key, tensor in alone.trainer.learner.state_dict().items():
        torch.testing.assert_close(
            first[key], tensor, atol=1e-4, rtol=1e-3, msg=lambda text, key=key: key + text
        )
    counts = [record.num_images for record in alone.trainer.records]
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.txt").read_text() == str((alone.trainer.matrix.to_dict(), counts))


def _stop_on_a_rank(
    rank: int, port: int, new_run: Callable[..., Any], learner: Learner, data: Benchmark
) -> None:
    """Ask rank 1 alone to stop, in its second step."""
    _join(rank, port)
    steps = []

    def count(module: Learner, inputs: Any) -> None:
        steps.append(module.training)
        if rank == 1 and steps.count(True) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    learner.register_forward_pre_hook(count)
    run = new_run(learner, data, name=f"rank {rank}", epochs=20, log_every=4)
    with run.stop.listening(), pytest.raises(TrainingInterrupted) as caught:
        run.trainer.fit()
    assert caught.value.exit_code == 143
    assert steps.count(True) == 4
    torch.distributed.destroy_process_group()


def test_fit__ranks_stop_at_the_same_step(
    benchmark_of_three: Benchmark, new_learner: Callable[..., Learner], new_run: Callable[..., Any]
) -> None:
    torch.multiprocessing.start_processes(
        _stop_on_a_rank,
        args=(_free_port(), new_run, new_learner("finetune"), benchmark_of_three),
        nprocs=2,
        start_method="fork",
    )
