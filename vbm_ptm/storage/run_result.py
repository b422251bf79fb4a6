"""What ``result.json`` holds: the outcome of a run and all that it depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from vbm_ptm.backbones import WeightsRecord
from vbm_ptm.data.record import DataRecord, Record, TransformsRecord
from vbm_ptm.errors import UsageError
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.storage.task_record import TaskFacts, TaskTimings

RESULT_VERSION = 1

Status = Literal["finished", "interrupted", "failed"]


class ExtensionRecord(Record):
    """Which run was extended.

    Attributes:
        run: Its directory.
        num_earlier_tasks: Number of tasks that it learned.
        not_measured: What is therefore unknown, in words.
    """

    run: str
    num_earlier_tasks: int
    not_measured: str


class Timings(Record):
    """How long a run took.

    Attributes:
        total_seconds: Time of the last sitting, including reading and building.
        tasks: Times of each task, over all sittings.
    """

    total_seconds: float
    tasks: tuple[TaskTimings, ...]


class RunResult(Record):
    """The outcome of a run.

    Attributes:
        version: Version of this layout.
        status: How the last sitting ended.
        learner: Name of the learner.
        dataset: Name of the data set.
        num_views: V.
        images_per_step: Images of a full step, over all ranks.
        groups_per_step: Samples of a full step, over all ranks.
        seed: Training seed.
        class_order_seed: Seed of the class order.
        metrics: The numbers that papers report, for readers; code takes them from ``matrix``.
        accuracy_counts: The counts that ``matrix`` is made from.
        class_names: Names by class index.
        tasks: Names of each task's new classes.
        domains: Names of the domains, in order, in the domain-incremental scenario.
        task_records: What each finished task took and gave.
        num_images: Views in all training steps.
        num_steps: Optimizer steps.
        weights: The pre-trained weights; None for a backbone that the caller made.
        extends: The run that was extended, if any.
        dataset_settings: What the data set's name refers to: the file of its settings, or the path that was given;
            ``data`` says where its images were found.
        split_sha256: Hash of which image is in which split and class.
        data: What was found in the data set.
        transforms: What images go through, in words.
        config: The whole configuration.
        versions: Versions of this package, Python and the libraries.
        num_ranks: Processes that trained together.
        device: Device of rank 0.
        num_threads: PyTorch's threads on the CPU.
        timings: What a second run would not reproduce.
    """

    version: int
    status: Status
    learner: str
    dataset: str
    num_views: int
    images_per_step: int
    groups_per_step: int
    seed: int
    class_order_seed: int
    metrics: dict[str, Any]
    accuracy_counts: dict[str, Any]
    class_names: tuple[str, ...]
    tasks: tuple[tuple[str, ...], ...]
    domains: tuple[str, ...] = ()
    task_records: tuple[TaskFacts, ...]
    num_images: int
    num_steps: int
    weights: WeightsRecord | None
    extends: ExtensionRecord | None = None
    dataset_settings: str = ""
    split_sha256: str
    data: DataRecord
    transforms: TransformsRecord
    config: dict[str, Any]
    versions: dict[str, str]
    num_ranks: int
    device: str
    num_threads: int
    timings: Timings

    @property
    def is_finished(self) -> bool:
        """Whether all tasks have been trained and measured."""
        return self.status == "finished"

    @property
    def matrix(self) -> AccuracyMatrix:
        """All accuracies."""
        return AccuracyMatrix.from_dict(self.accuracy_counts)

    @property
    def task_seconds(self) -> float:
        """Times of the tasks, over all sittings."""
        return sum(task.seconds for task in self.timings.tasks)


def read_result(file: Path) -> RunResult:
    """Read a result.

    Raises:
        UsageError: It is damaged, or of an unknown version.
    """
    try:
        values = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise _damage(file, str(error)) from error
    if values.get("version") != RESULT_VERSION:
        raise UsageError(
            f"{file} has format version {values.get('version')}; this version of vbm_ptm reads version "
            f"{RESULT_VERSION}."
        )
    try:
        return RunResult.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _damage(file, f"{where}: {first['msg']}") from error


def _damage(file: Path, what: str) -> UsageError:
    return UsageError(
        f"{file} is damaged ({what}); remove it, and the run will write it again when it is resumed."
    )
