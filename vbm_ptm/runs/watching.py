"""Following a run from outside: its log says how far it is, its lock whether a process is working on it."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from vbm_ptm.errors import UsageError, some_names
from vbm_ptm.report.live_view import RunState, Snapshot, duration
from vbm_ptm.report.run_progress import RunProgress
from vbm_ptm.storage.locking import is_held
from vbm_ptm.storage.log_reader import LogReader

# Seconds without a new line after which to ask whether the process is alive, and over which to take a rate.
_QUIET = 10.0
_WINDOW = 60.0

_GO_ON = "It can be resumed"


class RunWatcher:
    """Looks at a run repeatedly.

    Args:
        path: The run directory, which need not exist yet.
        clock: Returns seconds since the epoch, like the times of files.

    Raises:
        UsageError: The path is something other than a run.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._reader = LogReader(path / "log.jsonl")
        self._progress = RunProgress()
        self._num_restarts = 0
        self._title = str(path)
        self._observed: deque[tuple[float, int]] = deque()
        self._check()

    def look(self, *, is_thorough: bool = False) -> Snapshot:
        """Read what is new; return how far the run is and whether it is progressing.

        Args:
            is_thorough: Ask whether its process is alive even if the log has just grown.

        Raises:
            UsageError: What is there now is not a run.
        """
        self._check()
        self._title = _title(self.path) if self._title == str(self.path) else self._title
        now = self._clock()
        self._read(now)
        quiet = self._quiet_seconds(now)
        state, note = self._state(quiet, is_thorough=is_thorough)
        rate = self._rate() if state == "running" else None
        return Snapshot(
            self._title,
            self._progress,
            state,
            note,
            rate or self._progress.images_per_second,
            quiet,
        )

    def _check(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; give the run directory.")
        if not self.path.is_dir() or (self.path / "config.yaml").is_file():
            return
        names = {file.name for file in self.path.iterdir()}
        inside = sorted(str(file.parent) for file in self.path.glob("*/*/config.yaml"))
        inside = inside or sorted(str(file.parent) for file in self.path.glob("*/config.yaml"))
        if inside:
            raise UsageError(
                f"{self.path} holds several runs; give one of them: {some_names(inside, limit=5)}."
            )
        if names - {".lock", ".config.yaml.partial"}:
            raise UsageError(f"{self.path} is not a run directory: it has no config.yaml.")

    def _read(self, now: float) -> None:
        events = self._reader.read()
        if events and self._reader.num_restarts != self._num_restarts:
            self._num_restarts = self._reader.num_restarts
            self._progress = RunProgress()
            self._observed.clear()
        if events or not self._observed:
            self._progress.add(events)
            self._observed.append((now, self._progress.num_images))
        while self._observed[-1][0] - self._observed[0][0] > _WINDOW:
            self._observed.popleft()

    def _rate(self) -> float | None:
        """Return the images per second since watching began, or over the last minute; None if nothing was seen."""
        (began, before), (ended, after) = self._observed[0], self._observed[-1]
        return (after - before) / (ended - began) if after > before and ended > began else None

    def _quiet_seconds(self, now: float) -> float | None:
        try:
            return max(0.0, now - self._reader.path.stat().st_mtime)
        except OSError:
            return None

    def _state(self, quiet: float | None, *, is_thorough: bool) -> tuple[RunState, str]:
        if self._progress.is_complete:
            return "finished", ""
        if quiet is not None and quiet < _QUIET and not is_thorough:
            return "running", ""
        lock = self.path / ".lock"
        is_alive = is_held(lock)
        status = _json(self.path / "result.json").get("status")
        if is_alive is False:
            if status == "finished":
                return "finished", ""
            if quiet is None and self._reader.num_restarts:
                return "failed", (
                    "The run ended with an error before it kept anything, and its log is gone. Nothing of it can be "
                    "resumed; it can be started again."
                )
            if quiet is None:
                what = "no log yet" if self.path.exists() else "nothing there yet"
                return "not begun", f"{self.path}: {what}; waiting for a run that writes there."
            if status in ("interrupted", "failed"):
                how = "was stopped and has saved itself" if status == "interrupted" else "ended with an error"
                return ("stopped" if status == "interrupted" else "failed"), f"The run {how}. {_GO_ON}."
            return "dead", (
                f"No process is working on it: process {_holder(lock)} ended without a result within the "
                f"last {duration(quiet)} (killed, out of memory, power cut). {_GO_ON}."
            )
        if quiet is None:
            return "not begun", "A process has begun; its log is not there yet."
        if quiet < _QUIET:
            return "running", ""
        if is_alive:
            return "quiet", (
                f"No new line for {duration(quiet)}, but process {_holder(lock)} is alive: steps are logged every "
                "trainer.log_every of them, and the end of a task and its evaluation log nothing until they are done."
            )
        return "quiet", (
            f"No new line for {duration(quiet)}. This file system cannot tell whether process {_holder(lock)} is "
            f"alive: look for it where it was started. If it is gone, the run can be resumed."
        )


def _title(path: Path) -> str:
    """Return the directory, with what its configuration says about the run, as far as it can be read."""
    try:
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        learner, dataset = config["learner"]["name"], config["dataset"]["name"]
        num_views, seed = config["view_batch"]["num_views"], config["seed"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return str(path)
    views = "1 view" if num_views == 1 else f"{num_views} views"
    return f"{path} · {learner} on {dataset}, {views}, seed {seed}"


def _json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _holder(lock: Path) -> str:
    try:
        return lock.read_text().strip() or "(number unknown)"
    except OSError:
        return "(number unknown)"
