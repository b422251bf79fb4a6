"""Stopping between two steps when the process is asked to: Ctrl-C, SIGTERM, or a planned stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vbm_ptm.errors import TrainingInterrupted


class StopRequest:
    """A flag that signal handlers set and the trainer reads.

    Args:
        after_task: Stop once so many tasks are finished; None for all.
    """

    def __init__(self, after_task: int | None = None) -> None:
        self.after_task = after_task
        self._signal = 0
        self._acts_at_once = False

    @property
    def signal(self) -> int:
        """Number of the signal that has come to this process; 0 before one has."""
        return self._signal

    def check(self, number: int | None = None) -> None:
        """Raise if a signal has come.

        Args:
            number: The signal that the ranks have agreed on, or 0; None for that of this process.
        """
        number = self._signal if number is None else number
        if number:
            raise TrainingInterrupted(128 + number, f"stopped by {signal.Signals(number).name}")

    def check_after_task(self, task_index: int) -> None:
        """Raise if the planned task is done."""
        if self.after_task is not None and self.after_task <= task_index + 1:
            raise TrainingInterrupted(0, f"stopped after task {self.after_task} as planned")

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal raise inside the block, whose work is lost and done again when the run goes on."""
        self.check()
        self._acts_at_once = True
        try:
            yield
        finally:
            self._acts_at_once = False
        self.check()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into a request; a second one ends the process at once."""

        def request(number: int, frame: FrameType | None) -> None:
            self._signal = self._signal or number
            signal.signal(number, previous[signal.Signals(number)])
            if self._acts_at_once:
                self.check()

        previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for number in previous:
                signal.signal(number, request)
        except ValueError:  # not the main thread: whoever runs there handles signals
            previous = {}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
