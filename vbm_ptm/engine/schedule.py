"""How the learning rate falls from epoch to epoch."""

from __future__ import annotations

import math
import statistics

import torch

from vbm_ptm.engine.optimization import OptimizationConfig


def learning_rate_factor(config: OptimizationConfig, epoch: int, *, cycle_length: int = 1) -> float:
    """Return the factor of every group's rate.

    Args:
        config: The schedule.
        epoch: Counted from 0.
        cycle_length: Epochs after which every sample has been visited equally often.
    """
    if config.schedule_unit == "epoch":
        return _factor(config, epoch)
    first = epoch - epoch % cycle_length
    return statistics.fmean(
        _factor(config, each)
        for each in range(first, max(min(first + cycle_length, config.epochs), epoch + 1))
    )


def learning_rate_at(
    config: OptimizationConfig, epoch: int, *, cycle_length: int = 1, scale: float = 1.0
) -> float:
    """Return the rate of a group that begins with ``scale`` times the learning rate.

    A group that begins below the minimum keeps its rate.
    """
    start = config.learning_rate * scale
    minimum = min(config.minimum_learning_rate, start)
    return minimum + (start - minimum) * learning_rate_factor(config, epoch, cycle_length=cycle_length)


def summed_rates(config: OptimizationConfig, *, cycle_length: int) -> list[float]:
    """Return, for the samples of each epoch of a cycle, the sum of the rates at which they are trained on."""
    sums = [0.0] * cycle_length
    for epoch in range(config.epochs):
        sums[epoch % cycle_length] += learning_rate_at(config, epoch, cycle_length=cycle_length)
    return sums


def _factor(config: OptimizationConfig, epoch: int) -> float:
    warm_up = min(1.0, (epoch + 1) / config.warmup_epochs) if config.warmup_epochs else 1.0
    return warm_up * _scheduled(config, epoch)


def _scheduled(config: OptimizationConfig, epoch: int) -> float:
    if config.schedule == "multistep":
        return config.decay ** sum(epoch >= milestone for milestone in config.milestones)
    if config.schedule == "cosine":
        return (1 + math.cos(math.pi * epoch / config.epochs)) / 2
    if config.schedule == "quarter_cosine":
        # CODA-Prompt's schedule; with a single epoch its formula would divide by zero.
        return math.cos(99 * math.pi * epoch / (200 * max(config.epochs - 1, 1)))
    return 1.0


def set_learning_rate(
    optimizer: torch.optim.Optimizer, config: OptimizationConfig, epoch: int, *, cycle_length: int = 1
) -> None:
    """Set every group's rate for an epoch; arguments as of ``learning_rate_factor``."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(config, epoch, cycle_length=cycle_length, scale=group["scale"])
