"""The errors that users see, and how wrong names are reported."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

# What the user can do about a file that cannot be read or written; any other OSError is a failure of the program.
_ADVICE = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT),
        "Free some space or give another output folder; a resumed training continues.",
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "Change its permissions or give another place."
    ),
    errno.ENAMETOOLONG: "Give a shorter name.",
    errno.EFBIG: "Raise the largest size of a file (ulimit -f) or give another output folder.",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "Raise the number of open files (ulimit -n)."),
    **dict.fromkeys(
        (
            errno.EIO,
            errno.ESTALE,
            errno.ENOTCONN,
            errno.ETIMEDOUT,
            errno.EBUSY,
            errno.ENODEV,
            errno.EHOSTDOWN,
        ),
        "The disk or network drive does not work as it should; a run can be resumed.",
    ),
}

# What the user can do about a computation that failed, by a part of torch's message.
_SMALLER = "Take smaller batches (optimization.batch_size, data.evaluation_batch_size)."
_FAILURES = {
    # torch reports a worker that is killed wherever the main thread is.
    "DataLoader worker": "Usually memory was short: use fewer data.num_workers, or 0.",
    "out of memory": _SMALLER,
    "can't allocate memory": _SMALLER,
}

# How torch says that another rank of the group has gone, or does not come in time.
_LOST_RANK = re.compile(
    "Connection closed by peer|Connection reset by peer|Broken pipe|Socket closed|remote process exited"
    "|got 0 bytes|was likely closed|Timed out waiting"
)


# What a message leaves to the command line, which knows what to type: see vbm_ptm.cli.advice.
Advice = Literal[
    "learner",
    "dataset",
    "backbone",
    "resume",
    "resume_or_output",
    "stored_settings",
    "skip_damaged",
    "more_data",
    "extend",
]


class Problem(str):
    """A message that leaves it to the command line to say what to type, also where it is kept as a string.

    Args:
        text: The message.
        advice: What the command line adds.
    """

    advice: Advice | None

    def __new__(cls, text: str, advice: Advice | None = None) -> Problem:  # noqa: D102 - as of the class
        problem = super().__new__(cls, text)
        problem.advice = advice
        return problem


def advice_of(problem: str | None) -> Advice | None:
    """Return what the command line adds to a message, if anything."""
    return problem.advice if isinstance(problem, Problem) else None


class UsageError(ValueError):
    """Wrong use or wrong input: reported without a traceback, exit code 2.

    Args:
        problems: One readable message each: what was given, what is allowed, what to do. They name facts and settings,
            and nothing to type: the error may be that of a program.
        advice: What the command line adds to the last of them.
    """

    def __init__(self, *problems: str, advice: Advice | None = None) -> None:
        super().__init__("\n".join(problems))
        if advice is not None:
            problems = (*problems[:-1], Problem(problems[-1], advice))
        self.problems = problems

    @property
    def advice(self) -> Advice | None:
        """What the command line adds to the last problem."""
        return advice_of(self.problems[-1]) if self.problems else None


class UnreachableError(UsageError):
    """A file that is there, but that the system does not give: no fault of the file, which must not be left out."""


class TrainingError(RuntimeError):
    """A run whose numbers would be worthless: the message says what went wrong and where; exit code 1."""


class WorkerError(RuntimeError):
    """A process that loads images has failed: the message says how, and what to do; exit code 1."""


class TrainingInterrupted(Exception):  # noqa: N818 - being asked to stop is not an error
    """A run that was asked to stop and has saved what it finished.

    Args:
        exit_code: 128 + signal number (130 for SIGINT, 143 for SIGTERM), or 0 for a planned stop.
        message: What was saved and how to continue.
    """

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def describe_failure(error: Exception) -> str | None:
    """Return what happened and what to do where that needs no traceback; None for a fault of the program."""
    if isinstance(error, FloatingPointError | TrainingError | WorkerError):
        return str(error)
    if isinstance(error, OSError):
        advice = _ADVICE.get(error.errno or 0)
        place = error.filename2 or error.filename or "while writing"
        return advice and f"{place}: {error.strerror}. {advice}"
    if not isinstance(error, RuntimeError):
        return None
    advice = next((advice for part, advice in _FAILURES.items() if part in str(error)), None)
    lost = None if advice else _LOST_RANK.search(str(error))
    if lost:
        return (
            f"another rank has left this run, or does not answer ({lost[0]}). Its own message says why. What is saved "
            "is intact, and the run can be resumed from it."
        )
    return advice and f"{first_line(error)}. {advice}"


def nearest_name(given: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name most like the given one, or None if none is alike."""
    allowed = list(allowed)
    if f"num_{given}" in allowed:  # as all counts are called
        return f"num_{given}"
    matches = difflib.get_close_matches(given, allowed, n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(given: str, allowed: Iterable[str], *, folder: Path | None = None) -> str:
    """Return " Did you mean '…'?" with the allowed name most like the given one; nothing if none is alike.

    Args:
        given: The name that was given.
        allowed: All names that would have been right.
        folder: Where the names lie, if they are files.
    """
    nearest = nearest_name(given, allowed)
    if nearest is None:
        return ""
    return f" Did you mean '{nearest if folder is None else folder / nearest}'?"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, without a full stop; its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def unknown_name(kind: str, given: str, allowed: Iterable[str], *, where: str = "") -> str:
    """Word the message for a name that is not among the allowed ones.

    Args:
        kind: What is named, e.g. "learner".
        given: The name that was given.
        allowed: All names that would have been right.
        where: Added behind the name, e.g. " of learner 'slca'".
    """
    names = sorted(allowed)
    return f"unknown {kind} '{given}'{where}.{did_you_mean(given, names)} Allowed: {', '.join(names) or '(none)'}."


def some_lines(lines: Sequence[str], *, limit: int = 10) -> str:
    """Return the first lines in one and how many more there are."""
    rest = f"; and {len(lines) - limit} more" if len(lines) > limit else ""
    return "; ".join(lines[:limit]) + rest


def some_names(names: Iterable[str], *, limit: int = 10) -> str:
    """Return the first names in quotes and how many more there are."""
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"'{name}'" for name in names[:limit]) + rest
