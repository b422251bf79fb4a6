"""Copies of the images of parquet files that can be read row by row, in the cache of Hugging Face data sets.

A copy is named by the SHA-256 of the file that it was made from: another file of the same name and time has another
copy, while a file that was touched, moved or copied elsewhere keeps its own. Hashes are remembered by size, times and
inode, so that a file is hashed again only if one of them has changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import datasets
import filelock
import pyarrow as pa
from datasets import Dataset

logger = logging.getLogger(__name__)

# To be increased when copies are made in another way.
_VERSION = 2
_LOCK_SECONDS = 600.0
# A file written less than this before it was hashed may have been written again since with the same time.
_SETTLED_NS = 2 * 10**9


def copies_folder() -> Path:
    """Return where copies are kept; ``HF_DATASETS_CACHE`` moves it."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "vbm_ptm"


def copies_bytes() -> int:
    """Return the disk space of all copies."""
    return sum(file.stat().st_size for file in copies_folder().glob("*.arrow"))


def copied(
    file: Path,
    column: str,
    *,
    num_rows: int,
    schema: pa.Schema,
    batches: Callable[[], Iterable[pa.RecordBatch]],
) -> Dataset:
    """Return the copy of a column of a file; it is made if there is none, or a damaged one.

    If none can be written, the column is held in memory.

    Args:
        file: The file that is copied.
        column: Name of the column.
        num_rows: Number of its rows.
        schema: Schema of the copy.
        batches: Yields the column.
    """
    try:
        folder = copies_folder()
        folder.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(json.dumps([_VERSION, _sha256(file, folder), column]).encode()).hexdigest()[:40]
        copy = folder / f"{name}.arrow"
        with _alone(folder / f"{name}.lock"):
            found = _read(copy, num_rows) if copy.exists() else None
            if found is None:
                _write(copy, schema, batches())
                found = Dataset.from_file(str(copy))
            return found
    except OSError as error:
        if isinstance(error, pa.ArrowException) or error.errno is None:  # of the file itself
            raise
        logger.warning(
            "'%s' is held in memory, as no copy of it can be written to '%s' (%s); HF_DATASETS_CACHE names another "
            "folder",
            *(file, copies_folder(), error.strerror or error),
        )
        return Dataset(pa.Table.from_batches(batches(), schema))


def _read(copy: Path, num_rows: int) -> Dataset | None:
    """Return a copy; None if it is damaged."""
    with suppress(pa.ArrowException, OSError):
        found = Dataset.from_file(str(copy))
        if len(found) == num_rows:
            return found
    logger.warning("the copy '%s' is damaged and is made again", copy)
    return None


def _write(copy: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    partial = copy.with_name(f".{copy.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        os.replace(partial, copy)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Let one process at a time make a copy; if files cannot be locked, several make the same one."""
    try:
        held = filelock.FileLock(lock, timeout=_LOCK_SECONDS)
        held.acquire()
    except (OSError, NotImplementedError) as error:  # a timeout is an OSError too
        logger.debug("no lock %s: %s", lock, error)
        yield
        return
    try:
        yield
    finally:
        held.release()


def _sha256(file: Path, folder: Path) -> str:
    """Return the hash of a file, from memory if the file has not changed since."""
    path = os.path.abspath(file)
    memory = folder / "hashed" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:40]}.json"
    status = file.stat()
    seen = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    with suppress(OSError, ValueError, TypeError, LookupError):
        known = json.loads(memory.read_text(encoding="utf-8"))
        if known["seen"] == seen:
            return str(known["sha256"])
    started = time.time_ns()
    with file.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    if started - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
        memory.parent.mkdir(exist_ok=True)
        partial = memory.with_name(f".{memory.name}.{uuid.uuid4().hex}")
        partial.write_text(json.dumps({"seen": seen, "sha256": sha256}), encoding="utf-8")
        os.replace(partial, memory)
    return sha256
