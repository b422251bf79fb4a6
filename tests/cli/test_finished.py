"""Commands that work on finished runs, under a launcher that has started two ranks; and what the help says."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import become_rank
from miniatures import write_toy_folder

from vbm_ptm.cli import main
from vbm_ptm.experiment import run

REPOSITORY = Path(__file__).parents[2]


def launch(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    return subprocess.run(
        [*command, "-m", "vbm_ptm", *map(str, arguments)],
        env=os.environ | {"ACCELERATE_USE_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_finished__work_on_one_rank_of_two(toy_tree: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    run(toy_tree("nearest_mean"), output=tmp_path / "run")
    evaluated = launch("evaluate", tmp_path / "run", "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["equals_training"]
    exported = launch("export", tmp_path / "run", "--output", tmp_path / "exported")
    assert exported.returncode == 0, exported.stderr
    assert exported.stdout.count("exported: ") == 1
    write_toy_folder(tmp_path / "pictures", ["one"], num_train=2, num_test=0)
    predicted = launch("predict", tmp_path / "exported", tmp_path / "pictures", "--json")
    assert predicted.returncode == 0, predicted.stderr
    assert len(json.loads(predicted.stdout)) == 2
    compared = launch("diff", tmp_path / "run", tmp_path / "run")
    assert (compared.returncode, compared.stdout.count("no difference")) == (0, 1)


def export_again_and_again(rank: int, port: int, run_directory: Path, folder: Path, start: Any) -> None:
    """Export ten times at the same moments as the other rank; write down what this one has said."""
    said = []
    for number in range(10):
        become_rank(rank, port)
        start.wait(timeout=120)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = main(["export", str(run_directory), "--output", str(folder / str(number))])
        said.append([code, printed.getvalue()])
    (folder / f"rank_{rank}.json").write_text(json.dumps(said))


@pytest.mark.slow
@pytest.mark.distributed
def test_export__ten_times_on_two_ranks_is_written_by_rank_0_alone(
    toy_tree: Callable[..., dict[str, Any]], tmp_path: Path, free_port: int
) -> None:
    run(toy_tree("nearest_mean"), output=tmp_path / "run")
    folder = tmp_path / "exported"
    folder.mkdir()
    context = torch.multiprocessing.get_context("spawn")
    arguments = free_port, tmp_path / "run", folder, context.Barrier(2)
    torch.multiprocessing.spawn(export_again_and_again, arguments, nprocs=2)
    own, other = (json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert own == [[0, f"exported: {folder / str(number)}\n"] for number in range(10)]
    assert other == [[0, ""]] * 10
    files = [
        {file.name: file.read_bytes() for file in (folder / str(number)).iterdir()} for number in range(10)
    ]
    assert len(files[0]) > 1
    assert all(each == files[0] for each in files)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_alone__is_for_rank_0_which_then_knows_no_group(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
    for name, value in group.items():
        monkeypatch.setenv(name, value)
    assert main(["list", "learners"]) == 0
    assert ("slca" in capsys.readouterr().out) == (rank == "0")
    assert ("WORLD_SIZE" in os.environ) == (rank == "1")


@pytest.mark.parametrize(
    "command", ["train", "study", "evaluate", "predict", "export", "extend", "diff", "check"]
)
def test_help__gives_switches_no_value(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "<bool>" in line and "--help" not in line] == []
