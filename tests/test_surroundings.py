"""What file systems, batch systems and terminals do to a whole training, in processes of their own."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pty
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from vbm_ptm.cli import main

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture
def command(toy_tree: Callable[..., dict[str, Any]], tmp_path: Path) -> list[str]:
    """A short training of three tasks into ``tmp_path / "run"``, which saves itself after every step."""
    tree = toy_tree("linear_probe")
    tree["trainer"] = {"log_every": 1}
    tree["optimization"] |= {"epochs": 4}
    tree["checkpoint"] = {"every": "1 step"}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))
    return ["train", "--config", str(config), "--output", str(tmp_path / "run")]


def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "vbm_ptm", *command],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        **options,
    )


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "result.json").read_text())
    return found


def wait_for(path: Path) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.02)


def test_train__needs_neither_locks_nor_directories_on_the_disk(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on a network drive; the other codes are those of tests/storage."""
    real = os.fsync

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def sync(descriptor: int) -> None:
        refuse() if stat.S_ISDIR(os.fstat(descriptor).st_mode) else real(descriptor)

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(os, "fsync", sync)
    short = [*command, "--set", "trainer.max_steps_per_task=2"]
    assert main([*short, "--stop-after-task", "1"]) == 0
    assert main([*short, "--resume"]) == 0
    assert result(tmp_path)["status"] == "finished"
    assert "Traceback" not in (said := capsys.readouterr().err)
    assert f"no locks ({os.strerror(errno.ENOLCK)}): nothing protects {tmp_path / 'run'}" in said


@pytest.mark.slow
def test_train__goes_on_without_its_terminal_and_where_nobody_reads(
    command: list[str], tmp_path: Path
) -> None:
    """As under nohup or tmux: the terminal is gone, and nobody says so by a signal; so is the reader of a pipe."""
    ours, theirs = pty.openpty()
    reading, writing = os.pipe()
    os.close(reading)
    process = start(command, stdout=writing, stderr=theirs, stdin=theirs, start_new_session=True)
    os.close(writing)
    os.close(theirs)
    os.read(ours, 100)
    os.close(ours)
    assert process.wait(120) == 0
    assert result(tmp_path)["status"] == "finished"


@pytest.mark.slow
def test_train__saves_itself_and_leaves_at_a_warning(command: list[str], tmp_path: Path) -> None:
    """SIGTERM is sent in tests/test_cli.py, every signal to a loop in tests/engine/test_interruption.py."""
    number = signal.SIGUSR1
    inherited = signal.signal(number, signal.SIG_DFL)  # what the tests were started with, nohup perhaps
    try:
        process = start(
            [*command, "--set", "optimization.epochs=400", "--set", "data.num_workers=0"],
            stderr=subprocess.PIPE,
        )
    finally:
        signal.signal(number, inherited)
    with process:
        wait_for(tmp_path / "run" / "checkpoints" / "last_000003")
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in said.decode()
    assert result(tmp_path)["status"] == "interrupted"
    assert list((tmp_path / "run" / "checkpoints").glob("last_*"))
