"""Configuration trees: where their files lie, how YAML becomes text, and how trees are put together and taken apart.

Scalars stay text until the annotation of their setting reads them, so ``10`` is a class name where a name is expected
and ``1e-3`` a number where a number is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from vbm_ptm.errors import UsageError, unknown_name

Tree = dict[str, Any]

CONFIG_FOLDERS = (
    Path("configs"),
    Path(__file__).parents[1] / "configs",
    Path(__file__).parents[2] / "configs",
)


def list_configs(folder: str) -> list[str]:
    """Return the names of all YAML files in a folder of ``configs``."""
    return sorted({file.stem for root in CONFIG_FOLDERS for file in (root / folder).glob("*.yaml")})


def find_config(name: str, *, is_optional: bool = False) -> Path | None:
    """Return the first of: the path given, ``./configs``, the configurations of the package.

    Raises:
        UsageError: There is none, unless ``is_optional``.
    """
    names = [name] if name.endswith((".yaml", ".yml")) else [f"{name}.yaml"]
    roots = (Path(), *CONFIG_FOLDERS)
    for candidate in (root / name for name in names for root in roots):
        if candidate.is_file():
            return candidate
    if is_optional:
        return None
    folder = Path(names[0]).parent
    beside = {str(folder / file.name) for root in roots for file in (root / folder).glob("*.yaml")}
    known = {str(file.relative_to(root)) for root in CONFIG_FOLDERS for file in root.rglob("*.yaml")}
    raise UsageError(unknown_name("configuration file", names[0], (folder.name and beside) or known))


def read_yaml(file: Path | None) -> Tree:
    """Read a YAML mapping; every plain scalar but null stays text.

    Raises:
        UsageError: The file is not a YAML mapping.
    """
    assert file is not None
    try:
        tree = _load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UsageError(
            f"{file} must hold settings as 'section: {{key: value}}', not a {type(tree).__name__}."
        )
    return tree


def parse_override(item: str, *, optional_text: Mapping[str, bool]) -> Tree:
    """Read ``path.to.setting=value``.

    Lists, mappings and what stands in quotes is YAML, all else is text as it is given: ``#`` or ``*`` in a path is a
    letter. ``null`` unsets a setting that may be unset.

    Args:
        item: What was given.
        optional_text: Settings that are paths or names, which are text whatever they look like -> whether they may be
            unset.

    Raises:
        UsageError: The item has no "=" or the value is not YAML where it looks like it.
    """
    key, equals, value = item.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise UsageError(f"'{item}' is not of the form path.to.setting=value.")
    key = key.strip()
    if key in optional_text:
        return nested(key, None if value == "null" and optional_text[key] else value)
    if value.strip()[:1] not in ("", "[", "{", "'", '"') and value.strip() not in (
        "null",
        "Null",
        "NULL",
        "~",
    ):
        return nested(key, value.strip())
    try:
        return nested(key, _load(value))
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", error)
        raise UsageError(f"{key}: the value '{value}' is not valid YAML ({problem}).") from error


def _load(text: str) -> Any:
    return copy.deepcopy(_parsed(text))


@lru_cache(maxsize=128)
def _parsed(text: str) -> Any:
    """Parse once what every run of a study reads again."""
    try:
        value = yaml.load(text, Loader=_TextLoader)
        as_text(value)  # walks through all of it
    except RecursionError:
        raise yaml.YAMLError("it never ends: an alias (*name) stands inside what it is the name of") from None
    return value


class _TextLoader(yaml.SafeLoader):
    """Safe YAML in which plain scalars are text, except null: no "no" becomes False, no 010 becomes 8.

    A key that stands twice in one mapping is an error: the first one would be lost.
    """

    def compose_mapping_node(self, anchor: dict[Any, Any]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(None, None, f"'{key.value}' is given twice", key.start_mark)
            seen.add(str(key.value))
        return node


# Beside null, "<<" keeps its meaning: to take over the settings of another mapping.
# The attribute belongs to the class, although the stubs of PyYAML take it for an instance's.
_TextLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("null", "merge")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def as_text(value: Any) -> Any:
    """Return a tree in which every scalar but None is text, so that a bool is not a number."""
    if isinstance(value, Mapping):
        return {str(key): as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_text(item) for item in value]
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def as_yaml(value: Any) -> str:
    """Return a value as YAML writes it."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case tuple() | list():
            return f"[{', '.join(map(as_yaml, value))}]"
    return str(value)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value of every setting."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def changes(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return both values of every setting in which two trees differ, by its dotted path."""
    first, second = dict(leaves(one)), dict(leaves(two))
    return {
        key: (first.get(key), second.get(key))
        for key in sorted(first.keys() | second.keys())
        if first.get(key) != second.get(key)
    }


def is_within(path: str, names: Iterable[str]) -> bool:
    """Return whether a dotted path is one of the settings or lies in one of the sections."""
    return any(path == name or path.startswith(f"{name}.") for name in names)


def change_lines(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return a line for every setting that ``changes`` has found."""
    return [f"{key}: {as_yaml(first)} against {as_yaml(second)}" for key, (first, second) in changed.items()]


def merge(target: Tree, source: Mapping[str, Any]) -> None:
    """Let the settings of ``source`` win over those of ``target``, section by section; the two share no section."""
    for key, value in source.items():
        if isinstance(value, Mapping):
            if not isinstance(target.get(key), dict):
                target[key] = {}
            merge(target[key], value)
        else:
            target[key] = value


def nested(path: str, value: Any) -> Tree:
    """Return the tree in which a dotted path holds a value."""
    for key in reversed(path.split(".")):
        value = {key: value}
    tree: Tree = value
    return tree
