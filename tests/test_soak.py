"""The soak in its shortest form, with real processes, and that it sees what it looks for."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "soak.py"


@pytest.fixture(name="soak")
def _soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return scripts/soak.py as a module."""
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)
    spec.loader.exec_module(module)
    return module


def test_main__refuses_systems_without_proc(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["soak.py"])
    with pytest.raises(SystemExit) as leaving:
        soak.main()
    assert leaving.value.code == 2
    assert "/proc" in capsys.readouterr().err


@pytest.mark.slow
def test_soak__of_two_learners_and_three_tasks(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--tasks", "3", "--learners", "nearest_mean,er"]
    done = subprocess.run(
        [*command, "--workers", "2", "--limit", "240", "--json", str(tmp_path / "seen.json")],
        capture_output=True,
        text=True,
    )
    if sys.platform != "linux":
        assert done.returncode == 2, done.stdout + done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("flat, nothing left") == 2
    assert len(done.stdout.split("evaluation: ms")[1].split()) == 8 + 2 * 8
    workers: list[int] = []
    for seen in json.loads((tmp_path / "seen.json").read_text()):
        assert (seen["code"], len(seen["main_kib"]), len(seen["stored_kib"])) == (0, 3, 3)
        assert min(seen["main_kib"]) > 0
        assert len(seen["milliseconds"]) == 3
        assert len(seen["worker_kib"]) == 3
        workers += seen["worker_kib"]  # 0 where a task was over before its workers were looked at
    assert max(workers) > 0


def test_problems__are_growth_hangs_failures_and_what_is_left(soak: ModuleType) -> None:
    kib = [900_000] * 10
    fine = soak.Soak("er", 2, code=0, main_kib=kib, worker_kib=kib, stored_kib=[5.0] * 10)
    assert fine.problems(10) == []
    leaking = [900_000 + 1536 * task for task in range(10)]  # a network is kept for each
    assert soak.slope(leaking) == 1536
    assert soak.Soak("er", 2, code=0, main_kib=leaking, worker_kib=kib).problems(10) == [
        "main process: grows by 1536 KiB a task"
    ]
    step = [900_000] * 40 + [904_000] * 10  # an allocator takes a few MiB at once
    assert soak.Soak("er", 2, code=0, main_kib=step, worker_kib=step).problems(50) == []
    young = [487_000, 503_000, 487_000, 503_000, 503_000] * 5 + [
        503_000
    ] * 25  # some are seen before they have grown
    assert soak.Soak("er", 2, code=0, main_kib=[900_000] * 50, worker_kib=young).problems(50) == []
    assert soak.slope([kib + 200 * task for task, kib in enumerate(young)]) == pytest.approx(200)
    known = [1200.0 * task for task in range(10)]
    assert (
        soak.Soak("er", 2, code=0, main_kib=leaking, worker_kib=leaking, stored_kib=known).problems(10) == []
    )
    assert soak.Soak("er", 2, code=None, main_kib=kib).problems(10) == ["hangs"]
    assert soak.Soak("er", 2, code=1).problems(10) == ["exit code 1"]
    assert soak.Soak("er", 2, code=0, main_kib=kib[:9]).problems(10) == ["9 tasks of 10"]
    assert soak.Soak("er", 2, code=0, main_kib=kib, left=["1 processes left"]).problems(10) == [
        "1 processes left"
    ]
