"""What the command line adds to refusals of the layers below it."""

from __future__ import annotations

from typing import get_args

from vbm_ptm.cli.advice import WHAT_TO_TYPE, messages
from vbm_ptm.errors import Advice, UsageError


def test_what_to_type__answers_every_advice() -> None:
    assert WHAT_TO_TYPE.keys() == set(get_args(Advice))


def test_messages__end_with_what_to_type() -> None:
    first, last = messages(UsageError("one.", "two.", advice="more_data"))
    assert first == "one."
    assert last.startswith("two. ")
    assert "--more-data" in last
    assert messages(UsageError("one.")) == ["one."]
