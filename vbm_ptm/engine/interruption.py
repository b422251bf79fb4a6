"""Stopping between two steps on request: by a signal, or as planned."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Literal

from vbm_ptm.errors import TrainingInterrupted

# What batch systems send before the time limit, and a terminal when it is closed.
StopSignal = Literal["SIGHUP", "SIGUSR1", "SIGUSR2"]
STOP_SIGNALS: tuple[StopSignal, ...] = ("SIGHUP", "SIGUSR1", "SIGUSR2")


class StopRequest:
    """A flag that signal handlers set and the trainer reads.

    Args:
        after_task: Stop once this many tasks are finished; None for all.
        signals: What asks the process to stop, besides SIGINT and SIGTERM.
    """

    def __init__(
        self, after_task: int | None = None, *, signals: Sequence[StopSignal] = STOP_SIGNALS
    ) -> None:
        self.after_task = after_task
        self._warnings = [
            getattr(signal, name) for name in signals if hasattr(signal, name)
        ]  # not on Windows
        self._signal = 0
        self._acts_at_once = False

    @property
    def signal(self) -> int:
        """Number of the signal that this process has received; 0 for none."""
        return self._signal

    def check(self, number: int | None = None) -> None:
        """Raise if a signal was received.

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
        """Let a signal raise inside the block, whose work is lost and repeated when the run is resumed."""
        self.check()
        self._acts_at_once = True
        try:
            yield
        finally:
            self._acts_at_once = False
        self.check()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Turn signals into a request; a second SIGINT or SIGTERM ends the process at once.

        A warning that is repeated changes nothing, and one that the process was told to ignore (``nohup``) stays
        ignored.
        """
        orders = (signal.SIGINT, signal.SIGTERM)

        def request(number: int, frame: FrameType | None) -> None:
            self._signal = self._signal or number
            if number in orders:
                signal.signal(number, previous[number])
            if self._acts_at_once:
                self.check()

        previous = {int(number): signal.getsignal(number) for number in (*orders, *self._warnings)}
        for number in self._warnings:
            if previous[number] in (signal.SIG_IGN, None):  # None: not Python's
                del previous[number]
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
