"""What is wrong with settings, in words: the path, what was given, what is allowed, the nearest name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from vbm_ptm.errors import nearest_name, unknown_name


def problem_messages(
    model: type[BaseModel], error: ValidationError, *, origin: Callable[[str], str | None]
) -> list[str]:
    """Word what is wrong with the settings of a model, one message each.

    Args:
        model: The class that refused its settings.
        error: What it raised.
        origin: Dotted path of a setting -> what set it.
    """
    return [_problem_message(model, problem, origin) for problem in error.errors()]


def _problem_message(model: type[BaseModel], problem: Any, origin: Callable[[str], str | None]) -> str:
    # Where an annotation is a union, pydantic puts the member that it tried into the path: "tuple[str, ...]".
    path = ".".join(str(part) for part in problem["loc"] if "[" not in str(part))
    set_by = origin(path)
    source = f" (from {set_by})" if set_by else ""
    if problem["type"] == "extra_forbidden":
        *parents, given = problem["loc"]
        section = ".".join(map(str, parents))
        where = f" in {section}" if section else ""
        elsewhere = [known for known in setting_paths(model) if known.rpartition(".")[2] == given]
        hint = f" There is {' and '.join(elsewhere)}." if elsewhere else ""
        return f"{unknown_name('setting', str(given), _fields(model, parents), where=where)}{hint}{source}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{path}: {message}{source}" if path else message
    if problem["type"] == "missing":
        return f"{path}: is required but not given.{source}"
    if problem["type"] == "literal_error":
        nearest = nearest_name(str(problem["input"]), re.findall("'([^']*)'", problem["ctx"]["expected"]))
        message += f". Did you mean '{nearest}'?" if nearest else ""
    return f"{path}: {problem['input']!r} is not allowed: {message}{source}"


def section_class(model: type[BaseModel], name: Any) -> type[BaseModel] | None:
    """Return the class of a section, or list of sections, of settings; None for a single setting."""
    annotation = model.model_fields[name].annotation if name in model.model_fields else None
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _fields(model: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Return the names of the settings in a section."""
    for part in (part for part in path if not isinstance(part, int)):
        section = section_class(model, part)
        if section is None:
            return []
        model = section
    return list(model.model_fields)


def setting_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted path of every setting."""
    for name in model.model_fields:
        section = section_class(model, name)
        if section is None:
            yield f"{prefix}{name}"
        else:
            yield from setting_paths(section, f"{prefix}{name}.")
