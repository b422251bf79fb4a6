"""Commands that work on finished runs, as one rank of two; and what the help says."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing
import typer
from launching import become_rank
from miniatures import write_toy_folder

from vbm_ptm.cli import main
from vbm_ptm.cli.application import app
from vbm_ptm.cli.finished import agree
from vbm_ptm.experiment import run
from vbm_ptm.metrics import AccuracyCell


def run_on_a_rank(rank: int, port: int, commands: Sequence[Sequence[object]], folder: Path) -> None:
    """Run commands one after another as a rank of two; leave behind how each ended and what it printed."""
    done = []
    for command in commands:
        become_rank(rank, port)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = main([str(word) for word in command])
        done.append([code, printed.getvalue()])
    (folder / f"{rank}.json").write_text(json.dumps(done))


@pytest.mark.distributed
def test_finished__work_on_one_rank_of_two(
    toy_tree: Callable[..., dict[str, Any]], tmp_path: Path, free_port: int
) -> None:
    run(toy_tree("nearest_mean"), output=tmp_path / "run")
    write_toy_folder(tmp_path / "pictures", ["one"], num_train=2, num_test=0)
    commands = [
        ["evaluate", tmp_path / "run", "--json", "--predictions", tmp_path / "predictions.csv"],
        ["export", tmp_path / "run", "--output", tmp_path / "exported"],
        ["predict", tmp_path / "exported", tmp_path / "pictures", "--json"],
        ["diff", tmp_path / "run", tmp_path / "run"],
    ]
    torch.multiprocessing.start_processes(
        run_on_a_rank, args=(free_port, commands, tmp_path), nprocs=2, start_method="fork"
    )
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert second == [[0, ""]] * 4
    assert [code for code, _ in first] == [0] * 4
    evaluated, exported, predicted, compared = (printed for _, printed in first)
    assert json.loads(evaluated)["equals_training"]
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 1 + 48
    assert exported.count("exported: ") == 1
    assert len(json.loads(predicted)) == 2
    assert compared.count("no difference") == 1


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
    context = torch.multiprocessing.get_context("fork")
    arguments = free_port, tmp_path / "run", folder, context.Barrier(2)
    torch.multiprocessing.start_processes(export_again_and_again, arguments, nprocs=2, start_method="fork")
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


@pytest.mark.parametrize("command", sorted(typer.main.get_command(app).commands))
def test_help__gives_switches_no_value(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "<bool>" in line and "--help" not in line] == []


def test_agree__where_both_have_counted() -> None:
    now = AccuracyCell(5, 2, 3, 3, 5, task_expert_top1=4, task_expert_top5=5)
    assert agree(now, now)
    assert agree(now, AccuracyCell(5, 2, 3, 3, 5))
    assert agree(AccuracyCell(5, 2, 3), now)
    assert not agree(now, AccuracyCell(5, 2, 4, 3, 5))
    assert not agree(now, AccuracyCell(5, 2, 3, 3, 5, task_expert_top1=3, task_expert_top5=5))
    assert agree(None, None)
    assert not agree(now, None)
