"""Files and directories that exist as a whole or not at all, even after a power cut or on a full disk.

They are written under a temporary name, forced to disk, and renamed. If a file system cannot force something to disk, a
warning says what is not protected.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from vbm_ptm.errors import UsageError

logger = logging.getLogger(__name__)

# What a file system answers if it cannot force a file or a directory to disk.
_CANNOT_SYNC = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def check_writable(path: Path) -> None:
    """Make sure that a file can be written before anything is computed for it.

    Raises:
        UsageError: It is a directory, or its folder cannot be written to.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a directory; give the name of a file.")
    nearest = next(each for each in path.absolute().parents if each.exists())
    if not nearest.is_dir():
        raise UsageError(f"{path} cannot be written: {nearest} is a file.")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"{path} cannot be written: no permission to write in {nearest}.")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file."""
    write_file(path, as_json(value))


def as_json(value: Any) -> bytes:
    """Return what a JSON file holds."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def write_file(path: Path, content: bytes) -> None:
    """Write a file, or replace it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _partial(path) as partial:
        _write_synced(partial, content)
        partial.replace(path)
    _sync_directory(path.parent)


def write_directory(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a directory of files, replacing one of the same name."""
    with _partial(path) as partial:
        if path.exists():
            remove_directory(path)
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        for name, content in files.items():
            _write_synced(partial / name, content)
        _sync_directory(partial)
        partial.rename(path)
    _sync_directory(path.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory so that a process killed meanwhile leaves either all of it, or a partial that nobody reads."""
    partial = _partial_name(path)
    _remove(partial)
    path.rename(partial)
    shutil.rmtree(partial)


def remove_partials(directory: Path) -> None:
    """Remove what a killed process has left half-written or half-removed in a directory."""
    for stale in directory.glob(".*.partial"):
        _remove(stale)


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; after an error, whatever is there is removed to free its space."""
    partial = _partial_name(path)
    try:
        yield partial
    except BaseException:
        _remove(partial)
        raise


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        sync(file.fileno(), path)


def sync(descriptor: int, path: Path) -> None:
    """Force an open file or directory to disk, or warn if that cannot be done.

    Args:
        descriptor: File descriptor.
        path: Its path.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
        _warn_once("a directory" if path.is_dir() else "a file", str(error.strerror))


def _sync_directory(path: Path) -> None:
    if os.name == "nt":  # directories cannot be opened there
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:  # a folder that may be written but not read, or a file system that opens none
        _warn_once("a directory", str(error.strerror))
        return
    try:
        sync(descriptor, path)
    finally:
        os.close(descriptor)


@cache
def _warn_once(what: str, reason: str) -> None:
    logger.warning(
        "the file system of the output cannot force %s to disk (%s): the latest data may be lost in a power cut, "
        "but not if the run is killed",
        what,
        reason,
    )
