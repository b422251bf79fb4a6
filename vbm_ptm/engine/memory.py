"""How much memory training takes, if the system can tell."""

from __future__ import annotations

import importlib.util
import sys

import torch


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: of a CUDA device since ``forget_peak_memory``, else of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if importlib.util.find_spec("resource") is None:  # Windows has none
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def forget_peak_memory(device: torch.device) -> None:
    """Reset the count, where that is possible."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
