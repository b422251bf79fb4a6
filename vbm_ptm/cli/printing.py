"""What commands say: on standard output, and where they are interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from vbm_ptm.errors import TrainingInterrupted

if TYPE_CHECKING:
    from rich.console import Console


def stdout() -> Console:
    """Return a console that shows names as they are and does not cut tables where there is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    return console


def print_json(value: Any) -> None:
    """Print a value as JSON that people can read."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


@contextmanager
def how_to_go_on(text: str) -> Iterator[None]:
    """Say how to go on after an interruption."""
    try:
        yield
    except TrainingInterrupted as interruption:
        raise TrainingInterrupted(interruption.exit_code, f"{interruption}. {text}") from None
