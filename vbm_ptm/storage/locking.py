"""Files that only one process at a time may hold.

The lock is the operating system's: it ends with the process, however that ends. filelock is not used: depending on its
version, it empties the file that says who holds the lock, or leaves a file behind when a run is killed.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl

logger = logging.getLogger(__name__)

# What a file system without locks answers: a network share without a lock service, and many user-space ones.
_CANNOT_LOCK = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}

# Seconds within which loader workers, which share the lock of their run, notice that it is dead.
_WORKERS_END = 15.0


class LockedElsewhereError(Exception):
    """Another process holds the lock."""


@contextmanager
def sole_holder(path: Path, *, what: str, patience: float = 0.0) -> Iterator[None]:
    """Hold a lock file, which contains the number of this process for as long.

    If the file system has no locks, a warning says what is not protected, and the block is entered all the same.

    Args:
        path: The lock file; created if it does not exist.
        what: What the lock protects, for the warning.
        patience: Seconds to wait for a living holder.

    Raises:
        LockedElsewhereError: Another process still holds it.
    """
    with path.open("a+") as lock:
        if _is_taken(lock, what=what, patience=patience):
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
        yield


def _is_taken(lock: IO[str], *, what: str, patience: float) -> bool:
    """Wait for the lock; return False if there are no locks."""
    started = time.monotonic()
    has_told = False
    while True:
        try:
            _lock(lock)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read()
            waited = time.monotonic() - started
            if waited > (patience if _is_alive(holder) else max(patience, _WORKERS_END)):
                raise LockedElsewhereError(f"{lock.name} is held by process {holder or 'unknown'}") from None
            if waited > 5 and not has_told:
                logger.info("waiting for process %s, which holds %s", holder or "unknown", lock.name)
                has_told = True
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in _CANNOT_LOCK:
                raise
            logger.warning(
                "the file system of %s has no locks (%s): nothing protects %s",
                lock.name,
                error.strerror,
                what,
            )
            return False
        else:
            if not os.fstat(lock.fileno()).st_nlink:  # removed by its holder: it protects nothing any more
                raise LockedElsewhereError(f"{lock.name} was removed by the process that held it")
            return True


def _lock(lock: IO[str]) -> None:
    if sys.platform == "win32":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except PermissionError as error:  # how some network shares say that a lock is held
        raise BlockingIOError(*error.args) from error


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ValueError, PermissionError):
        return True  # unknown, or somebody else's
    except ProcessLookupError:
        return False
    return True


def is_held(path: Path) -> bool | None:
    """Return whether a process holds a lock file; None if that cannot be known.

    Args:
        path: What ``sole_holder`` was given.
    """
    try:
        with path.open("rb") as lock:
            if sys.platform == "win32":
                return None
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except (BlockingIOError, PermissionError):
        return True
    except OSError:
        return None
