"""Where a run is inside a task, as checkpoints store it."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from vbm_ptm.data.record import Record


class ReadingsPosition(Record):
    """Readings of the losses so far.

    Attributes:
        epoch: Sums of the parts over the steps of the epoch so far.
        num_epoch_steps: Number of steps in these sums.
        tracker_step: Step that was last sent to trackers.
        num_skipped: Steps of the task that the fp16 scaler skipped.
    """

    epoch: dict[str, float]
    num_epoch_steps: int
    tracker_step: int
    num_skipped: int


class RetentionPosition(Record):
    """What has been measured after the epochs so far.

    Attributes:
        train: Accuracy on the training images of the task after each epoch, in percent.
        test: The same on its test images.
        num_lost: Samples that were right after a visit and wrong before the next one, minus the opposite.
        num_rests: Number of visits, other than first ones.
        now: One bit per sample, in hexadecimal digits: correct after the last epoch.
        after_visit: Likewise: correct after the epoch of its last visit.
        is_visited: Likewise: visited at all.
    """

    train: tuple[float, ...]
    test: tuple[float, ...]
    num_lost: int
    num_rests: int
    now: str
    after_visit: str
    is_visited: str


class TaskPosition(Record):
    """Where training continues.

    Attributes:
        epoch: Epoch of the next step, from 0.
        step: Next step in the epoch, from 0.
        num_steps: Steps done in the task.
        seconds: Seconds that they took.
        frozen_sha256: Hash of the parameters that the task leaves unchanged.
        readings: Readings of the losses so far.
        measures: What has been measured, by kind.
        tallies: What the learner has counted, over all ranks.
        data_seconds: Seconds that rank 0 has waited for images.
        step_seconds: Seconds in steps alone.
    """

    epoch: int
    step: int
    num_steps: int
    seconds: float
    frozen_sha256: str
    readings: ReadingsPosition
    measures: dict[str, RetentionPosition | None]
    tallies: Mapping[str, tuple[int, ...]] = Field(default_factory=dict)
    data_seconds: float = 0.0
    step_seconds: float = 0.0
