from __future__ import annotations

import os

import pytest

from vbm_ptm.launch import is_main_process, launch_problems, num_nodes, num_processes


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "ACCELERATE_", "OMPI_", "PMI_", "SLURM_")
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        monkeypatch.delenv(name)


def test_is_main_process__is_rank_0_or_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_main_process()
    monkeypatch.setenv("RANK", "0")
    assert is_main_process()
    monkeypatch.setenv("RANK", "1")
    assert not is_main_process()


def test_num_processes__is_one_without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert num_processes() == 4


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_launch_problems__tell_of_copies_that_do_not_know_each_other(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "4")
    (problem,) = launch_problems(num_ranks=1, mixed_precision="no")
    assert "asked for 4 processes, but this run has 1" in problem
    assert launch_problems(num_ranks=4, mixed_precision="no") == []


def test_num_nodes__follows_from_the_processes_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_nodes() == 1
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert num_nodes() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert num_nodes() == 3
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert num_nodes() == 2


def test_launch_problems__tell_of_processes_that_accelerate_did_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert launch_problems(num_ranks=1, mixed_precision="no") == []  # somebody's shell, no launcher
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    (problem,) = launch_problems(num_ranks=1, mixed_precision="no")
    assert "asked for several processes, but this run has 1" in problem
    assert "ACCELERATE_USE_CPU=1 accelerate launch --multi_gpu --num_processes" in problem
    assert launch_problems(num_ranks=2, mixed_precision="no") == []


def test_launch_problems__tell_of_another_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert launch_problems(num_ranks=1, mixed_precision="bf16") == []
    (problem,) = launch_problems(num_ranks=1, mixed_precision="no")
    assert "asked for bf16, but the run's own setting decides: trainer.mixed_precision=no" in problem
