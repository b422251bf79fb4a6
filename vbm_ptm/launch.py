"""What a launcher tells a process, before anything heavy is imported."""

from __future__ import annotations

import os


def is_main_process() -> bool:
    """Return whether this is rank 0, which alone writes and talks; torchrun and Accelerate number ranks in RANK."""
    return os.environ.get("RANK", "0") == "0"


def num_processes() -> int:
    """Return the number of ranks that were launched together."""
    return int(os.environ.get("WORLD_SIZE", "1"))
