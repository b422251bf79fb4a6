"""What a launcher tells a process, before anything heavy is imported."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

_PR_SET_PDEATHSIG = 1

# Options of glibc's mallopt: bytes from which an allocation is a mapping of its own, and free bytes that are kept.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# What launchers tell the ranks of a group, and a shell may still hold from an earlier one.
_GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Where MPI and Slurm say how many processes they have started, which may be copies that do not know each other.
_NUM_COPIES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def is_main_process() -> bool:
    """Return whether this is rank 0, which alone writes and talks; torchrun and Accelerate number ranks in RANK.

    A process of its own is rank 0, whatever an earlier launcher has left in RANK.
    """
    return num_processes() == 1 or os.environ.get("RANK", "0") == "0"


def rank_prefix() -> str:
    """Return what marks a message of another rank than 0, which says the same or what it alone has met."""
    return "" if is_main_process() else f"rank {os.environ['RANK']}: "


def num_processes() -> int:
    """Return the number of ranks that were launched together.

    Without LOCAL_RANK, which every launcher sets, Accelerate makes no group, whatever a shell still holds.
    """
    return (_integer("WORLD_SIZE") or 1) if _is_rank() else 1


def num_nodes() -> int:
    """Return on how many machines the ranks run, as far as the launcher says."""
    each = _integer("LOCAL_WORLD_SIZE") or num_processes()
    return _integer("GROUP_WORLD_SIZE") or -(-num_processes() // each)


@contextmanager
def without_leftovers() -> Iterator[None]:
    """Hide from Accelerate, in a process of its own, what only the ranks of a group need.

    With LOCAL_RANK set it would open a process group of one, which needs the port that another job may use.
    """
    hidden = {}
    if num_processes() == 1:
        hidden = {name: os.environ.pop(name) for name in _GROUP if name in os.environ}
    try:
        yield
    finally:
        for name, value in hidden.items():
            os.environ.setdefault(name, value)


def leave_group() -> bool:
    """Make rank 0 a process of its own; return whether this process is it, and the others have nothing to do.

    For commands that take one process alone, under a launcher that has started several.
    """
    is_chosen = is_main_process()
    if is_chosen:
        for name in _GROUP:
            os.environ.pop(name, None)
    return is_chosen


def follow_launcher() -> None:
    """Ask for SIGTERM when the launcher ends, which might otherwise leave an orphaned training process behind.

    Does nothing without a launcher, and where the system cannot do it (elsewhere than on Linux).
    """
    launcher = os.getppid()
    if sys.platform != "linux" or not _is_launched_by(launcher):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it ended in between
        os.kill(os.getpid(), signal.SIGTERM)


def _is_launched_by(parent: int) -> bool:
    """Return whether the parent has set what launchers set; what it had been given itself is a leftover."""
    names = {name for name in os.environ if name == "TORCHELASTIC_RUN_ID" or name.startswith("ACCELERATE_")}
    try:
        given = Path(f"/proc/{parent}/environ").read_bytes()
    except OSError:
        return bool(names)
    return bool(names - {os.fsdecode(item.partition(b"=")[0]) for item in given.split(b"\0")})


def look_here_last() -> None:
    """Move the current directory, which ``python -m`` searches first, to the end of the search path.

    A folder or file there that is called as a library, such as ``datasets``, must not stand in its place.
    """
    if sys.path and sys.path[0] in ("", current_directory()):
        sys.path.append(sys.path.pop(0))


def current_directory() -> str | None:
    """Return the current directory; None if it has been removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def shadowed_libraries(names: Sequence[str]) -> list[str]:
    """Return a line for each file that is found in the place of a library; the library itself comes later.

    Args:
        names: Libraries as they are imported.
    """
    lines = []
    for name in names:
        places = [
            spec.origin for entry in sys.path if (spec := PathFinder.find_spec(name, [entry])) and spec.origin
        ]
        distinct = list(dict.fromkeys(map(os.path.realpath, places)))
        if len(distinct) > 1:
            lines.append(
                f"'{places[0]}' is found in the place of the library '{name}' ({distinct[1]}): rename it, or take its "
                "folder off the search path (PYTHONPATH, the current directory)."
            )
    return lines


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for the next ones, in place of giving it back page by page.

    The pages of a large tensor are otherwise made, and filled with zeros, anew in every step. One core of a server CPU,
    ViT-Ti/16 with 224 px: evaluation in batches of 32 and 128 images takes 25 and 25 ms an image in place of 32 and 41,
    a training step of 32 images 78 in place of 88; the largest amount of memory in use is the same. A user's own
    MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ holds. Does nothing without glibc.
    """
    is_chosen = any(f"MALLOC_{name}_THRESHOLD_" in os.environ for name in ("MMAP", "TRIM"))
    library = ctypes.CDLL(None) if sys.platform == "linux" and not is_chosen else None
    if library is not None and hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 2**30)
        library.mallopt(_M_TRIM_THRESHOLD, 2**30)


def launch_problems(*, num_ranks: int, mixed_precision: str) -> list[str]:
    """Return where the launcher was asked for something else than what is running, a readable line each.

    Args:
        num_ranks: Ranks that there are.
        mixed_precision: What the run computes in.
    """
    problems = []
    asked_for = max(_integer("WORLD_SIZE"), *map(_integer, _NUM_COPIES))
    asked_precision = os.environ.get("ACCELERATE_MIXED_PRECISION")
    # With --num_processes but without --multi_gpu Accelerate starts one process, and tells it where to meet the others.
    has_lost_others = num_ranks == 1 and asked_precision is not None and "MASTER_ADDR" in os.environ
    if has_lost_others or asked_for > num_ranks:
        problems.append(
            f"the launcher was asked for {asked_for if asked_for > 1 else 'several'} processes, but this run has "
            f"{num_ranks}. Accelerate starts several with its option multi_gpu alone: on a CPU too, where "
            "ACCELERATE_USE_CPU=1 keeps them off the GPUs and its option cpu would start one only."
        )
    if asked_precision not in (None, "no", mixed_precision):
        problems.append(
            f"the launcher was asked for {asked_precision}, but the run's own setting decides: "
            f"trainer.mixed_precision={mixed_precision}."
        )
    if _integer("ACCELERATE_GRADIENT_ACCUMULATION_STEPS") > 1:
        problems.append(
            "the launcher was asked for gradient accumulation, but the run's own setting decides: "
            "optimization.gradient_accumulation_steps."
        )
    return problems


def _is_rank() -> bool:
    return os.environ.get("LOCAL_RANK", "-1") not in ("", "-1")


def _integer(name: str) -> int:
    """Return the number in an environment variable, 0 without one."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else 0
