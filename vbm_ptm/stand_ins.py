"""Small text files that stand where a large file should be."""

from __future__ import annotations

import re

# Bytes at the start of a file that ``describe_stand_in`` needs.
STAND_IN_BYTES = 256


def describe_stand_in(start: bytes) -> str | None:
    """Say what stands in place of the file that was meant, and what to do; None where nothing does.

    Args:
        start: The first ``STAND_IN_BYTES`` bytes of the file, or all of a shorter one.
    """
    text = start[:STAND_IN_BYTES].lstrip()
    if text.startswith(b"version https://git-lfs.github.com/spec/"):
        return "a Git LFS pointer, not the file itself: fetch the file with 'git lfs pull'"
    if re.match(rb"(/|(\.\./)*\.git/)annex/objects/", text):  # a link's text leads up to the repository
        return "a git-annex pointer, not the file itself: fetch the file with 'git annex get'"
    if text[:14].lower().startswith((b"<!doctype html", b"<html")):
        return (
            "an HTML page, most likely of a login or an error, not the file itself: download the file again"
        )
    return None
