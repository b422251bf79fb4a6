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
        self._signal: int | None = None

    def check(self) -> None:
        """Raise if a signal has come."""
        if self._signal is not None:
            name = signal.Signals(self._signal).name
            raise TrainingInterrupted(128 + self._signal, f"stopped by {name}")

    def check_after_task(self, task_index: int) -> None:
        """Raise if a signal has come or the planned task is done."""
        self.check()
        if self.after_task == task_index + 1:
            raise TrainingInterrupted(0, f"stopped after task {self.after_task} as planned")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into a request; a second one ends the process at once."""

        def request(number: int, frame: FrameType | None) -> None:
            self._signal = number
            signal.signal(number, previous[signal.Signals(number)])

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
