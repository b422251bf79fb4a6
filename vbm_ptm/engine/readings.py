"""Losses on their way from the device to the log: read now and then, and checked to be finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from vbm_ptm.engine.tracking import RunLog


class Readings:
    """Loss parts of one task that stay on the device until they are read.

    Args:
        accelerator: Averages over ranks, and knows the trackers.
        log: Receives a line for every step.
        task_index: Index of the task.
        first_step: Step that trackers are told for the first step of the task, less one.
    """

    def __init__(self, accelerator: Accelerator, log: RunLog, *, task_index: int, first_step: int) -> None:
        self._accelerator = accelerator
        self._log = log
        self._task_index = task_index
        self._unread: list[tuple[dict[str, Any], dict[str, Tensor]]] = []
        self._epoch: list[dict[str, float]] = []
        self._tracker_step = first_step

    def add(self, parts: dict[str, Tensor], **position: Any) -> None:
        """Keep what one step reported, and where it was."""
        self._unread.append((position, parts))

    def read(self) -> dict[str, float]:
        """Read, check and log the steps since the last reading; return the mean of each part over them.

        Raises:
            FloatingPointError: A loss is not finite; the message names the first such step.
        """
        positions = [position for position, _ in self._unread]
        names = list(self._unread[0][1])
        table = torch.stack(
            [torch.stack([parts[name].float() for name in names]) for _, parts in self._unread]
        )
        rows = self._accelerator.reduce(table, reduction="mean").tolist()
        self._unread.clear()
        steps = [dict(zip(names, row, strict=True)) for row in rows]
        for position, values in zip(positions, steps, strict=True):
            if not math.isfinite(values["loss"]):
                raise FloatingPointError(
                    f"the loss is {values['loss']} in task {self._task_index}, epoch {position['epoch']}, "
                    f"step {position['step']}: {values}. Finished tasks are saved; lower "
                    "optimization.learning_rate or look at the data."
                )
            self._log.write("step", task=self._task_index, **position, **values)
        self._tracker_step += len(steps)
        self._accelerator.log(
            {f"task_{self._task_index}/{name}": value for name, value in _means(steps).items()},
            step=self._tracker_step,
        )
        self._epoch += steps
        return _means(steps)

    def end_epoch(self) -> dict[str, float]:
        """Read what is left; return the mean of each part over the epoch."""
        if self._unread:
            self.read()
        means = _means(self._epoch)
        self._epoch = []
        return means


def _means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]} if steps else {}
