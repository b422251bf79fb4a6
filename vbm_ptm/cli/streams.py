"""Standard output and standard error that may be lost: a closed terminal, or a pipe without a reader."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

# What writing raises when there is no reader any more.
_NOBODY_READS = {errno.EPIPE, errno.EIO, errno.ENXIO, errno.ESHUTDOWN, errno.ECONNRESET}


def outlast_readers() -> None:
    """Let a command continue when its output can no longer be shown.

    A closed pipe or terminal swallows what is written. Messages, which no command depends on, may be lost on a full
    disk as well; results may not.
    """
    _occupy_standard_descriptors()
    sys.stdout = _outlasting(sys.stdout, sys.__stdout__, may_lose_all=False)
    sys.stderr = _outlasting(sys.stderr, sys.__stderr__, may_lose_all=True)


def _occupy_standard_descriptors() -> None:
    """Open what was closed, as by ``2>&-``: else the next file that is opened would get what is meant for a screen."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _outlasting(stream: TextIO | None, original: TextIO | None, *, may_lose_all: bool) -> TextIO:
    """Return the stream to use in place of one that may be lost; a stream that was replaced by a caller stays."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if stream is not original or not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    # A screen shows a replacement for what it cannot spell; files and pipes get every name, as UTF-8.
    is_screen = stream.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(_Raw(stream.fileno(), may_lose_all=may_lose_all)),
        encoding=stream.encoding if is_screen else "utf-8",
        errors="replace" if is_screen else "surrogateescape",
        line_buffering=True,
    )


class _Raw(io.FileIO):
    """A file descriptor that drops what cannot be read any more; a full disk raises once."""

    def __init__(self, descriptor: int, *, may_lose_all: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._may_lose_all = may_lose_all
        self._has_failed = False

    def write(self, content: Any) -> int:
        """Write, or claim to have written; return the number of bytes."""
        try:
            return super().write(content)
        except OSError as error:
            if self._may_lose_all or self._has_failed or error.errno in _NOBODY_READS:
                return len(content)
            self._has_failed = True  # the interpreter flushes what is left once more when it ends
            raise
