"""Losses from the device to the log: read from time to time, and checked to be finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch import Tensor

from vbm_ptm.engine.tracking import RunLog
from vbm_ptm.storage.task_position import ReadingsPosition

Integers = npt.NDArray[np.int64]


class _Step(NamedTuple):
    """What one step has left on the device, and what is known without it."""

    parts: dict[str, Tensor]
    sample_ids: Integers
    is_skipped: bool
    position: dict[str, Any]


class Readings:
    """Loss parts of one task, which stay on the device until they are read.

    Args:
        accelerator: Averages over ranks, and knows the trackers.
        log: Receives a line for every step.
        task_index: Index of the task.
        first_step: Step number for trackers of the first step of the task, minus one.

    Attributes:
        num_skipped: Steps that the fp16 scaler skipped.
    """

    def __init__(self, accelerator: Accelerator, log: RunLog, *, task_index: int, first_step: int) -> None:
        self._accelerator = accelerator
        self._log = log
        self._task_index = task_index
        self._unread: list[_Step] = []
        self._epoch: dict[str, float] = {}
        self._num_epoch_steps = 0
        self._tracker_step = first_step
        self.num_skipped = 0

    def add(
        self, parts: dict[str, Tensor], *, sample_ids: Integers, is_skipped: bool = False, **position: Any
    ) -> None:
        """Keep what one step reported.

        Args:
            parts: Losses of this rank, and the norm of the gradient.
            sample_ids: Rows of the training split in the step, over all ranks.
            is_skipped: The fp16 scaler has found its scale too large and taken no step.
            position: Where the step was, for the log.
        """
        self._unread.append(_Step(parts, sample_ids, is_skipped, position))
        self.num_skipped += is_skipped

    def read(self) -> dict[str, float]:
        """Read, check and log the steps since the last reading; return the mean of each part over them.

        A part that a step does not have, such as the consistency of a step in which nothing has views, counts as 0.

        Raises:
            FloatingPointError: A loss or a gradient is not finite; the message names the first such step.
        """
        unread, self._unread = self._unread, []
        names = list(dict.fromkeys(name for step in unread for name in step.parts))
        nothing = torch.zeros_like(next(iter(unread[0].parts.values())))
        table = torch.stack(
            [torch.stack([step.parts.get(name, nothing).float() for name in names]) for step in unread]
        )
        rows = self._accelerator.reduce(table, reduction="mean").tolist()
        steps = [dict(zip(names, row, strict=True)) for row in rows]
        for step, values in zip(unread, steps, strict=True):
            if step.is_skipped:
                values["gradient_norm"] = 0.0  # none was applied, and its own is not finite
            self._check(step, values)
            self._log.write("step", task=self._task_index, **step.position, **values)
        self._tracker_step += len(steps)
        self._accelerator.log(
            {f"task_{self._task_index}/{name}": value for name, value in _means(steps).items()},
            step=self._tracker_step,
        )
        for values in steps:
            self._epoch |= {name: self._epoch.get(name, 0.0) + value for name, value in values.items()}
        self._num_epoch_steps += len(steps)
        return _means(steps)

    def _check(self, step: _Step, values: Mapping[str, float]) -> None:
        broken = [name for name, value in values.items() if not math.isfinite(value)]
        if not broken:
            return
        # The loss is not finite because a term of it is not.
        causes = [name for name in broken if name != "loss"] or broken
        what = "loss" if "loss" in broken else "gradient"
        raise FloatingPointError(
            f"the {what} is not finite in task {self._task_index + 1}, epoch {step.position['epoch'] + 1}, "
            f"step {step.position['step'] + 1}: {', '.join(f'{name} {value:g}' for name, value in values.items())}. "
            f"It comes from {', '.join(causes)}. The step held the training images (rows) "
            f"{', '.join(map(str, step.sample_ids))}. Finished tasks are saved; lower optimization.learning_rate or "
            "look at these images."
        )

    def end_epoch(self) -> dict[str, float]:
        """Read what is left; return the mean of each part over the epoch."""
        self.catch_up()
        means = {name: total / self._num_epoch_steps for name, total in self._epoch.items()}
        self._epoch, self._num_epoch_steps = {}, 0
        return means

    def catch_up(self) -> None:
        """Read what has not been read yet."""
        if self._unread:
            self.read()

    def position(self) -> ReadingsPosition:
        """Return what ``load_position`` needs; everything must have been read."""
        return ReadingsPosition(
            epoch=self._epoch,
            num_epoch_steps=self._num_epoch_steps,
            tracker_step=self._tracker_step,
            num_skipped=self.num_skipped,
        )

    def load_position(self, position: ReadingsPosition) -> None:
        """Continue in the middle of an epoch."""
        self._epoch, self._num_epoch_steps = dict(position.epoch), position.num_epoch_steps
        self._tracker_step, self.num_skipped = position.tracker_step, position.num_skipped


def _means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
