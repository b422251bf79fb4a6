"""The words of errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from vbm_ptm.errors import (
    TrainingInterrupted,
    UsageError,
    describe_failure,
    did_you_mean,
    first_line,
    nearest_name,
    unknown_name,
)


def test_usage_error__keeps_every_problem() -> None:
    error = UsageError("one", "two")
    assert error.problems == ("one", "two")
    assert str(error) == "one\ntwo"
    assert isinstance(error, ValueError)  # pydantic turns it into an entry of its own error


def test_training_interrupted__carries_the_exit_code() -> None:
    interruption = TrainingInterrupted(143, "saved")
    assert (interruption.exit_code, str(interruption)) == (143, "saved")


@pytest.mark.parametrize(
    ("given", "nearest"), [("slka", "slca"), ("coda", "coda_prompt"), ("zzz", None), ("", None)]
)
def test_nearest_name__is_alike_or_none(given: str, nearest: str | None) -> None:
    assert nearest_name(given, iter(["slca", "coda_prompt", "l2p"])) == nearest


def test_nearest_name__of_a_count_is_the_count() -> None:
    """By letters alone the name of another setting is as near."""
    assert nearest_name("views", ["views_for", "num_views"]) == "num_views"


def test_unknown_name__says_what_is_allowed() -> None:
    assert unknown_name("learner", "slka", iter(["slca", "l2p"])) == (
        "unknown learner 'slka'. Did you mean 'slca'? Allowed: l2p, slca."
    )
    assert unknown_name("learner", "x", []) == "unknown learner 'x'. Allowed: (none)."


def test_did_you_mean__names_the_nearest_if_one_is_alike() -> None:
    assert did_you_mean("slcaa", ["slca", "l2p"]) == " Did you mean 'slca'?"
    assert did_you_mean("slcaa", ["slca"], folder=Path("a")) == f" Did you mean '{Path('a') / 'slca'}'?"
    assert did_you_mean("zzz", ["slca"]) == ""


def test_first_line__is_never_empty() -> None:
    assert first_line(ValueError("  one.\ntwo")) == "one"
    assert first_line(KeyError()) == "KeyError"


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "does not work as it should"),
        (errno.ESTALE, "does not work as it should"),
        (errno.ENOTCONN, "does not work as it should"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_describe_failure__of_a_file_says_what_to_do(code: int, advice: str) -> None:
    said = describe_failure(OSError(code, os.strerror(code), "runs/a"))
    assert said is not None
    assert said.startswith(f"runs/a: {os.strerror(code)}. ")
    assert advice in said


@pytest.mark.parametrize(
    "text",
    [
        "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:29582. GLHF",
        "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?",
    ],
)
def test_describe_failure__of_a_lost_rank_points_at_its_own_message(text: str) -> None:
    said = describe_failure(RuntimeError(text))
    assert said is not None
    assert said.startswith("another rank has left this run")
    assert "cc:" not in said
    assert describe_failure(ValueError(text)) is None
