"""The settings of the training loop."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from vbm_ptm.engine.acceleration import Tracker
from vbm_ptm.engine.interruption import STOP_SIGNALS, StopSignal
from vbm_ptm.settings import PrecisionSetting, Settings


class TrainerConfig(Settings):
    """How the loop runs.

    Attributes:
        max_steps_per_task: Stop each task after this many steps (a smoke run); null for all epochs.
        log_every: Steps between two readings of the losses, which stay on the device until then.
        mixed_precision: "no", "bf16" or "fp16" through Accelerate. "auto" is bf16 where the hardware supports it (GPUs
            with bf16, CPUs with AMX or AVX512-BF16), else "no"; a run records the choice and keeps it.
        compile: Train with the blocks of a ViT, or another network as a whole, compiled by ``torch.compile``. Takes up
            to minutes at the start; values agree up to rounding, so a run keeps the setting that it began with.
        rank_timeout_minutes: How long a rank waits for the others, at the start and in every exchange.
        trackers: "tensorboard", "wandb" or both, through Accelerate, in addition to ``log.jsonl``.
        stop_signals: Signals that save the run and end it, in addition to SIGINT and SIGTERM: those that batch systems
            send before the time limit, and that of a closed terminal.
        evaluate_every_epoch: After every epoch, measure the accuracy on the task's training and test images; this gives
            the paper's degree of forgetting, and what samples lose between two visits. "train" leaves the test images
            out, which may be many. Training is not affected.
        feature_drift: Measure how much each task changes the features of the test images.
    """

    max_steps_per_task: int | None = Field(default=None, ge=1)
    log_every: int = Field(default=10, ge=1)
    mixed_precision: PrecisionSetting = "auto"
    compile: bool = False
    rank_timeout_minutes: float = Field(default=10.0, gt=0)
    trackers: tuple[Tracker, ...] = ()
    stop_signals: tuple[StopSignal, ...] = STOP_SIGNALS
    evaluate_every_epoch: Literal[False, True, "train"] = False
    feature_drift: bool = False

    @field_validator("evaluate_every_epoch", mode="before")
    @classmethod
    def _take_words(cls, value: Any) -> Any:
        return {"true": True, "false": False}.get(str(value).lower(), value)

    @field_validator("trackers", mode="before")
    @classmethod
    def _take_one_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value
