"""From the training of a task to its state in a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vbm_ptm.engine.task_training import TaskTraining
from vbm_ptm.storage.task_position import RetentionPosition, TaskPosition


def position_of(
    training: TaskTraining,
    *,
    measures: dict[str, RetentionPosition | None],
    seconds: float,
    frozen_sha256: str,
) -> TaskPosition:
    """Return the position of training; all ranks must call this together.

    Args:
        training: Between two steps.
        measures: State of the measures.
        seconds: Time that the steps took.
        frozen_sha256: Of the parameters that are not trained.
    """
    training.readings.catch_up()
    return TaskPosition(
        epoch=training.epoch,
        step=training.step,
        num_steps=training.num_steps,
        seconds=seconds,
        frozen_sha256=frozen_sha256,
        readings=training.readings.position(),
        measures=measures,
        tallies={name: tuple(counts) for name, counts in tallies_of(training).items()},
        data_seconds=training.data_seconds,
        step_seconds=training.step_seconds,
    )


def take_up(training: TaskTraining, position: TaskPosition, optimizer: Mapping[str, Tensor]) -> None:
    """Continue from a position; the steps before it are counted again.

    Args:
        training: Before its first step.
        position: What ``position_of`` returned.
        optimizer: What ``TaskTraining.optimizer_tensors`` returned there.
    """
    for epoch in range(position.epoch + 1):
        training.epoch = epoch
        training.sampler.set_epoch(epoch)
        steps = training.sampler.steps()[: position.step if epoch == position.epoch else None]
        training.plan(steps)
        for positions in steps:
            training.count(positions, epoch)
    training.epoch, training.step = position.epoch, position.step
    assert training.num_steps == position.num_steps
    training.data_seconds, training.step_seconds = position.data_seconds, position.step_seconds
    training.readings.load_position(position.readings)
    accelerator = training.accelerator
    for name, counts in position.tallies.items():  # a sum over ranks, which the main one continues
        own = torch.tensor(counts, device=accelerator.device)
        training.learner.tallies[name] = own if accelerator.is_main_process else torch.zeros_like(own)
    training.restored = optimizer


def tallies_of(training: TaskTraining) -> dict[str, list[int]]:
    """Return what the learner has counted in the steps so far, over all ranks, which must call this together."""
    return {
        name: training.accelerator.reduce(counts, reduction="sum").tolist()
        for name, counts in training.learner.tallies.items()
    }
