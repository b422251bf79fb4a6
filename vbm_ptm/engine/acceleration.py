"""The one place that builds an Accelerator, whose state is global to the process."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs

from vbm_ptm.errors import UsageError

__all__ = [
    "Accelerator",
    "Device",
    "Precision",
    "Tracker",
    "build_accelerator",
    "finish_trackers",
    "start_trackers",
]

Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["no", "bf16", "fp16"]
Tracker = Literal["tensorboard", "wandb"]


def build_accelerator(
    *,
    device: Device = "auto",
    mixed_precision: Precision = "no",
    trackers: Sequence[Tracker] = (),
    directory: Path | None = None,
) -> Accelerator:
    """Return an Accelerator for one run, forgetting the settings of an earlier run in this process.

    Args:
        device: "auto" for the best one.
        mixed_precision: What the forward pass computes in.
        trackers: Experiment trackers that receive every reading of the losses and every accuracy.
        directory: Where trackers write files.

    Raises:
        UsageError: The device or a tracker's package is not there, or fp16 is asked for on a CPU, which would
            compute it in fp32 silently.
    """
    available = {
        "auto": True,
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not available[device]:
        there = ", ".join(name for name, is_there in available.items() if is_there)
        raise UsageError(f"--device {device} is not available here. Available: {there}.")
    missing = [name for name in trackers if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"trainer.trackers: {', '.join(missing)} is not installed; install it with pip install 'vbm_ptm[trackers]'."
        )
    AcceleratorState._reset_state()
    if PartialState._shared_state and PartialState().num_processes == 1:
        PartialState._reset_state()  # another device may be chosen; a process group must stay as it is
    accelerator = Accelerator(
        cpu=device == "cpu",
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=1,
        log_with=list(trackers) or None,
        project_dir=directory,
        # All ranks hold equal buffers; DDP would send them in every step, and class statistics are buffers.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    if mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UsageError("trainer.mixed_precision 'fp16' needs a GPU; on a CPU use 'bf16' or 'no'.")
    if str(accelerator.distributed_type).split(".")[-1] in {"FSDP", "DEEPSPEED", "MEGATRON_LM"}:
        raise UsageError(
            f"{accelerator.distributed_type} is not supported: an 86 M backbone needs no sharding. "
            "Launch with plain data parallelism (accelerate launch --multi_gpu)."
        )
    return accelerator


def start_trackers(accelerator: Accelerator, config: Mapping[str, Any]) -> None:
    """Tell the trackers, if there are any, that a run with this flat configuration begins."""
    if accelerator.log_with:
        accelerator.init_trackers("vbm_ptm", config={key: str(value) for key, value in config.items()})


def finish_trackers(accelerator: Accelerator) -> None:
    """Close the trackers; ``Accelerator.end_training`` would also end the process group."""
    for tracker in accelerator.trackers:
        tracker.finish()
