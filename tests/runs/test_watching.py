"""Following runs: the log of a real one, cut where it may be found, and locks that live and die."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vbm_ptm.cli import main
from vbm_ptm.errors import UsageError
from vbm_ptm.runs.watching import RunWatcher
from vbm_ptm.storage.locking import is_held, sole_holder

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def unfinished(two_runs: tuple[Path, Path], tmp_path: Path) -> Callable[[int], Path]:
    """Return a function that makes a run without a result whose log has so many bytes of a whole one."""

    def make(num_bytes: int, name: str = "run") -> Path:
        path = tmp_path / name
        path.mkdir(exist_ok=True)
        shutil.copyfile(two_runs[0] / "config.yaml", path / "config.yaml")
        (path / "log.jsonl").write_bytes((two_runs[0] / "log.jsonl").read_bytes()[:num_bytes])
        return path

    return make


def log_of(path: Path) -> bytes:
    return (path / "log.jsonl").read_bytes()


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path / "log.jsonl", (then, then))


def test_watcher__sees_a_finished_run(two_runs: tuple[Path, Path]) -> None:
    result = json.loads((two_runs[0] / "result.json").read_text())
    seen = RunWatcher(two_runs[0]).look()
    assert seen.state == "finished"
    assert "linear_probe on toy, 2 views, seed 1" in seen.title
    progress = seen.progress
    assert (progress.num_tasks, progress.num_finished, progress.num_epochs) == (3, 3, 2)
    assert (progress.num_steps, progress.total_steps) == (18, 18) == (result["num_steps"], 18)
    assert progress.num_images == result["num_images"]
    assert progress.accuracies == result["metrics"]["class_incremental"]["top1"]["curve"]
    assert {len(values) for values in progress.parts.values()} == {6}
    assert len(progress.lines) == 3 * (2 + 1)  # epochs and tasks


def test_watcher__adds_up_the_same_however_the_log_grows(
    two_runs: tuple[Path, Path], unfinished: Callable[..., Path]
) -> None:
    whole = log_of(two_runs[0])
    path = unfinished(0)
    watcher = RunWatcher(path)
    counts = []
    with (path / "log.jsonl").open("ab", buffering=0) as log:
        for start in range(0, len(whole), 997):  # never at the end of a line
            log.write(whole[start : start + 997])
            seen = watcher.look()
            counts.append(seen.progress.num_steps)
            is_last = start + 997 >= len(whole)
            assert seen.state == ("finished" if is_last else "running")
    assert counts == sorted(counts)
    expected = RunWatcher(two_runs[0]).look().progress
    assert vars(seen.progress) == vars(expected)


def test_watcher__follows_a_run_back_to_its_checkpoint(
    two_runs: tuple[Path, Path], unfinished: Callable[..., Path]
) -> None:
    lines = log_of(two_runs[0]).splitlines(keepends=True)
    bounds = [sum(map(len, lines[:count])) for count in range(len(lines) + 1)]
    path = unfinished(bounds[6])
    watcher = RunWatcher(path)
    assert watcher.look().progress.num_steps == 4  # after plan and begin_task
    (path / "log.jsonl").write_bytes(b"".join(lines[:4]))
    assert watcher.look().progress.num_steps == 2
    other = lines[4].replace(b'"loss": ', b'"loss": 1')
    (path / "log.jsonl").write_bytes(b"".join([*lines[:3], other, *lines[4:9]]))  # cut and longer again
    progress = watcher.look().progress
    assert progress.num_steps == 6
    assert progress.parts["loss"][1] > 10


def test_watcher__tells_what_moves_from_what_does_not(unfinished: Callable[..., Path]) -> None:
    path = unfinished(3000)
    assert RunWatcher(path).look().state == "running"
    age(path, 500)
    dead = RunWatcher(path).look()
    assert dead.state == "dead"
    assert "can be resumed" in dead.note
    with sole_holder(path / ".lock", what="a test"):
        assert is_held(path / ".lock") is True
        quiet = RunWatcher(path).look()
        assert quiet.state == "quiet"
        assert f"process {os.getpid()} is alive" in quiet.note
        age(path, 1)
        assert RunWatcher(path).look(is_thorough=True).state == "running"
    age(path, 500)
    for status, state in (("interrupted", "stopped"), ("failed", "failed")):
        (path / "result.json").write_text(json.dumps({"status": status}))
        seen = RunWatcher(path).look()
        assert seen.state == state
        assert "can be resumed" in seen.note


def test_watcher__of_a_run_that_is_killed(unfinished: Callable[..., Path]) -> None:
    path = unfinished(3000)
    age(path, 100)
    program = (
        "import sys, time; from pathlib import Path; from vbm_ptm.storage.locking import sole_holder\n"
        "with sole_holder(Path(sys.argv[1]), what='a test'): print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(path / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        watcher = RunWatcher(path)
        assert watcher.look().state == "quiet"
        process.kill()
        process.wait()
        seen = watcher.look()
    assert seen.state == "dead"
    assert str(process.pid) in seen.note


def test_watcher__waits_for_a_run_that_has_not_begun(unfinished: Callable[..., Path], tmp_path: Path) -> None:
    watcher = RunWatcher(tmp_path / "run")
    seen = watcher.look()
    assert (seen.state, seen.quiet_seconds) == ("not begun", None)
    unfinished(2500)
    assert watcher.look().state == "running"
    assert watcher.look().progress.num_steps > 0


def test_watch__ends_with_a_run_that_took_itself_back(
    unfinished: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    path = unfinished(3000)
    naps: list[float] = []

    def take_back(seconds: float) -> None:
        naps.append(seconds)
        assert len(naps) < 3, "it waits for ever"
        shutil.rmtree(path, ignore_errors=True)

    monkeypatch.setattr(time, "sleep", take_back)
    assert main(["watch", str(path)]) == 1
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1].startswith("failed: The run ended with an error before it kept anything")
    assert "--resume" not in shown
    assert "gone back" not in shown


def test_watcher__refuses_what_is_no_run(tmp_path: Path, two_runs: tuple[Path, Path]) -> None:
    (tmp_path / "notes.txt").write_text("no run")
    for path, message in (
        (tmp_path, "not a run directory"),
        (tmp_path / "notes.txt", "is a file"),
        (two_runs[0].parent, "holds several runs"),
    ):
        with pytest.raises(UsageError, match=message):
            RunWatcher(path)


def test_watch__command(
    two_runs: tuple[Path, Path], unfinished: Callable[..., Path], tmp_path: Path, capsys: Capture
) -> None:
    assert main(["watch", str(two_runs[0])]) == 0
    shown = capsys.readouterr().out.splitlines()
    curve = json.loads((two_runs[0] / "result.json").read_text())["metrics"]["class_incremental"]["top1"][
        "curve"
    ]
    done = [line for line in shown if " done: " in line]
    assert [f"{accuracy:.2f} %" in line for accuracy, line in zip(curve, done, strict=True)] == [True] * 3
    assert shown[-1] == "finished"
    assert main(["watch", str(two_runs[0]), "--once"]) == 0
    panel = capsys.readouterr().out
    assert "18/18" in panel
    assert f"{curve[-1]:.2f} %" in panel
    dead = unfinished(3000)
    age(dead, 500)
    assert main(["watch", str(dead)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("dead: ")
    assert main(["watch", str(dead), "--once"]) == 0
    assert "--resume" in capsys.readouterr().out
    assert main(["watch", str(tmp_path / "nothing"), "--once"]) == 2
    assert "does not exist; give the run directory" in capsys.readouterr().err
