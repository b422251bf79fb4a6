"""One holder at a time, and file systems without locks."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import pytest

from vbm_ptm.storage.locking import LockedElsewhereError, sole_holder


def test_sole_holder__writes_who_holds_the_file_and_lets_go(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    for _ in range(2):
        with sole_holder(lock, what="x"):
            assert lock.read_text() == str(os.getpid())
            with pytest.raises(LockedElsewhereError, match=str(os.getpid())), sole_holder(lock, what="x"):
                pytest.fail("two holders")
            assert lock.read_text() == str(os.getpid())


def test_sole_holder__waits_for_a_living_holder_as_long_as_it_is_told(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    program = (
        "import sys, time; from pathlib import Path; from vbm_ptm.storage.locking import sole_holder\n"
        f"with sole_holder(Path({str(lock)!r}), what='x'):\n    print(flush=True); time.sleep(0.5)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(LockedElsewhereError), sole_holder(lock, what="x", patience=0.1):
            pytest.fail("two holders")
        with sole_holder(lock, what="x", patience=30):
            assert lock.read_text() == str(os.getpid())


def test_sole_holder__does_not_take_a_file_that_its_holder_has_removed(tmp_path: Path) -> None:
    lock = tmp_path / ".lock"

    def remove(file: IO[str]) -> None:
        lock.unlink()
        file.close()

    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        timer = threading.Timer(0.05, remove, (file,))
        timer.start()
        with (
            pytest.raises(LockedElsewhereError, match="was removed"),
            sole_holder(lock, what="x", patience=30),
        ):
            pytest.fail("holds a file that others cannot find")
        timer.join()


@pytest.mark.parametrize(
    "code", [errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP], ids=os.strerror
)
def test_sole_holder__goes_on_without_locks_and_says_what_is_not_protected(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    entered = False
    with caplog.at_level(logging.WARNING), sole_holder(tmp_path / ".lock", what="the run"):
        entered = True
    assert entered
    assert "nothing protects the run" in caplog.text
    assert os.strerror(code) in caplog.text


def test_sole_holder__passes_on_other_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), sole_holder(tmp_path / ".lock", what="x"):
        pytest.fail("held a lock that failed")


def test_sole_holder__takes_a_refusal_of_permission_for_a_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(LockedElsewhereError), sole_holder(tmp_path / ".lock", what="x"):
        pytest.fail("two holders")
