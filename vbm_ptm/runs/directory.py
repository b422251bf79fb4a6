"""The folder of one run.

config.yaml    the whole configuration as last started, ready to be run again
result.json    the outcome, and all that it depends on
log.jsonl      one line per step, task and evaluation
checkpoints/   see vbm_ptm.storage.checkpoint
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from vbm_ptm.config.run_config import RunConfig, override, stored_config
from vbm_ptm.config.tree import change_lines, changes, is_within, read_yaml
from vbm_ptm.data.reading.datasets import split_lists_of
from vbm_ptm.errors import TrainingInterrupted, UsageError, some_lines
from vbm_ptm.storage.checkpoint import Checkpoint, CheckpointStore
from vbm_ptm.storage.durable_files import remove_partials, write_file
from vbm_ptm.storage.locking import LockedElsewhereError, sole_holder
from vbm_ptm.storage.log_reader import LogReader
from vbm_ptm.storage.run_result import RunResult, read_result

# Settings that change how a run works but not what it computes: they may differ when it is resumed.
FREE_ON_RESUME = (
    *("data", "checkpoint", "device", "dataset.verify", "backbone.gradient_checkpointing"),
    *("trainer.log_every", "trainer.trackers", "trainer.rank_timeout_minutes", "trainer.stop_signals"),
    "dataset.row_names",  # a run keeps its own
)

# Settings that say where things are; a result holds their hashes.
PLACES = ("dataset.path", "backbone.checkpoint")
LISTS = ("dataset.split_file", "dataset.train_list", "dataset.test_list")

# Settings of a stored run that may be replaced when it is used.
FREE_IN_USE = (*PLACES, *LISTS, "dataset.verify", "data", "device")

_PARTIAL_CHECKPOINTS = ".checkpoints.partial"
_NO_RUN_YET = {".lock", ".config.yaml.partial"}
_BEGUN = {"config.yaml", "log.jsonl", "result.json"}

# The folder that TensorBoard writes in, called as Accelerate calls the project, and what its files are called.
_TENSORBOARD = "vbm_ptm"
_OF_TENSORBOARD = ("events.out.tfevents.*", "hparams.yml")

# Seconds for which someone who asks whether a run is alive may hold its lock.
_GLANCE = 0.5


# The stored and the given value, by dotted path.
Changes = dict[str, tuple[Any, Any]]


class RunDirectory:
    """The folder of one run, with one writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._copies: set[Path] = set()

    def config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """Read the configuration that the run was started with.

        Args:
            overrides: Items ``path.to.setting=value`` for what has moved or is to be computed differently.

        Raises:
            UsageError: There is none, it is invalid, or an item would make it another run.
        """
        file = self._require_config()
        tree = read_yaml(file)
        if not {"dataset", "learner"} <= tree.keys():
            raise UsageError(
                f"{file} is damaged: it lacks the data set or the learner. result.json has the same under 'config'."
            )
        composed = stored_config(tree, str(file))
        for item in overrides:
            if not is_within(item.partition("=")[0].strip(), FREE_IN_USE):
                raise UsageError(
                    f"{item}: the run is finished. Only where its files are and how it computes may "
                    f"change: {', '.join(FREE_IN_USE)}."
                )
            composed.merge(override(item), f"override {item}")
        return composed.validate()

    def kept(self, config: RunConfig) -> RunConfig:
        """Return a configuration with the precision and row names that the run, if there is one, was started with."""
        if not (self.path / "config.yaml").is_file():
            return config
        stored = self.config()
        if config.trainer.mixed_precision == "auto":
            config = config.with_precision(stored.trainer.mixed_precision)
        dataset = config.dataset.model_copy(update={"row_names": stored.dataset.row_names})
        return config.model_copy(update={"dataset": dataset})

    def result(self) -> RunResult | None:
        """Read ``result.json`` if there is one.

        Raises:
            UsageError: It is damaged, or of an unknown version.
        """
        file = self.path / "result.json"
        return read_result(file) if file.is_file() else None

    def finished_result(self, config: RunConfig) -> RunResult | None:
        """Read the result of a run with this configuration, if there is one and it is finished.

        Images, weights and lists of the same content may be in other places: the result holds their hashes.

        Raises:
            UsageError: The directory belongs to another configuration.
        """
        result = self.result()
        if result is None or not result.is_finished:
            return None
        changed = self._changes(config, free=(*FREE_ON_RESUME, *PLACES))
        if any(is_within(key, LISTS) for key in changed) and _has_lists_of(config, result):
            changed = {key: values for key, values in changed.items() if not is_within(key, LISTS)}
        self._refuse(changed)
        return result

    def checkpoint(self, task: int | None = None) -> Checkpoint:
        """Read the checkpoint of a task, or the newest one.

        Args:
            task: Index of the task, from 0; messages count from 1, as the command line does.

        Raises:
            UsageError: There is none, or none for that task.
        """
        self._require_config()
        store = CheckpointStore(self.path / "checkpoints")
        there = store.tasks()
        if there and task is not None and task not in there:
            raise UsageError(
                f"{self.path} has no checkpoint of task {task + 1}; "
                f"there is one of task {', '.join(str(index + 1) for index in there)} (checkpoint.keep=all keeps all)."
            )
        checkpoint = store.read(task)
        if checkpoint is None:
            raise UsageError(f"{self.path} has no finished task yet; train at least one.")
        return checkpoint

    def check(self, config: RunConfig, *, resume: bool) -> None:
        """Make sure that a run with this configuration may use the directory.

        Raises:
            UsageError: It exists without ``resume``, holds something else, or belongs to another configuration.
        """
        nearest = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not nearest.is_dir():
            where = "is" if nearest == self.path else f"lies below {nearest}, which is"
            raise UsageError(f"{self.path} {where} a file; give a folder that does not exist yet.")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise UsageError(f"{self.path}: no permission to write in {nearest}.")
        if nearest != self.path or {file.name for file in self.path.iterdir()} <= _NO_RUN_YET:
            return
        if not (self.path / "config.yaml").exists():
            raise UsageError(f"{self.path} exists and is not empty; give a folder that does not exist yet.")
        # Whether images and weights are the same is checked once they are loaded.
        changed = self._changes(config, free=(*FREE_ON_RESUME, *(PLACES if resume else ())))
        if changed and not resume:
            raise UsageError(
                f"{self.path} exists already, with other settings (stored against given): "
                f"{some_lines(change_lines(changed))}. Give this run a folder of its own."
            )
        if not resume:
            raise UsageError(
                f"{self.path} exists already: resume it, or give another folder.", advice="resume_or_output"
            )
        self._refuse(changed)

    @contextmanager
    def claimed(self, config: RunConfig, *, resume: bool) -> Iterator[None]:
        """Hold the directory as its only writer; the configuration is written if it is new.

        A run that fails before anything of it is kept, as with a learner that breaks the contract, takes back the files
        and folders that it made: once mended, it begins with the same command.

        Raises:
            UsageError: Another process holds it, or it has changed since ``check``.
        """
        folders = dict.fromkeys(Path(os.path.realpath(each)) for each in (self.path, *self.path.parents))
        made = [folder for folder in folders if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be made: {error.strerror}.") from error
        what = f"{self.path} from a second run that writes there"
        try:
            with sole_holder(self.path / ".lock", what=what, patience=_GLANCE):
                self.check(config, resume=resume)
                remove_partials(self.path)
                is_new = not (self.path / "config.yaml").exists()
                if is_new:
                    self.write_config(config)
                try:
                    yield
                except Exception as error:
                    if is_new and not isinstance(error, TrainingInterrupted):
                        self._take_back(made, config)
                    raise
        except LockedElsewhereError as error:
            raise UsageError(
                f"{self.path} is in use by another run; wait for it or give another folder."
            ) from error

    def write_config(self, config: RunConfig) -> None:
        """Write the configuration as a whole or not at all: half of one, from a full disk, could not be resumed."""
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_file(self.path / "config.yaml", text.encode())

    def carry_over(self, source: RunDirectory) -> None:
        """Copy the checkpoints and the log of the run that is extended, unless they are already here.

        The extension stays usable when that run is gone, and that run is left as it was.
        """
        if (self.path / "checkpoints").exists():
            return
        with suppress(FileNotFoundError):  # that it is lost is said when it is opened
            shutil.copyfile(source.path / "log.jsonl", self.path / "log.jsonl")
        partial = self.path / _PARTIAL_CHECKPOINTS
        shutil.rmtree(partial, ignore_errors=True)
        checkpoints = source.path / "checkpoints"
        try:
            for file in checkpoints.rglob("*"):
                name = file.relative_to(checkpoints)
                if file.is_file() and not name.parts[0].startswith(("last_", ".")):
                    (partial / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, partial / name)
                    self._copies.add(self.path / "checkpoints" / name)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)  # frees its space if the disk is full
            raise
        partial.rename(self.path / "checkpoints")

    def _take_back(self, made: Sequence[Path], config: RunConfig) -> None:
        """Remove the files of a run that has kept nothing, and the folders made for it; leave what is not its own.

        Args:
            made: The folders, inner ones first.
            config: That of the run.
        """
        checkpoints, tensorboard = self.path / "checkpoints", self.path / _TENSORBOARD
        parts = [checkpoints, tensorboard] if "tensorboard" in config.trainer.trackers else [checkpoints]
        first_task = config.scenario.num_earlier_tasks or 0  # earlier steps are those of the extended run
        with suppress(OSError):  # no error masks the one that is raised; a folder that is not empty stays
            events = LogReader(self.path / "log.jsonl").read()
            others = {*self.path.iterdir()} - {self.path / name for name in _NO_RUN_YET | _BEGUN} - {*parts}
            written = {file for name in _OF_TENSORBOARD for file in tensorboard.rglob(name)} | self._copies
            others |= {file for part in parts for file in part.rglob("*") if not file.is_dir()} - written
            if others or any(
                event["event"] == "step" and event.get("task", first_task) >= first_task for event in events
            ):
                return
            for part in filter(Path.exists, parts):
                shutil.rmtree(part)
            for name in (*sorted(_BEGUN, reverse=True), *(sorted(_NO_RUN_YET) if made else ())):
                (self.path / name).unlink(missing_ok=True)
            for folder in made:
                folder.rmdir()

    def _require_config(self) -> Path:
        file = self.path / "config.yaml"
        if not file.is_file():
            raise UsageError(f"{self.path} is not a run directory: it has no config.yaml.")
        return file

    def check_same_run(self, stored: Mapping[str, Any], config: RunConfig, *, what: str) -> None:
        """Make sure that a part of the directory belongs to a run with this configuration.

        Args:
            stored: The configuration that it was written with, as JSON values.
            config: That of the run.
            what: The part, for the message.

        Raises:
            UsageError: It belongs to another run.
        """
        own = stored_config(stored, what).validate()
        changed = _changes_between(own, config, free=(*FREE_ON_RESUME, *PLACES))
        if changed:
            raise UsageError(
                f"{what} belongs to another run with another configuration (stored against given): "
                f"{some_lines(change_lines(changed))}.",
                advice="skip_damaged",
            )

    def _changes(self, config: RunConfig, *, free: tuple[str, ...]) -> Changes:
        return _changes_between(self.config(), config, free=free)

    def _refuse(self, changed: Changes) -> None:
        if changed:
            raise UsageError(
                f"{self.path} was started with another configuration (stored against given): "
                f"{some_lines(change_lines(changed))}. "
                f"Resume with the stored settings ({self.path / 'config.yaml'}), or give another folder.",
                advice="stored_settings",
            )


def _has_lists_of(config: RunConfig, result: RunResult) -> bool:
    """Return whether the lists of a configuration exist and are, byte for byte, those that a result was made with."""
    try:
        lists = split_lists_of(config.dataset).record
    except UsageError:
        return False
    return [(each.split, each.sha256) for each in lists] == [
        (each.split, each.sha256) for each in result.data.lists
    ]


def _changes_between(stored: RunConfig, config: RunConfig, *, free: tuple[str, ...]) -> Changes:
    """Return the settings that differ but must not; "auto" matches whatever the run has chosen."""
    if config.trainer.mixed_precision == "auto":
        config = config.with_precision(stored.trainer.mixed_precision)
    changed = changes(stored.model_dump(mode="json"), config.model_dump(mode="json"))
    return {key: values for key, values in changed.items() if not is_within(key, free)}
