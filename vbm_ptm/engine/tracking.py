"""The output of a run while it works: one JSON line per event, and a progress bar or plain lines on stderr."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from vbm_ptm.storage.durable_files import sync

logger = logging.getLogger(__name__)


class _LastingConsole(Console):
    """A console that falls silent when its output can no longer be read, instead of ending the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


console = _LastingConsole(stderr=True, highlight=False, markup=False)


@contextmanager
def silenced(is_quiet: bool) -> Iterator[None]:
    """Show nothing on the console inside the block, if requested."""
    before, console.quiet = console.quiet, console.quiet or is_quiet
    try:
        yield
    finally:
        console.quiet = before


class RunLog:
    """``log.jsonl``: appended and flushed line by line, cut back to a checkpoint's position on resume.

    Args:
        path: The file; None writes nothing (ranks other than 0).
        position: Bytes to keep of an existing file.
    """

    def __init__(self, path: Path | None, *, position: int = 0) -> None:
        self._file = None
        if path is not None:
            self._file = path.open("ab")
            if self._file.tell() < position:
                logger.warning("%s has lost its last %d bytes", path, position - self._file.tell())
            # A log that was lost is not filled up with zeros, and the file knows of its new end.
            self._file.truncate(_end_of_last_line(path, before=min(position, self._file.tell())))
            self._file.seek(0, os.SEEK_END)

    @property
    def position(self) -> int:
        """Bytes written so far."""
        return self._file.tell() if self._file else 0

    def sync(self) -> None:
        """Force what was written to the disk: no checkpoint may refer to more of the log than is on the disk."""
        if self._file:
            sync(self._file.fileno(), Path(self._file.name))

    def write(self, event: str, **values: Any) -> None:
        """Append one event."""
        if self._file:
            self._file.write((json.dumps({"event": event, **values}, ensure_ascii=False) + "\n").encode())
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()


def _end_of_last_line(path: Path, *, before: int) -> int:
    """Return where the last whole line ends: what comes next must not be glued to a torn one."""
    with path.open("rb") as file:
        while before > 0:
            start = max(0, before - 65536)
            file.seek(start)
            newline = file.read(before - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            before = start
    return 0


class ProgressDisplay:
    """Task, epoch, step, losses, accuracy and time left: a bar on a terminal, a line per epoch elsewhere.

    Args:
        num_steps: Optimizer steps of the whole run that are still to do.
        is_silent: Show nothing (ranks other than 0).
    """

    def __init__(self, num_steps: int, *, is_silent: bool = False) -> None:
        self._num_steps = num_steps
        self._is_silent = is_silent
        self._done = 0
        self._started = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total} steps"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=is_silent or not console.is_terminal,
            transient=True,
        )
        self._row = self._bar.add_task("", total=num_steps)

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, steps: int = 1) -> None:
        """Count finished steps."""
        self._done += steps
        self._bar.advance(self._row, steps)

    def show(self, where: str, values: dict[str, float] | None = None) -> None:
        """Describe the current position on the bar."""
        self._bar.update(self._row, description=f"{where} · {_describe(values)}" if values else where)

    def end_epoch(self, where: str, values: dict[str, float]) -> None:
        """Show the means of an epoch: on the bar, or as a line where there is no terminal."""
        self.show(where, values)
        if not console.is_terminal:
            self.line(f"{where} · {_describe(values)} · {self._time_left()}")

    def line(self, text: str) -> None:
        """Print a line that stays."""
        if not self._is_silent:
            console.print(text, markup=False, soft_wrap=True)

    def _time_left(self) -> str:
        elapsed = time.monotonic() - self._started
        seconds = int(elapsed / max(self._done, 1) * max(self._num_steps - self._done, 0))
        return f"{seconds // 60}:{seconds % 60:02d} left"


def _describe(values: dict[str, float]) -> str:
    shown = {name.replace("_", " "): value for name, value in values.items()}
    return " · ".join(
        f"{name} {value:.1%}" if name == "accuracy" else f"{name} {value:.4g}"
        for name, value in shown.items()
    )
