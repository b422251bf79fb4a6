"""Reading ``log.jsonl``, even while another process writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]

# What the event of a step holds besides its loss parts.
ABOUT_A_STEP = frozenset(
    {"event", "task", "epoch", "step", "images", "groups", "views", "data_seconds", "learning_rates"}
)


class LogReader:
    """Returns what has been added to a log since the last call, in whole lines only.

    A run that resumes cuts its log back to its checkpoint, so that what was read may no longer hold: then everything is
    read again.

    Args:
        path: The file, which need not exist yet.

    Attributes:
        num_restarts: How often everything was read again.
        position: Bytes read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_restarts = 0
        self.position = 0
        self._last_line = b""

    def read(self) -> list[Event]:
        """Return the new events; all of them if ``num_restarts`` has grown.

        A line that is not a JSON object is left out: ``vbm_ptm.runs.verification`` reports it.
        """
        try:
            file = self.path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            self._begin_anew()
            return []
        with file:
            file.seek(self.position - len(self._last_line))
            if file.read(len(self._last_line)) != self._last_line:
                self._begin_anew()
                file.seek(0)
            *lines, _ = file.read().split(b"\n")
        self.position += sum(len(line) + 1 for line in lines)
        if lines:
            self._last_line = lines[-1] + b"\n"
        return [event for event in map(parse_line, lines) if event is not None]

    def _begin_anew(self) -> None:
        if self.position:
            self.num_restarts += 1
        self.position, self._last_line = 0, b""


def parse_line(line: bytes) -> Event | None:
    """Return the event of a line; None if it is not an event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
