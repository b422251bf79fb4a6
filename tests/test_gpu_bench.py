"""The measurement of a GPU, in sizes for a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench" / "gpu.sh"


def measured(*options: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), "--device", "cpu", *options]
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_gpu_bench__measures_everything_in_small() -> None:
    done = measured("--tiny", "--learners", "linear_probe", "--seconds", "600")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[3] for row in rows if row[0] == "| linear_probe"] == ["yes (0.001) |"]
    speeds = [row for row in rows if len(row) == 9 and "linear_probe" in row]
    assert {tuple(row[2:5]) for row in speeds} == {
        (precision, compiled, views)
        for precision in ("fp32", "tf32", "bf16")
        for compiled in ("yes", "no")
        for views in ("1", "4")
    }
    assert all(float(row[5]) > 0 for row in speeds)
    assert [row[2] for row in rows if row[1] == "finetune"] == ["1", "4"]  # with the data layer
    assert "left out" not in done.stdout


@pytest.mark.slow
def test_gpu_bench__says_what_it_had_no_time_for() -> None:
    done = measured("--tiny", "--learners", "linear_probe,l2p", "--seconds", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out for lack of time (28)" in done.stdout
    for name in ("correctness of l2p", "vit_tiny_patch16_224 linear_probe bf16 False 1", "data layer, "):
        assert name in done.stdout
