"""Checkpoints: directories of safetensors and JSON that exist as a whole or not at all.

    checkpoints/task_02/                        after a task:
        learner.safetensors                     state dict without statistics and unchanged backbone weights
        state.json                              what rebuilds the learner, the counts so far, the configuration
        SHA256SUMS                              of all files that belong to it, as read by sha256sum -c
    checkpoints/last_000123/                    inside a task, after this many steps of the run: the same, and
        optimizer.safetensors                   the optimizer's averages; none is needed at the end of training
    checkpoints/statistics/task_00.safetensors  what a task left behind for good, written once

safetensors files carry no metadata, whose order is random: equal tensors give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import TrainingError, UsageError, some_names
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded
from vbm_ptm.settings import Settings
from vbm_ptm.storage.checkpoint_state import FORMAT_VERSION, READABLE_VERSIONS, CheckpointState, RunState
from vbm_ptm.storage.durable_files import (
    as_json,
    remove_directory,
    remove_partials,
    write_directory,
    write_file,
)
from vbm_ptm.storage.save_schedule import check_interval
from vbm_ptm.storage.tensor_prints import combined, fingerprints

logger = logging.getLogger(__name__)

_LEARNER, _OPTIMIZER, _STATE, _SUMS = (
    "learner.safetensors",
    "optimizer.safetensors",
    "state.json",
    "SHA256SUMS",
)


class CheckpointConfig(Settings):
    """Which checkpoints are written, and which are kept.

    Attributes:
        keep: "all"; "last" (the newest two); "auto": all if the backbone is frozen, as they are small then.
        every: When to save inside a task: "task" (only at the end of its training), "epoch" (at the end of an epoch,
            but never so often that it would slow training down), "10 minutes", "50 steps".
    """

    keep: Literal["auto", "all", "last"] = "auto"
    every: Annotated[str, AfterValidator(check_interval)] = "epoch"


@dataclass(frozen=True)
class Checkpoint:
    """A finished task, or a position inside a task, on disk.

    Attributes:
        path: The directory.
        state: What ``state.json`` holds.
        digests: SHA-256 of every file, by its name relative to ``checkpoints``.
    """

    path: Path
    state: CheckpointState
    digests: dict[str, str]

    @property
    def task_index(self) -> int:
        """The task after which, or inside which, it was written, counted from 0."""
        return self.state.task_index

    @property
    def is_finished(self) -> bool:
        """Whether that task is finished."""
        return self.state.num_finished > self.task_index

    def verify(self) -> None:
        """Make sure that every file is as it was written.

        Raises:
            UsageError: One is missing or damaged.
        """
        for name in self.digests:
            self._content(name)
        known = {Path(name).name for name in self.digests} | {_SUMS}
        strange = sorted({file.name for file in self.path.iterdir()} - known)
        if strange:
            logger.warning(
                "%s holds files that are not part of the checkpoint; they are not read: %s",
                self.path,
                strange,
            )

    def tensors(self) -> dict[str, Tensor]:
        """Read and verify the learner's tensors.

        Raises:
            UsageError: A file is missing or damaged.
        """
        tensors: dict[str, Tensor] = {}
        for name in self.digests:
            if Path(name).name not in (_STATE, _OPTIMIZER):
                tensors |= tensors_from_bytes(self._content(name))
        return tensors

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Read and verify the optimizer's state; empty after the end of training."""
        name = f"{self.path.name}/{_OPTIMIZER}"
        return tensors_from_bytes(self._content(name)) if name in self.digests else {}

    def _content(self, name: str) -> bytes:
        return _verified(self.path.parent / name, self.digests[name])


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: ``checkpoints`` in the run directory.
        keep: See ``CheckpointConfig``.
        config: The run's configuration as JSON values, repeated in every checkpoint.
        fresh: The run's learner before its first task. What its backbone was loaded with and still has is left out
            of checkpoints; None to store everything.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: Literal["auto", "all", "last"] = "auto",
        config: Mapping[str, Any] | None = None,
        fresh: Learner | None = None,
    ) -> None:
        self.directory = directory
        self.keep = keep
        self.config = dict(config or {})
        self._statistics: dict[str, str] = {}
        self._has_written = False
        self._loaded = fingerprints(_of_backbone(fresh.state_dict())) if fresh else {}

    def save(self, learner: Learner, state: RunState) -> Checkpoint:
        """Write the checkpoint of the task that the learner has just finished.

        Args:
            learner: After ``end_task``.
            state: What else the run needs to be resumed.
        """
        index = learner.task.index
        checkpoint = self._write(self._task_path(index), learner, state, num_finished=index + 1)
        for path in self._inside_tasks():
            remove_directory(path)
        if self.keep == "last" or (self.keep == "auto" and not learner.backbone_is_frozen):
            for old in self.tasks()[:-2]:
                remove_directory(self._task_path(old))
        return checkpoint

    def save_inside_task(
        self, learner: Learner, state: RunState, *, num_steps: int, optimizer: Mapping[str, Tensor]
    ) -> None:
        """Write the checkpoint of a position inside a task, and keep the previous one.

        Args:
            learner: Between two steps.
            state: What else the run needs to be resumed.
            num_steps: Steps of the run so far.
            optimizer: The optimizer's state; empty at the end of training.
        """
        path = self.directory / f"last_{num_steps:06d}"
        if not path.exists():
            self._write(path, learner, state, num_finished=learner.task.index, optimizer=optimizer)
        for old in self._inside_tasks()[:-2]:
            remove_directory(old)

    def tasks(self) -> list[int]:
        """Return the indices of the finished tasks that have a checkpoint, in order."""
        found = (re.fullmatch(r"task_(\d+)", path.name) for path in self.directory.glob("task_*"))
        return sorted(int(match[1]) for match in found if match)

    def read(self, task_index: int | None = None) -> Checkpoint | None:
        """Return the checkpoint of a finished task, or the newest one; None if there is none at all.

        Raises:
            UsageError: That task has no checkpoint, or its state cannot be read.
        """
        tasks = self.tasks()
        if not tasks:
            return None
        index = tasks[-1] if task_index is None else task_index
        if index not in tasks:
            there = ", ".join(str(each + 1) for each in tasks)
            raise UsageError(f"no checkpoint of task {index + 1} in {self.directory}. There are: {there}.")
        return read_checkpoint(self._task_path(index))

    def newest_first(self) -> list[Path]:
        """Return all checkpoints; those whose place in the run is unknown come first."""

        def age(path: Path) -> tuple[float, bool]:
            try:
                return -read_checkpoint(path).task_index, path.name.startswith("last_")
            except UsageError:
                return -float("inf"), False

        tasks = [self._task_path(index) for index in reversed(self.tasks())]
        return sorted([*reversed(self._inside_tasks()), *tasks], key=age)

    def go_on_from(self, chosen: Checkpoint | None) -> None:
        """Remove what a run that resumes from ``chosen`` does not need: half-written files and later checkpoints."""
        remove_partials(self.directory)
        remove_partials(self.directory / "statistics")
        if chosen is None:
            return
        self._statistics = {
            name: digest for name, digest in chosen.digests.items() if name.startswith("statistics/")
        }
        paths = self.newest_first()
        for path in paths[: paths.index(chosen.path)]:
            logger.warning(
                "removing %s, which is newer than the checkpoint that the run continues from", path
            )
            remove_directory(path)
        if chosen.is_finished:  # those inside its task
            for path in self._inside_tasks():
                remove_directory(path)

    def _write(
        self,
        path: Path,
        learner: Learner,
        state: RunState,
        *,
        num_finished: int,
        optimizer: Mapping[str, Tensor] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint of a learner that has finished this many tasks; their statistics are written once."""
        self._refuse_loss()
        tensors = _stored(learner.state_dict())
        now = fingerprints(_of_backbone(tensors)) if self._loaded else {}
        left_out = {name: digest for name, digest in now.items() if self._loaded.get(name) == digest}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
        finished = {name: tensors.pop(name) for name in list(tensors) if name.startswith("statistics.")}
        index = learner.task.index
        newest = {name: value for name, value in finished.items() if name.startswith(f"statistics.{index}.")}
        if newest:
            name = f"statistics/task_{index:02d}.safetensors"
            content = tensors_to_bytes(newest)
            write_file(self.directory / name, content)
            self._statistics[name] = _digest(content)
        files = {_LEARNER: tensors_to_bytes(tensors)}
        if optimizer:
            files[_OPTIMIZER] = tensors_to_bytes(_stored(optimizer))
        digests = self._statistics | {f"{path.name}/{name}": _digest(part) for name, part in files.items()}
        whole = CheckpointState(
            format_version=FORMAT_VERSION,
            task_index=index,
            weights_sha256=learner.backbone.weights.sha256 if learner.backbone.weights else None,
            left_out_sha256=combined(left_out) if left_out else None,
            num_finished=num_finished,
            files=tuple(sorted(digests)),
            config=self.config,
            **{name: getattr(state, name) for name in state.model_fields_set},
        )
        files[_STATE] = as_json(whole.to_json())
        digests[f"{path.name}/{_STATE}"] = _digest(files[_STATE])
        files[_SUMS] = _sums(digests, path.name)
        write_directory(path, files)
        self._has_written = True
        return Checkpoint(path, whole, digests)

    def _refuse_loss(self) -> None:
        """Raise if what the run wrote earlier is gone: its folder was removed, or another one was mounted."""
        lost = [name for name in self._statistics if not (self.directory / name).is_file()]
        if lost or (self._has_written and not self.directory.is_dir()):
            raise TrainingError(
                f"{self.directory} has lost what this run wrote there earlier"
                + f" ({some_names(lost, limit=3)})" * bool(lost)
                + ": its folder was removed while it was running. Start it again in another folder."
            )

    def _task_path(self, index: int) -> Path:
        return self.directory / f"task_{index:02d}"

    def _inside_tasks(self) -> list[Path]:
        """Return the checkpoints inside tasks, oldest first."""
        found = [path for path in self.directory.glob("last_*") if re.fullmatch(r"last_\d+", path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("last_")))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the state of a checkpoint, but not its tensors.

    Raises:
        UsageError: It is damaged, or of another format.
    """
    content, sums = (file.read_bytes() if file.is_file() else b"" for file in (path / _STATE, path / _SUMS))
    digests = _digests(sums, path.name)
    if not sums or _digest(content) == digests.get(f"{path.name}/{_STATE}"):
        version = _format_version(content)
        if version not in (None, *READABLE_VERSIONS):
            raise UsageError(
                f"checkpoint {path} has format version {version}; "
                f"this version of vbm_ptm reads versions {', '.join(map(str, READABLE_VERSIONS))}."
            )
    if not sums or sums != _sums(digests, path.name):
        raise _damage(path / _SUMS, "damaged" if sums else "missing or empty")
    _verified(path / _STATE, digests.get(f"{path.name}/{_STATE}"))
    state = CheckpointState.model_validate_json(content)
    if set(digests) != {f"{path.name}/{_STATE}", *state.files}:
        raise _damage(path / _SUMS, "damaged")
    return Checkpoint(path, state, digests)


def restore(learner: Learner, checkpoint: Checkpoint) -> None:
    """Bring a fresh learner into the state of a checkpoint: grow it task by task, then load tensors strictly.

    Raises:
        UsageError: The backbone's weights are not those that the checkpoint was made with.
    """
    weights, recorded = learner.backbone.weights, checkpoint.state.weights_sha256
    given = weights.sha256 if weights else None
    if given != recorded:
        raise UsageError(
            f"{checkpoint.path} was made with pre-trained weights of SHA-256 {recorded}, but {given} is loaded. "
            "Give the same file as backbone.checkpoint."
        )
    tensors = checkpoint.tensors()
    _complete(tensors, learner, checkpoint)
    tasks, num_finished = checkpoint.state.tasks, checkpoint.state.num_finished
    with seeded(0):  # initial values are drawn, though overwritten afterwards
        grow(learner, tasks[:num_finished], tensors)
        if not checkpoint.is_finished:
            learner.begin_task(tasks[num_finished])
    learner.load_state_dict(tensors)


def _complete(tensors: dict[str, Tensor], learner: Learner, checkpoint: Checkpoint) -> None:
    """Add the backbone's tensors that a checkpoint leaves out, from a fresh learner."""
    state = checkpoint.state
    is_partial = state.left_out_sha256 is not None or state.format_version < 6
    own = {name: tensor for name, tensor in _of_backbone(learner.state_dict()).items() if name not in tensors}
    if not own or not is_partial:
        return
    if state.left_out_sha256 not in (None, combined(fingerprints(own))):
        raise UsageError(
            f"{checkpoint.path} leaves out what the backbone was loaded with, and this version of the program or of "
            "its libraries makes other tensors from the same weights. Use the versions that result.json names."
        )
    tensors |= {name: tensor.clone() for name, tensor in own.items()}


def grow(learner: Learner, tasks: Sequence[Task], tensors: Mapping[str, Tensor]) -> None:
    """Make room in a fresh learner for what it keeps from finished tasks, so that a strict load fits.

    Args:
        learner: A learner that has not begun any task.
        tasks: The finished tasks.
        tensors: What will be loaded.
    """
    for task in tasks:
        prefix = f"statistics.{task.index}."
        learner.begin_task(task)
        learner.allocate(
            task,
            {
                name.removeprefix(prefix): tuple(tensor.shape)
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            },
        )


def _of_backbone(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("backbone.")}


def _stored(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _sums(digests: Mapping[str, str], directory: str) -> bytes:
    """Return the text that sha256sum -c reads in a directory."""
    names = ((os.path.relpath(name, directory), digest) for name, digest in sorted(digests.items()))
    return "".join(f"{digest}  {name}\n" for name, digest in names).encode()


def _digests(sums: bytes, directory: str) -> dict[str, str]:
    """Parse what ``_sums`` returns, as far as it can be read."""
    lines = re.findall(r"^([0-9a-f]{64})  (\S+)$", sums.decode(errors="replace"), flags=re.MULTILINE)
    return {os.path.normpath(os.path.join(directory, name)): digest for digest, name in lines}


def _format_version(content: bytes) -> Any:
    try:
        return dict(json.loads(content)).get("format_version", 0)
    except (ValueError, TypeError):
        return None


def _verified(file: Path, digest: str | None) -> bytes:
    """Return the bytes of a file if they are what was written."""
    content = file.read_bytes() if file.is_file() else b""
    if _digest(content) != digest:
        raise _damage(file, "damaged" if content else "missing or empty")
    return content


def _damage(file: Path, what: str) -> UsageError:
    return UsageError(
        f"checkpoint file {file} is {what}"
        + f" (its SHA-256 is not the one in {_SUMS})" * (file.name != _SUMS)
        + ".",
        advice="skip_damaged",
    )
