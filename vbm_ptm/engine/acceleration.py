"""The one place that builds an Accelerator, whose state is global to the process."""

from __future__ import annotations

from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from vbm_ptm.errors import UsageError

Device = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["no", "bf16", "fp16"]


def build_accelerator(*, device: Device = "auto", mixed_precision: Precision = "no") -> Accelerator:
    """Return an Accelerator for one run, forgetting the settings of an earlier run in this process.

    Raises:
        UsageError: The device is not there, or fp16 is asked for on a CPU, which computes it in fp32 silently.
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
    AcceleratorState._reset_state()
    if PartialState._shared_state and PartialState().num_processes == 1:
        PartialState._reset_state()  # another device may be chosen; a process group must stay as it is
    accelerator = Accelerator(
        cpu=device == "cpu", mixed_precision=mixed_precision, gradient_accumulation_steps=1
    )
    if mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UsageError("trainer.mixed_precision 'fp16' needs a GPU; on a CPU use 'bf16' or 'no'.")
    if str(accelerator.distributed_type).split(".")[-1] in {"FSDP", "DEEPSPEED", "MEGATRON_LM"}:
        raise UsageError(
            f"{accelerator.distributed_type} is not supported: an 86 M backbone needs no sharding. "
            "Launch with plain data parallelism (accelerate launch --multi_gpu)."
        )
    return accelerator
