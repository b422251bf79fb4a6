"""The lowest timm, accelerate and datasets that pyproject.toml allows, laid over the installed torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("timm", "accelerate", "datasets")


def lowest_versions() -> list[str]:
    """Return "name==version" for the packages, the version being their lower bound."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    bounds = dict(re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(dependencies), flags=re.MULTILINE))
    return [f"{name}=={bounds[name]}" for name in PACKAGES]


@pytest.mark.slow
def test_lowest_versions__load_train_and_read(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(tmp_path)]
    subprocess.run([*pip, "--no-deps", *lowest_versions()], check=True)
    subprocess.run([*pip, "requests"], check=True)  # what the lowest datasets needs beyond the newest
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    versions = "; ".join(f"import {name}; print(f'{name}=={{{name}.__version__}}')" for name in PACKAGES)
    shown = subprocess.run(
        [sys.executable, "-c", versions], env=environment, check=True, capture_output=True, text=True
    )
    assert all(
        line.startswith(asked) for line, asked in zip(shown.stdout.split(), lowest_versions(), strict=True)
    )
    # What calls timm; what calls accelerate, on two ranks in two ways; what calls datasets; and a few learners whole.
    areas = [
        *("tests/backbones", "tests/engine/test_acceleration.py"),
        *("tests/engine/test_trainer.py", "tests/engine/test_ranks.py", "tests/engine/test_evaluator.py"),
        *("tests/data/reading/test_datasets.py", "tests/data/reading/test_tables.py", "tests/contracts"),
    ]
    chosen = (
        "(not test_ranks or same_of_every_image or stop_at_the_same_step)"
        " and (not contracts or slca or coda_prompt or s_iprompt or aper)"
    )
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    tests += ["-k", chosen, *areas]
    finished = subprocess.run(tests, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-3000:]
    assert " passed" in finished.stdout
