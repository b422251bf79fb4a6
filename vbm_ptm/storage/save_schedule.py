"""When a run saves itself inside a task."""

from __future__ import annotations

import re

# Two saves at ends of epochs are at least this multiple of the duration of the last save apart.
_PATIENCE = 50


def check_interval(every: str) -> str:
    """Return the interval if it is valid.

    Raises:
        ValueError: It is not.
    """
    if not re.fullmatch(r"task|epoch|[1-9]\d* (minute|step)s?", every):
        raise ValueError(f"'{every}' is not one of: task, epoch, '10 minutes', '50 steps' (any number)")
    return every


class SaveSchedule:
    """Decides whether to save between two steps.

    Args:
        every: "task": never inside a task; "epoch": at the end of an epoch, but rarely enough for saving to take less
            than about a fiftieth of the time; "N minutes"; "N steps".
    """

    def __init__(self, every: str) -> None:
        self._number = int(re.sub(r"\D", "", check_interval(every)) or 0)
        self._unit = re.sub(r"[\d ]", "", every).removesuffix("s")
        self._saved_at, self._saved_step, self._cost = 0.0, 0, 0.0

    def begin(self, *, num_steps: int, now: float) -> None:
        """Start counting in a task in which this many steps have been done already."""
        self._saved_at, self._saved_step = now, num_steps

    def is_due(self, *, num_steps: int, is_epoch_over: bool, now: float) -> bool:
        """Return whether to save now.

        Args:
            num_steps: Steps done in the task.
            is_epoch_over: Whether the last of them ended an epoch.
            now: Seconds of a clock that never goes back.
        """
        if self._unit == "step":
            return num_steps - self._saved_step >= self._number
        if self._unit == "minute":
            return now - self._saved_at >= 60 * self._number
        return self._unit == "epoch" and is_epoch_over and now - self._saved_at >= _PATIENCE * self._cost

    def saved(self, *, num_steps: int, began: float, ended: float) -> None:
        """Record a save and what it cost."""
        self._saved_at, self._saved_step, self._cost = ended, num_steps, ended - began
