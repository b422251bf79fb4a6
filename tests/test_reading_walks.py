"""The walks through the code against its imports."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "reading_walks.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("reading_walks", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reading_walks"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


walks = load_script()


def imports_of(file: Path) -> set[str]:
    """Return the modules of the package that a file imports anywhere, without the package's name."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {name.removeprefix("vbm_ptm.") for name in names if name.startswith("vbm_ptm.")}


@pytest.mark.parametrize("walk", walks.WALKS, ids=lambda walk: walk.title)
def test_walk__says_of_every_import_whether_it_is_on_the_path(walk: Any) -> None:
    on_path = {file.removesuffix(".py").replace("/", ".") for file in walk.files}
    imported = set().union(*(imports_of(walks.PACKAGE / file) for file in walk.files))
    assert imported - on_path - set(walk.beside) == set(), "name them in files or beside"
    assert set(walk.beside) - imported == set(), "nothing on the path imports these"
    assert not on_path & set(walk.beside)


@pytest.mark.parametrize("walk", walks.WALKS, ids=lambda walk: walk.title)
def test_walk__gets_no_longer(walk: Any) -> None:
    lines = walk.lines()
    assert len(lines) <= walk.goal[0]
    assert sum(lines.values()) <= walk.ceiling
    assert all(walk.files.values())


def test_map__shows_the_walks_as_they_are() -> None:
    text = walks.MAP.read_text(encoding="utf-8")
    assert walks.with_walks(text) == text, "run python scripts/reading_walks.py"
    for walk in walks.WALKS:
        for file in walk.files:
            assert f"(../vbm_ptm/{file})" in text
            assert (walks.PACKAGE / file).is_file()
