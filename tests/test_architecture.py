"""What holds for the package as a whole: layers, sizes, weight at import, no pickle, docstrings."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
MODULES = sorted((REPOSITORY / "vbm_ptm").rglob("*.py"))
SOURCES = [*MODULES, *sorted((REPOSITORY / "scripts").glob("*.py"))]
CONFIGS = sorted((REPOSITORY / "configs").rglob("*.yaml"))

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80

# Import-linter cannot see what importlib imports: the learner registry, and whoever defers heavy imports.
MAY_USE_IMPORTLIB = {"vbm_ptm/__init__.py", "vbm_ptm/learners/registry.py"}

HEAVY = ("accelerate", "datasets", "matplotlib", "numpy", "pandas", "sklearn", "timm", "torch", "torchvision")

# The command line itself, and what writes pages (style sheets) and the reference of the settings.
MAY_NAME_OPTIONS = ("vbm_ptm/cli/", "vbm_ptm/report/", "vbm_ptm/config/reference.py")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def place(path: Path, node: ast.AST | None = None) -> str:
    relative = path.relative_to(REPOSITORY).as_posix()
    return relative if node is None else f"{relative}:{getattr(node, 'lineno', 0)}"


def calls(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Yield each call with its dotted name as written, e.g. ``torch.load``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def imported_names(tree: ast.Module) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each import with the dotted name that it makes known, e.g. ``torch.save``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node, f"{node.module}.{name.name}") for name in node.names)


def test_imports__point_down_and_stay_behind_their_doors() -> None:
    # In a process of its own: import-linter's entry point disables every logger made before it.
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache", "--no-logo"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports__importlib_is_used_only_where_known() -> None:
    users = {
        place(path)
        for path in MODULES
        for _, name in calls(parse(path))
        if name.endswith("import_module") or name == "__import__"
    }
    assert users <= MAY_USE_IMPORTLIB


def test_import__of_the_command_line_is_light() -> None:
    program = f"import sys, vbm_ptm, vbm_ptm.cli; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_sizes__of_files_and_functions_stay_readable() -> None:
    too_long = []
    for path in SOURCES:
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            too_long.append(f"{place(path)}: {num_lines} lines")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    too_long.append(f"{place(path, node)}: {node.name} has {num_lines} lines")
    assert too_long == []


def test_state__is_neither_written_nor_read_by_pickle() -> None:
    banned = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "torch.save", "torch.load")
    found = []
    for path in SOURCES:
        tree = parse(path)
        for node, name in imported_names(tree):
            if name in banned or name.startswith(tuple(f"{each}." for each in banned)):
                found.append(f"{place(path, node)}: imports {name}")
        for call, name in calls(tree):
            if name == "torch.save":
                found.append(f"{place(path, call)}: {name}")
            is_safe = any(
                keyword.arg == "weights_only" and ast.unparse(keyword.value) == "True"
                for keyword in call.keywords
            )
            if name == "torch.load" and not is_safe:
                found.append(f"{place(path, call)}: torch.load without weights_only=True")
    assert found == []


def test_messages__below_the_command_line_name_nothing_to_type() -> None:
    found: list[str] = []
    for path in MODULES:
        if place(path).startswith(MAY_NAME_OPTIONS):
            continue
        tree = parse(path)
        unread = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            is_text = (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unread
            )
            if is_text and re.search(r"(?<![\w-])--[a-z]|vbm-ptm [a-z]", node.value):
                found.append(place(path, node))
    assert found == []


def test_public_names__are_documented() -> None:
    undocumented = []
    for path in MODULES:
        tree = parse(path)
        if not ast.get_docstring(tree):
            undocumented.append(place(path))
        undocumented += [
            f"{place(path, node)}: {node.name}"
            for node in tree.body
            if isinstance(node, Definition) and not node.name.startswith("_") and not ast.get_docstring(node)
        ]
    assert undocumented == []


@pytest.mark.parametrize("path", CONFIGS, ids=place)
def test_configs__are_mappings(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)
