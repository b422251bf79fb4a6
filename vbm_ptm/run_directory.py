"""The folder of one run.

config.yaml    the whole configuration, ready to be run again
result.json    what was reached, and all that it depends on
log.jsonl      one line per step, task and evaluation
checkpoints/   see vbm_ptm.engine.checkpoint
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from vbm_ptm.config import ComposedConfig, RunConfig, differences, read_yaml
from vbm_ptm.engine.checkpoint import Checkpoint, CheckpointStore
from vbm_ptm.errors import UsageError

# Settings that change how a run works but not what it computes: they may differ when it goes on.
FREE_ON_RESUME = ("data.", "checkpoint.", "trainer.log_every", "trainer.trackers", "device")


class RunDirectory:
    """The folder of one run, with one writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def config(self) -> RunConfig:
        """Read the configuration that the run was started with."""
        file = self.path / "config.yaml"
        if not file.is_file():
            raise UsageError(f"{self.path} is no run directory: it has no config.yaml.")
        composed = ComposedConfig()
        composed.merge(read_yaml(file), str(file))
        return composed.validate()

    def result(self) -> dict[str, Any] | None:
        """Read ``result.json`` if there is one."""
        file = self.path / "result.json"
        if not file.is_file():
            return None
        result: dict[str, Any] = json.loads(file.read_text())
        return result

    def checkpoint(self, task: int | None = None) -> Checkpoint:
        """Read the checkpoint of a task, or the newest one.

        Raises:
            UsageError: There is none, or none of that task.
        """
        checkpoint = CheckpointStore(self.path / "checkpoints").read(task)
        if checkpoint is None:
            raise UsageError(f"{self.path} holds no finished task yet; train at least one.")
        return checkpoint

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Make sure that a run with this configuration may use the directory.

        Raises:
            UsageError: It exists without ``resume``, holds something else, or belongs to another configuration.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--output {self.path} is a file; give a folder that does not exist yet.")
        if not self.path.exists() or {file.name for file in self.path.iterdir()} <= {".lock"}:
            return
        if not (self.path / "config.yaml").exists():
            raise UsageError(
                f"--output {self.path} exists and is not empty; give a folder that does not exist yet."
            )
        if not resume:
            raise UsageError(
                f"--output {self.path} exists already. Go on with it by --resume, or give another folder."
            )
        self._compare(config)

    @contextmanager
    def claimed(self, config: RunConfig, *, resume: bool) -> Iterator[None]:
        """Hold the directory as its only writer; the configuration is written if it is new.

        Raises:
            UsageError: Another process holds it, or it has changed since ``check``.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{self.path} is in use by another run; wait for it or give another --output."
                ) from None
            self.check(config, resume=resume)
            if not (self.path / "config.yaml").exists():
                text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
                (self.path / "config.yaml").write_text(text, encoding="utf-8")
            yield

    def _compare(self, config: RunConfig) -> None:
        stored = self.config().model_dump(mode="json")
        lines = [
            line
            for line in differences(stored, config.model_dump(mode="json"))
            if not line.startswith(FREE_ON_RESUME)
        ]
        if lines:
            raise UsageError(
                f"{self.path} was started with another configuration (stored against given): {'; '.join(lines)}. "
                "Resume with the stored settings or give another --output."
            )
