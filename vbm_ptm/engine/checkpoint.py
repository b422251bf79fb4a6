"""Checkpoints after each task: a directory of safetensors and JSON that is there as a whole or not at all.

    checkpoints/task_02/learner.safetensors     state dict without the frozen backbone and the statistics
    checkpoints/task_02/state.json              what rebuilds the learner, the counts so far, hashes of all files
    checkpoints/statistics/task_00.safetensors  what a task left behind for good, written once

A directory is written under a temporary name, its files and its parent are fsynced, then it is renamed to a name
that was not there. safetensors files carry no metadata, whose order is random: equal tensors give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
from torch import Tensor

from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded
from vbm_ptm.settings import Settings

FORMAT_VERSION = 3


class CheckpointConfig(Settings):
    """Which checkpoints stay.

    Attributes:
        keep: "all"; "last" (the newest two); "auto": all when the backbone is frozen, so that they are small.
    """

    keep: Literal["auto", "all", "last"] = "auto"


@dataclass(frozen=True)
class Checkpoint:
    """A finished task on disk."""

    path: Path
    state: dict[str, Any]

    @property
    def task_index(self) -> int:
        """The task after which it was written, counted from 0."""
        return int(self.state["task_index"])

    def tensors(self) -> dict[str, Tensor]:
        """Read and verify all tensors.

        Raises:
            UsageError: A file is missing or its SHA-256 is not the recorded one.
        """
        tensors: dict[str, Tensor] = {}
        for name, digest in self.state["files"].items():
            file = self.path.parent / name
            content = file.read_bytes() if file.is_file() else b""
            if hashlib.sha256(content).hexdigest() != digest:
                raise UsageError(
                    f"checkpoint file {file} is {'damaged' if content else 'missing or empty'} (SHA-256 differs "
                    f"from the recorded one). Remove {self.path} to go on from the task before, or start anew."
                )
            tensors |= safetensors.torch.load(content)
        return tensors


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        directory: ``checkpoints`` in the run directory.
        keep: See ``CheckpointConfig``.
    """

    def __init__(self, directory: Path, *, keep: Literal["auto", "all", "last"] = "auto") -> None:
        self.directory = directory
        self.keep = keep

    def save(self, learner: Learner, state: Mapping[str, Any]) -> Checkpoint:
        """Write the checkpoint of the task that the learner has just finished.

        Args:
            learner: After ``end_task``.
            state: What else the run needs to go on, as JSON values.
        """
        index = learner.task.index
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in learner.state_dict().items()}
        if learner.backbone_is_frozen:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("backbone.")}
        previous = self.read(index - 1) if index > 0 else None
        digests = {
            name: digest for name, digest in _files(previous).items() if name.startswith("statistics/")
        }
        finished = {name: tensors.pop(name) for name in list(tensors) if name.startswith("statistics.")}
        newest = {name: value for name, value in finished.items() if name.startswith(f"statistics.{index}.")}
        if newest:
            name = f"statistics/task_{index:02d}.safetensors"
            content = safetensors.torch.save(newest)
            _write_file(self.directory / name, content)
            digests[name] = hashlib.sha256(content).hexdigest()
        content = safetensors.torch.save(tensors)
        digests[f"task_{index:02d}/learner.safetensors"] = hashlib.sha256(content).hexdigest()
        whole = {
            "format_version": FORMAT_VERSION,
            "task_index": index,
            "weights_sha256": learner.backbone.weights.sha256 if learner.backbone.weights else None,
            "finished_shapes": [learner.finished_shapes(task) for task in learner.tasks],
            "files": digests,
            **state,
        }
        path = self.directory / f"task_{index:02d}"
        write_directory(path, {"learner.safetensors": content, "state.json": _json(whole)})
        self._remove_old(learner)
        return Checkpoint(path, whole)

    def tasks(self) -> list[int]:
        """Return the indices of the tasks with a checkpoint, in order."""
        found = (re.fullmatch(r"task_(\d+)", path.name) for path in self.directory.glob("task_*"))
        return sorted(int(match[1]) for match in found if match)

    def read(self, task_index: int | None = None) -> Checkpoint | None:
        """Return the checkpoint of a task, or the newest one; None if there is none at all.

        Raises:
            UsageError: That task has no checkpoint, or its state cannot be read.
        """
        tasks = self.tasks()
        if not tasks:
            return None
        index = tasks[-1] if task_index is None else task_index
        if index not in tasks:
            there = ", ".join(map(str, tasks))
            raise UsageError(f"no checkpoint of task {index} in {self.directory}. There are: {there}.")
        path = self.directory / f"task_{index:02d}"
        try:
            state = dict(json.loads((path / "state.json").read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"checkpoint {path} cannot be read ({error}). Remove it to go on from before."
            ) from error
        if state.get("format_version") != FORMAT_VERSION:
            raise UsageError(
                f"checkpoint {path} has format version {state.get('format_version')}; "
                f"this version of vbm_ptm reads version {FORMAT_VERSION}."
            )
        return Checkpoint(path, state)

    def _remove_old(self, learner: Learner) -> None:
        if self.keep == "all" or (self.keep == "auto" and learner.backbone_is_frozen):
            return
        for index in self.tasks()[:-2]:
            shutil.rmtree(self.directory / f"task_{index:02d}")


def restore(learner: Learner, checkpoint: Checkpoint) -> None:
    """Bring a fresh learner into the state of a checkpoint: grow it task by task, then load strictly.

    Raises:
        UsageError: The frozen backbone's weights are not those that the checkpoint was made with.
    """
    weights, recorded = learner.backbone.weights, checkpoint.state["weights_sha256"]
    given = weights.sha256 if weights else None
    if given != recorded:
        raise UsageError(
            f"{checkpoint.path} was made with pre-trained weights of SHA-256 {recorded}, but {given} is loaded. "
            "Give the same file by backbone.checkpoint."
        )
    tensors = checkpoint.tensors()
    shapes = checkpoint.state["finished_shapes"]
    with seeded(0):  # what a task starts from is overwritten, but drawn
        grow(learner, [task_from(values) for values in checkpoint.state["tasks"][: len(shapes)]], shapes)
    if learner.backbone_is_frozen:
        tensors |= {
            name: value for name, value in learner.state_dict().items() if name.startswith("backbone.")
        }
    learner.load_state_dict(tensors)


def grow(learner: Learner, tasks: Sequence[Task], shapes: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Make room in a fresh learner for what it keeps of finished tasks, so that a strict load fits."""
    for task, kept in zip(tasks, shapes, strict=True):
        learner.begin_task(task)
        learner.allocate(task, kept)


def task_from(values: Mapping[str, Any]) -> Task:
    """Rebuild a task from JSON, where tuples have become lists."""
    return Task(
        index=values["index"],
        classes=tuple(values["classes"]),
        new_classes=tuple(values["new_classes"]),
        num_seen_classes=values["num_seen_classes"],
        domain=values["domain"],
    )


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file atomically."""
    _write_file(path, _json(value))


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _files(checkpoint: Checkpoint | None) -> dict[str, str]:
    return dict(checkpoint.state["files"]) if checkpoint else {}


def _write_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    _write_synced(partial, content)
    partial.replace(path)
    _sync_directory(path.parent)


def write_directory(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a directory that is there as a whole or not at all, in the place of one of that name."""
    partial = path.with_name(f".{path.name}.partial")
    for stale in (partial, path):
        if stale.exists():
            shutil.rmtree(stale)
    partial.mkdir(parents=True)
    for name, content in files.items():
        _write_synced(partial / name, content)
    _sync_directory(partial)
    partial.rename(path)
    _sync_directory(path.parent)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
