"""Names that people read: compared in one Unicode form, shown as they were first written.

An accented letter has two spellings, one code point or two; keyboards, file systems and archives differ in which one
they produce.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def form(name: str) -> str:
    """Return the form in which names are compared (NFC)."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def first_written(names: Iterable[str]) -> dict[str, str]:
    """Return the form of every name -> its first spelling, in order."""
    found: dict[str, str] = {}
    for name in names:
        found.setdefault(form(name), name)
    return found


def by_form(values: Mapping[str, T]) -> dict[str, T]:
    """Return a mapping keyed by the form of each name; of equal names the first one counts."""
    found: dict[str, T] = {}
    for name, value in values.items():
        found.setdefault(form(name), value)
    return found


def alike(names: Iterable[str]) -> list[str]:
    """Describe names that differ only in case or white space: usually one name, written in two ways."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault("".join(form(name).casefold().split()), []).append(name)
    return [" and ".join(map(repr, same)) for same in found.values() if len(same) > 1]


def with_code_points(name: str) -> str:
    """Spell out all characters that are not ASCII: ``caf<U+00E9>``."""
    return "".join(letter if letter.isascii() else f"<U+{ord(letter):04X}>" for letter in name)


def same_in_other_form(names: Iterable[str]) -> list[str]:
    """Describe names that are written in two forms, by code points, as they look alike."""
    first = first_written(names := list(names))
    return [
        f"{with_code_points(first[form(name)])} and {with_code_points(name)}"
        for name in dict.fromkeys(names)
        if first[form(name)] != name
    ]
