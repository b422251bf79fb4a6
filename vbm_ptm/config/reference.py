"""What every setting means: read from the configuration classes, so that it is written once.

Each class documents its settings under "Attributes:"; ``docs/settings.md`` and ``vbm-ptm check --explain`` show these
sentences.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from vbm_ptm.config.run_config import RunConfig
from vbm_ptm.config.tree import as_yaml, find_config, leaves, read_yaml
from vbm_ptm.learners.registry import learner_class, list_learners


@dataclass(frozen=True)
class Setting:
    """One setting.

    Attributes:
        path: Dotted path, as ``--set`` takes it.
        kind: What may be given, in words.
        default: As YAML writes it; empty where a value must be given.
        meaning: The sentence of its class's docstring.
    """

    path: str
    kind: str
    default: str
    meaning: str


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of a configuration class, sections within it included."""
    meanings = _meanings(model)
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is not None:
            yield from settings_of(section, f"{prefix}{name}.")
            continue
        default = "" if field.is_required() else as_yaml(field.get_default(call_default_factory=True))
        yield Setting(f"{prefix}{name}", _kind(field.annotation), default, meanings.get(name, ""))


def general_settings() -> list[Setting]:
    """Return the settings of every run but those of its learner."""
    return [each for each in settings_of(RunConfig) if not each.path.startswith("learner.")]


def learner_settings(learner: str) -> list[Setting]:
    """Return the settings that a learner has of its own."""
    own = settings_of(learner_class(learner).config_class, "learner.")
    return [each for each in own if each.path != "learner.name"]


def preset_values(learner: str) -> dict[str, dict[str, str]]:
    """Return what the presets of a learner set: preset -> dotted path -> value.

    A value of the preset's part for one data set stands behind the general one, with the name of that data set.
    """
    file = find_config(f"learners/{learner}", is_optional=True)
    presets: Mapping[str, Any] = read_yaml(file).get("presets", {}) if file else {}
    found: dict[str, dict[str, str]] = {}
    for name, settings in presets.items():
        values = {
            path: as_yaml(value)
            for path, value in leaves({key: part for key, part in settings.items() if key != "datasets"})
        }
        for dataset, part in (settings.get("datasets") or {}).items():
            for path, value in leaves(part):
                special = f"{as_yaml(value)} ({dataset})"
                values[path] = f"{values[path]}, {special}" if path in values else special
        found[name] = values
    return found


def render_reference() -> str:
    """Return the page ``docs/settings.md``."""
    presets = {learner: preset_values(learner) for learner in list_learners()}
    lines = [
        "# Settings",
        "",
        "Every setting of a run, by section. `--set path=value` sets one; a YAML file nests them. Later sources win: "
        "defaults, the data set's file, the learner's file (base, preset, preset for that data set), `--config`, "
        "`--set`. `vbm-ptm check --explain PATH` tells which source set a value, and what it means.",
        "",
        "This page is generated: `python scripts/settings_reference.py`.",
    ]
    for section, settings in _by_section(general_settings()).items():
        lines += ["", f"## {section}", "", "| setting | value | default | meaning | set by presets of |"]
        lines += ["|---|---|---|---|---|"]
        for each in settings:
            users = [name for name, by_preset in presets.items() if _sets(by_preset, each.path)]
            lines.append(
                _row(f"`{each.path}`", each.kind, _code(each.default), each.meaning, ", ".join(users))
            )
    for learner, by_preset in presets.items():
        lines += ["", f"## Learner `{learner}`", ""]
        own = learner_settings(learner)
        if not own:
            lines.append("No settings of its own.")
            continue
        names = list(by_preset)
        lines.append(_row("setting", "value", "default", *names, "meaning"))
        lines.append("|" + "---|" * (4 + len(names)))
        for each in own:
            values = (_code(by_preset[name].get(each.path, "")) for name in names)
            lines.append(_row(f"`{each.path}`", each.kind, _code(each.default), *values, each.meaning))
    return "\n".join(lines) + "\n"


def _by_section(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    sections: dict[str, list[Setting]] = {}
    for each in settings:
        section = each.path.rpartition(".")[0] or "run"
        sections.setdefault(section, []).append(each)
    return sections


def _sets(by_preset: Mapping[str, Mapping[str, str]], path: str) -> bool:
    return any(path in values for values in by_preset.values())


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return what the docstrings of a class and its bases say about each attribute, with YAML's word for None."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        text = inspect.cleandoc(each.__doc__ or "") if issubclass(each, BaseModel) else ""
        block = re.search(r"^Attributes:\n((?:[ ]+.*\n?|\n)+)", text, flags=re.MULTILINE)
        if block is None:
            continue
        entries = re.split(r"^    (\w+): ", block[1], flags=re.MULTILINE)[1:]
        for name, words in zip(entries[::2], entries[1::2], strict=True):
            found[name] = re.sub(r"\bNone\b", "`null`", " ".join(words.split()).replace("``", "`"))
    return found


def _section(annotation: Any) -> type[BaseModel] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _kind(annotation: Any) -> str:
    """Say in words what an annotation takes."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0])
    if origin is Literal:
        return ", ".join(f"`{as_yaml(part)}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in parts)
    if origin is tuple:
        inner = list(dict.fromkeys(_kind(part) for part in parts if part is not Ellipsis))
        count = "" if Ellipsis in parts else f"{len(parts)} x "
        return f"list of {count}{' and '.join(inner)}"
    if origin is dict:
        return f"{_kind(parts[1])} by name"
    if _section(annotation) is not None:
        return "settings"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    if annotation in names:
        return names[annotation]
    return "path" if annotation.__name__ == "Path" else annotation.__name__


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
