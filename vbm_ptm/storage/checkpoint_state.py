"""What ``state.json`` of a checkpoint holds: what rebuilds the learner, the counts so far, the configuration."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from vbm_ptm.data.record import Record
from vbm_ptm.data.scenario import Task
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.storage.task_position import TaskPosition
from vbm_ptm.storage.task_record import TaskRecord

FORMAT_VERSION = 6
# Readable versions: version 5 left out a whole backbone or none of it; version 4 also listed shapes, which the files
# of tensors hold anyway.
READABLE_VERSIONS = (4, 5, FORMAT_VERSION)


class RunState(Record):
    """What a run needs, besides tensors, to be resumed or used.

    Attributes:
        class_names: Names by class index.
        split_sha256: Hash of which image is in which split and class.
        held_out: Which part of the training images was held out for testing.
        num_planned_tasks: Tasks that the learner was built for.
        tasks: Tasks of the run.
        evaluation_tasks: Tasks that accuracy is reported on.
        matrix: The counts that ``accuracies`` is made from.
        records: What each finished task took and gave.
        log_position: Bytes of ``log.jsonl`` up to this checkpoint.
        gradient_scaler: State of the fp16 scaler, if there is one.
        num_ranks: Processes that trained together.
        num_threads: PyTorch's threads on the CPU.
        training: Position in the task in progress; None at the end of a task.
    """

    class_names: tuple[str, ...]
    split_sha256: str
    held_out: str | None
    num_planned_tasks: int
    tasks: tuple[Task, ...]
    evaluation_tasks: tuple[Task, ...]
    matrix: dict[str, Any]
    records: tuple[TaskRecord, ...]
    log_position: int
    gradient_scaler: dict[str, Any] | None
    num_ranks: int
    num_threads: int
    training: TaskPosition | None = None

    @property
    def accuracies(self) -> AccuracyMatrix:
        """All accuracies so far."""
        return AccuracyMatrix.from_dict(self.matrix)


class CheckpointState(RunState):
    """The same, with what the store adds.

    Attributes:
        format_version: Version of this layout.
        task_index: The task after which, or inside which, it was written, from 0.
        weights_sha256: Hash of the pre-trained weights; None for a backbone that the caller made.
        left_out_sha256: Fingerprint of the backbone's tensors that are still as loaded and therefore not stored; None
            if none is left out, and in earlier versions.
        num_finished: Number of finished tasks.
        files: Files with tensors, relative to ``checkpoints``.
        config: The configuration of the run.
    """

    format_version: int
    task_index: int
    weights_sha256: str | None
    left_out_sha256: str | None = None
    num_finished: int
    files: tuple[str, ...]
    config: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _read_version_4(cls, values: Any) -> Any:
        if isinstance(values, dict) and "finished_shapes" in values:
            rest = {name: value for name, value in values.items() if name != "finished_shapes"}
            return rest | {"num_finished": len(values["finished_shapes"])}
        return values
