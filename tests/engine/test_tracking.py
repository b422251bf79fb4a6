"""The log file, and what a run prints where there is no terminal."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from vbm_ptm.engine.tracking import ProgressDisplay, RunLog, console, silenced


def test_run_log__writes_one_line_per_event_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path)
    assert log.position == 0
    log.write("step", loss=0.5, name="Tür [3]")
    log.write("task", accuracy=None)
    lines = path.read_text(encoding="utf-8").splitlines()  # before it is closed
    assert [json.loads(line) for line in lines] == [
        {"event": "step", "loss": 0.5, "name": "Tür [3]"},
        {"event": "task", "accuracy": None},
    ]
    assert log.position == path.stat().st_size
    log.close()


def test_run_log__is_cut_back_to_the_checkpoint_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path)
    log.write("task", index=0)
    position, kept = log.position, path.read_bytes()
    log.write("step", task=1)
    log.write("step", task=1)
    log.close()

    log = RunLog(path, position=position)
    assert path.read_bytes() == kept
    assert log.position == position
    log.write("task", index=1)
    log.close()
    assert path.read_bytes().startswith(kept)
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [0, 1]


def test_run_log__that_was_lost_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path, position=500)
    assert log.position == 0
    log.write("task", index=1)
    log.close()
    assert json.loads(path.read_text()) == {"event": "task", "index": 1}


def test_run_log__without_a_file_writes_nothing(tmp_path: Path) -> None:
    log = RunLog(None)
    log.write("step", loss=0.5)
    assert log.position == 0
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_progress_display__prints_plain_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(8) as display:
        for _ in range(2):
            display.advance()
        display.show("task 1/2 · epoch 1/2", {"loss": 2.0})  # a bar's matter
        display.end_epoch("task 1/2 · epoch 1/2", {"loss": 0.51234, "cross_entropy": 0.5, "accuracy": 0.25})
        display.line("[task] done: " + "x" * 300)
    printed = capsys.readouterr()
    assert printed.out == ""
    first, second = printed.err.splitlines()
    assert first.startswith(
        "task 1/2 · epoch 1/2 · loss 0.5123 · cross entropy 0.5 · accuracy 25.0% · 0:00 left"
    )
    assert second == "[task] done: " + "x" * 300  # neither markup nor wrapped
    assert "\x1b" not in printed.err


def test_progress_display__is_silent_on_other_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay(8, is_silent=True) as display:
        display.advance()
        display.show("task 1/2", {"loss": 1.0})
        display.end_epoch("task 1/2", {"loss": 1.0})
        display.line("done")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_progress_display__shows_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=120, highlight=False)
    monkeypatch.setattr("vbm_ptm.engine.tracking.console", terminal)
    with ProgressDisplay(8) as display:
        display.advance(3)
        display.show("task 1/2")
        display.end_epoch("epoch 1/2", {"loss": 0.25})
        display.line("task 1/2 done")
    shown = screen.getvalue()
    assert "3/8 steps" in shown
    assert "epoch 1/2 · loss 0.25" in shown
    assert "task 1/2 done\n" in shown
    assert "left\n" not in shown  # the line of a log without a terminal


def test_silenced__shows_nothing_if_asked_and_then_as_before() -> None:
    with console.capture() as shown, silenced(True):
        console.print("progress")
    with console.capture() as shown_again, silenced(False):
        console.print("progress")
    assert (shown.get(), shown_again.get()) == ("", "progress\n")
    assert not console.quiet


@pytest.mark.parametrize("num_lost", [1, 7, 20])
def test_run_log__cuts_a_torn_line(tmp_path: Path, num_lost: int) -> None:
    path = tmp_path / "log.jsonl"
    log = RunLog(path)
    for number in range(3):
        log.write("step", number=number)
    position = log.position
    log.close()
    os.truncate(path, position - num_lost)
    log = RunLog(path, position=position)
    log.write("step", number=9)
    log.close()
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 1, 9]


def test_run_log__that_holds_no_whole_line_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"x" * 200_000)
    RunLog(path, position=200_000).close()
    assert path.read_bytes() == b""
