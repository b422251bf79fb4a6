"""What one task of a run took and gave, as checkpoints, logs and results keep it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """Facts that are the same each time the task is trained.

    Attributes:
        task_index: Position of the task in the run, from 0.
        num_samples: Training images of the task.
        num_views: Views of each sample in a step.
        num_steps: Optimizer steps.
        num_images: Views in these steps, over all ranks.
        num_skipped_steps: Steps that the fp16 scaler skipped.
        num_test_images: Images that accuracy was measured on, over all ranks.
        min_visits: Visits of the sample that was shown least often.
        max_visits: Visits of the sample that was shown most often.
        recall_interval: Mean and standard deviation of the images between two visits of a sample; empty if no sample
            came back.
        summed_rate: Smallest, mean and largest sum of the learning rates of a sample's visits.
        epoch_accuracy: Accuracy on the task's training ("train") and test images after each epoch, in percent; these
            and the next two with ``trainer.evaluate_every_epoch``.
        degree_of_forgetting: Variance of that accuracy over the second half of the epochs.
        sample_forgetting: Points by which accuracy on a sample falls between the epoch of a visit and the one before
            the next visit.
        feature_drift: Relative change of the query features of the seen tasks' test images, with
            ``trainer.feature_drift``.
        task_confusion: For each task seen, how many of its test images were assigned a class of each task seen, after
            this task; None for tasks that were not measured. Empty if tasks share classes, and in earlier versions.
        class_counts: For each class seen, how many of its test images were classified correctly after this task, and
            how many there are; empty in earlier versions.
        learner_report: What the learner reports about the task.
        parameters: Trainable parameters by group, and the frozen ones.
        frozen_sha256: Hash of all parameters that the task did not train, which training left unchanged.
        trained_sha256: Hash of what the task trained and what its end computed; the same on all ranks.
    """

    task_index: int
    num_samples: int
    num_views: int
    num_steps: int
    num_images: int
    num_skipped_steps: int = 0
    num_test_images: int = 0
    min_visits: int
    max_visits: int
    recall_interval: dict[str, float] = field(default_factory=dict)
    summed_rate: dict[str, float] = field(default_factory=dict)
    epoch_accuracy: dict[str, list[float]] = field(default_factory=dict)
    degree_of_forgetting: dict[str, float] = field(default_factory=dict)
    sample_forgetting: float | None = None
    feature_drift: float | None = None
    task_confusion: list[list[int] | None] = field(default_factory=list)
    class_counts: list[tuple[int, int]] = field(default_factory=list)
    learner_report: dict[str, Any]
    parameters: dict[str, int]
    frozen_sha256: str = ""
    trained_sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class TaskTimings:
    """Seconds that a task took, over all its sittings, and memory.

    Attributes:
        training_seconds: In training steps.
        step_seconds: Of these, in the steps alone, without saving or measuring between them.
        data_seconds: Of these, spent by rank 0 waiting for images; without workers, loading them.
        end_task_seconds: In what the learner does at the end of the task.
        evaluation_seconds: In evaluation.
        peak_memory_bytes: Most memory that rank 0 has held: on a CUDA device in the last sitting of training, otherwise
            by the process since it started; None if the system does not tell.
    """

    training_seconds: float
    data_seconds: float = 0.0
    step_seconds: float = 0.0
    end_task_seconds: float
    evaluation_seconds: float
    peak_memory_bytes: int | None = None

    @property
    def seconds(self) -> float:
        """All seconds; waiting for images is part of training."""
        return self.training_seconds + self.end_task_seconds + self.evaluation_seconds


@dataclass(frozen=True, kw_only=True)
class TaskRecord(TaskTimings, TaskFacts):
    """Facts and timings of one task."""

    @property
    def facts(self) -> TaskFacts:
        """What does not depend on the machine's speed."""
        return TaskFacts(**{each.name: getattr(self, each.name) for each in fields(TaskFacts)})

    @property
    def timings(self) -> TaskTimings:
        """What does."""
        return TaskTimings(**{each.name: getattr(self, each.name) for each in fields(TaskTimings)})

    def to_dict(self) -> dict[str, Any]:
        """Return the record for a JSON file."""
        return asdict(self)
