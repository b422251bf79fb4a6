"""Optimizers and learning-rate schedules; both are created anew for every task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import Field, NonNegativeInt, model_validator

from vbm_ptm.engine.optimizer_state import start_momentum
from vbm_ptm.learners.base import ParameterGroup
from vbm_ptm.settings import Settings


class OptimizationConfig(Settings):
    """How each task is trained.

    Attributes:
        epochs: Epochs per task; an epoch is one presentation per training image of the task.
        batch_size: Images per step over all ranks; every view counts.
        gradient_accumulation_steps: Number of micro-batches of whole groups into which every rank cuts its part of a
            step to save memory. ``batch_size``, steps, schedule and gradient stay the same.
        optimizer: "sgd", "adam" or "adamw".
        fused: Update all parameters in one kernel. Sums are rounded in another order, so that results differ in their
            last digits.
        learning_rate: Absolute rate; a learner's groups may scale it. Never rescaled by batch size, views or ranks.
        momentum: Momentum of SGD.
        minimum_learning_rate: Absolute rate at which every schedule ends instead of 0: a rate is minimum +
            (its start - minimum) * factor. Groups that start below it keep their rate.
        weight_decay: Weight decay as defined by the optimizer.
        schedule: Factor of the rate by epoch: "constant"; "multistep" (multiplied by ``decay`` at each milestone);
            "cosine" (half a period down towards 0); "quarter_cosine" (CODA-Prompt: a quarter period down to 0.0157).
        milestones: Epochs, counted from 0, from which ``decay`` applies once more.
        schedule_unit: "epoch": the rate changes with every epoch, so with V views the samples of the last epoch of a
            cycle get lower rates than those of the first. "cycle": all epochs of a cycle have the mean of their rates;
            the sum over the training stays the same. With one view there is no difference.
        decay: Factor of the multistep schedule.
        warmup_epochs: Epochs over which the rate grows linearly to the value of the schedule.
        clip_gradient_norm: Largest norm of the gradient over all trained parameters; None disables clipping.
    """

    epochs: int = Field(default=20, ge=1)
    batch_size: int = Field(default=128, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    fused: bool = False
    learning_rate: float = Field(default=0.01, gt=0)
    minimum_learning_rate: float = Field(default=0.0, ge=0)
    momentum: float = Field(default=0.9, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    schedule: Literal["constant", "multistep", "cosine", "quarter_cosine"] = "constant"
    milestones: tuple[NonNegativeInt, ...] = ()
    schedule_unit: Literal["epoch", "cycle"] = "epoch"
    decay: float = Field(default=0.1, gt=0)
    warmup_epochs: int = Field(default=0, ge=0)
    clip_gradient_norm: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check_schedule(self) -> OptimizationConfig:
        if self.minimum_learning_rate > self.learning_rate:
            given = f"{self.minimum_learning_rate:g}, above the learning_rate of {self.learning_rate:g}"
            raise ValueError(f"minimum_learning_rate is {given}: take at most that")
        if self.schedule == "multistep" and not self.milestones:
            raise ValueError(
                "schedule 'multistep' without milestones never changes the rate: set milestones, such as [18], or take "
                "schedule 'constant'"
            )
        return self

    def idle(self) -> dict[str, str]:
        """Return momentum without SGD, and the settings of the multistep schedule without it."""
        found = {} if self.optimizer == "sgd" else {"momentum": "optimizer 'sgd'"}
        if self.schedule != "multistep":
            found |= dict.fromkeys(("milestones", "decay"), "schedule 'multistep'")
        return found


def build_optimizer(config: OptimizationConfig, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
    """Return an optimizer with one parameter group per learner group, its name and rate scale kept in it."""
    options: list[dict[str, Any]] = [
        {
            "params": group.parameters,
            "name": group.name,
            "scale": group.learning_rate_scale,
            "lr": config.learning_rate * group.learning_rate_scale,
        }
        for group in groups
    ]
    fused = config.fused or None  # None: as torch chooses
    if config.optimizer == "sgd":
        optimizer = torch.optim.SGD(
            options, momentum=config.momentum, weight_decay=config.weight_decay, fused=fused
        )
        if config.fused and config.momentum:
            optimizer.register_step_pre_hook(start_momentum)
        return optimizer
    if config.optimizer == "adam":
        return torch.optim.Adam(options, weight_decay=config.weight_decay, fused=fused)
    return torch.optim.AdamW(options, weight_decay=config.weight_decay, fused=fused)
