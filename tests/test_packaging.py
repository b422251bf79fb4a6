"""The wheel holds all that the program needs, and the program runs from it in an empty directory."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import vbm_ptm
from vbm_ptm.learners import list_learners

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by way of the sdist, so that the sdist is known to be whole as well."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_wheel__holds_the_package_and_the_configs(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    package = {f"vbm_ptm/{name}" for name in files_below(REPOSITORY / "vbm_ptm")}
    configs = {f"vbm_ptm/configs/{name}" for name in files_below(REPOSITORY / "configs")}
    assert names == package | configs
    assert "vbm_ptm/py.typed" in names
    assert any(name.startswith("vbm_ptm/assets/") for name in names)
    assert "vbm_ptm/configs/quickstart.yaml" in names
    assert wheel.name == f"vbm_ptm-{vbm_ptm.__version__}-py3-none-any.whl"


def test_wheel__runs_in_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(installed)
    elsewhere.mkdir()
    program = (
        "import runpy, vbm_ptm; print(vbm_ptm.__file__); runpy.run_module('vbm_ptm', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "list", "learners"],
        capture_output=True,
        text=True,
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )
    assert done.returncode == 0, done.stderr
    file, *listed = done.stdout.splitlines()
    assert Path(file).is_relative_to(installed)
    assert set(list_learners()) <= set(" ".join(listed).split())
    assert list(elsewhere.iterdir()) == []
