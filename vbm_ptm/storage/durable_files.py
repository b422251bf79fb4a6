"""Files and directories that are there as a whole or not at all, also after a power cut or on a full disk.

They are written under a temporary name, forced to the disk, and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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
    """Write a directory of files, in the place of one of that name."""
    with _partial(path) as partial:
        for stale in (partial, path):
            if stale.exists():
                shutil.rmtree(stale)
        partial.mkdir(parents=True)
        for name, content in files.items():
            _write_synced(partial / name, content)
        _sync_directory(partial)
        partial.rename(path)
    _sync_directory(path.parent)


def remove_partials(directory: Path) -> None:
    """Remove what a process that was killed has left half-written in a directory."""
    for stale in directory.glob(".*.partial"):
        _remove(stale)


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Give a temporary name beside ``path``; what stands there after an error is removed, to free its space."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
    except BaseException:
        _remove(partial)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
