"""The one place that builds an Accelerator, whose state is global to the process."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.loader_config import LoaderConfig
from vbm_ptm.data.loaders import Loaders
from vbm_ptm.engine.precision import chosen_device_type, resolve_precision
from vbm_ptm.errors import UsageError, first_line
from vbm_ptm.launch import keep_freed_memory, num_nodes, num_processes, without_leftovers
from vbm_ptm.settings import Precision, PrecisionSetting

__all__ = [
    "Accelerator",
    "Device",
    "Precision",
    "Tracker",
    "build_accelerator",
    "describe_ranks",
    "finish_trackers",
    "loaders_for",
    "precision_of",
    "start_trackers",
    "wait_for_ranks",
]

logger = logging.getLogger(__name__)

Device = Literal["auto", "cpu", "cuda", "mps"]
Tracker = Literal["tensorboard", "wandb"]

# What Accelerate's launcher sets for sharded weights.
_SHARDING = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism configuration",
}


def build_accelerator(
    *,
    device: Device = "auto",
    mixed_precision: PrecisionSetting = "no",
    trackers: Sequence[Tracker] = (),
    directory: Path | None = None,
    rank_timeout: timedelta = timedelta(minutes=10),
) -> Accelerator:
    """Return an Accelerator for one run, forgetting the settings of an earlier run in this process.

    Args:
        device: "auto" for the best one.
        mixed_precision: What the forward pass computes in; "auto" for the fastest on the device.
        trackers: Experiment trackers that receive every reading of the losses and every accuracy.
        directory: Where trackers write files.
        rank_timeout: How long a rank waits for the others, at the start and later.

    Raises:
        UsageError: The device or a tracker's package is not there; the launcher asks for sharding; the environment
            holds what Accelerate cannot read; not all ranks come in time; or fp16 is asked for on a CPU, which would
            compute it in fp32 silently.
    """
    sharding = [name for key, name in _SHARDING.items() if os.environ.get(key, "").lower() in ("true", "1")]
    if sharding:
        raise UsageError(
            f"{' and '.join(sharding)} is not supported: an 86 M backbone needs no sharding. "
            "Launch with plain data parallelism."
        )
    available = {
        "auto": True,
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not available[device]:
        there = ", ".join(name for name, is_there in available.items() if is_there)
        raise UsageError(f"device: {device} is not available here. Available: {there}.")
    missing = [name for name in trackers if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"trainer.trackers: {', '.join(missing)} is not installed; install it with pip install 'vbm_ptm[trackers]'."
        )
    if chosen_device_type(device) == "cpu":
        keep_freed_memory()
    AcceleratorState._reset_state()
    if PartialState._shared_state and PartialState().num_processes == 1:
        PartialState._reset_state()  # another device may be chosen; a process group must stay as it is
    try:
        with without_leftovers():
            accelerator = Accelerator(
                cpu=device == "cpu",
                mixed_precision=resolve_precision(mixed_precision, chosen_device_type(device)),
                log_with=list(trackers) or None,
                project_dir=directory,
                kwargs_handlers=[
                    # All ranks hold equal buffers; DDP would send them in every step, and class statistics are buffers.
                    DistributedDataParallelKwargs(broadcast_buffers=False),
                    InitProcessGroupKwargs(timeout=rank_timeout),
                ],
            )
    except RuntimeError as error:
        if torch.distributed.is_initialized() or num_processes() == 1:
            raise
        raise UsageError(_start_problem(error, rank_timeout)) from error
    except ValueError as error:
        given = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("ACCELERATE_")]
        if not given:
            raise
        raise UsageError(
            f"Accelerate cannot read the environment ({first_line(error)}): {', '.join(sorted(given))}. Unset what no "
            "launcher has set."
        ) from error
    if mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UsageError("trainer.mixed_precision 'fp16' needs a GPU; on a CPU use 'bf16' or 'no'.")
    # The trainer accumulates: Accelerate would divide by its own number, which the launcher may set.
    accelerator.gradient_accumulation_steps = 1
    return accelerator


def loaders_for(
    accelerator: Accelerator,
    benchmark: Benchmark,
    config: LoaderConfig,
    *,
    seed: int = 0,
    on_wait: Callable[[], None] = lambda: None,
) -> Loaders:
    """Return the loaders of this rank's part of the images.

    Args:
        accelerator: Device and ranks.
        benchmark: Images, tasks and transforms.
        config: Workers and the batch size of evaluation.
        seed: Training seed, for views that are drawn.
        on_wait: Called every few seconds while workers let the run wait; may raise, so that it is called where there is
            one rank: others would wait for one that leaves alone.
    """
    device_type = accelerator.device.type
    return Loaders(
        benchmark,
        config.for_device(device_type),
        seed=seed,
        rank=accelerator.process_index,
        num_ranks=accelerator.num_processes,
        pin_memory=device_type == "cuda",
        on_wait=on_wait if accelerator.num_processes == 1 else lambda: None,
    )


def _start_problem(error: RuntimeError, rank_timeout: timedelta) -> str:
    rank, address, port = (os.environ.get(name) for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    return (
        f"rank {rank} did not meet all {num_processes()} processes of this run at {address}:{port} within "
        f"{rank_timeout / timedelta(minutes=1):g} minutes ({first_line(error)}). Start the same command on "
        "every machine, with its own machine rank, and with one address and port of the main process that all of "
        "them reach; trainer.rank_timeout_minutes is the limit."
    )


def describe_ranks(accelerator: Accelerator) -> str:
    """Return ranks, nodes, device and precision in words."""
    ranks, nodes = accelerator.num_processes, num_nodes()
    where = f"{ranks} rank{'s' if ranks > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"
    device = accelerator.device.type if ranks > 1 else str(accelerator.device)
    return f"{where}, device {device}, precision {precision_of(accelerator)}"


def precision_of(accelerator: Accelerator) -> Precision:
    """Return what the forward pass computes in."""
    names: dict[str, Precision] = {"no": "no", "bf16": "bf16", "fp16": "fp16"}
    return names[accelerator.mixed_precision]


def wait_for_ranks(accelerator: Accelerator) -> None:
    """Wait until all ranks are here, however long one of them works alone, as rank 0 does when it writes a checkpoint.

    A barrier of the process group ends the run after the time that a collective may take. A dead rank ends the wait.
    """
    if accelerator.num_processes > 1:
        group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=7))
        assert not isinstance(group, int)  # what ranks outside of a group are given
        torch.distributed.barrier(group)
        torch.distributed.destroy_process_group(group)


def start_trackers(accelerator: Accelerator, config: Mapping[str, Any]) -> None:
    """Tell the trackers, if there are any, that a run with this flat configuration begins."""
    if accelerator.log_with:
        accelerator.init_trackers("vbm_ptm", config={key: str(value) for key, value in config.items()})


def finish_trackers(accelerator: Accelerator) -> None:
    """Close the trackers; ``Accelerator.end_training`` would also end the process group."""
    for tracker in accelerator.trackers:
        tracker.finish()
