"""What the command line adds to refusals of the layers below it."""

from __future__ import annotations

import copy
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


def test_messages__keep_the_advice_of_problems_that_are_collected() -> None:
    """Errors of many parts are collected as strings, copied, and raised again as one."""
    found = [*UsageError("one.", advice="learner").problems, *UsageError("two.", advice="dataset").problems]
    one, two = messages(UsageError(*copy.deepcopy(found)))
    assert "--learner" in one
    assert "--dataset" in two
    assert UsageError(*found).advice == "dataset"
