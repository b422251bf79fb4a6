"""The drill with real processes that are really killed, in its shortest form."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "fault_drill.py"


@pytest.mark.slow
def test_drill__ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """A run on one rank is killed and damaged, and one on two; another comes to the end of a disk."""
    command = [sys.executable, str(SCRIPT), "--kills", "2", "--learners", "slca", "--ranks", "1,2"]
    done = subprocess.run([*command, "--folder", str(tmp_path / "drill")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no difference" in done.stdout
    assert len(re.findall(r"[1-9]\d* damaged files: identical", done.stdout)) == 2
    assert not (tmp_path / "drill").exists()
