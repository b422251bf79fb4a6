"""Contradictions in a run directory, one line each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """A contradiction between two records of the same run.

    Attributes:
        what: The part of the run directory.
        expected: What it should say.
        found: What it says.
        remedy: What to do.
    """

    what: str
    expected: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}; {self.remedy}."


@dataclass
class Findings:
    """What was checked, and what contradicts.

    Attributes:
        items: The contradictions.
        checked: What was compared, in words.
    """

    items: list[Finding] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)

    def add(self, what: str, *, expected: Any, found: Any, remedy: str) -> None:
        """Record a contradiction."""
        self.items.append(Finding(what, _in_one_line(expected), _in_one_line(found), remedy))

    def expect(self, what: str, *, expected: Any, found: Any, remedy: str) -> bool:
        """Compare two values, record a contradiction if they differ, and return whether they agree."""
        if expected == found:
            return True
        self.add(what, expected=expected, found=found, remedy=remedy)
        return False


def _in_one_line(value: Any) -> str:
    return " ".join(str(value).split())
