"""Files that are there as a whole or not at all."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from vbm_ptm.storage import durable_files
from vbm_ptm.storage.durable_files import (
    remove_directory,
    remove_partials,
    write_directory,
    write_file,
    write_json,
)


def test_write_json__replaces_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "result.json"
    write_json(path, {"name": "Tür"})
    write_json(path, {"name": "Tür", "values": [1, 2]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"name": "Tür", "values": [1, 2]}
    assert "Tür" in path.read_text(encoding="utf-8")
    assert [child.name for child in path.parent.iterdir()] == ["result.json"]


def test_write__leaves_nothing_behind_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "file", b"old")
    write_directory(tmp_path / "folder", {"a": b"old"})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vbm_ptm.storage.durable_files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "file", b"new")
    with pytest.raises(OSError, match="No space"):
        write_directory(tmp_path / "new folder", {"a": b"new", "b": b""})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_remove_partials__removes_what_a_killed_process_left(tmp_path: Path) -> None:
    write_file(tmp_path / ".kept", b"")
    (tmp_path / ".file.partial").touch()
    write_directory(tmp_path / ".folder.partial", {"a": b""})
    remove_partials(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".kept"]
    remove_partials(tmp_path / "absent")


def test_remove_directory__is_seen_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_directory(tmp_path / "folder", {"a": b"", "b": b""})

    def killed(path: Path) -> None:
        (path / "a").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_directory(tmp_path / "folder")
    assert [path.name for path in tmp_path.glob("[!.]*")] == []
    write_directory(tmp_path / "folder", {"a": b"", "b": b""})
    remove_directory(tmp_path / "folder")  # what the killed process left is in nobody's way
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["a directory", "a file"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK], ids=os.strerror)
def test_write__goes_on_where_nothing_can_be_forced_to_the_disk(
    code: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says once what is not protected; what is written is whole all the same."""

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (kind == "a directory"):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr("vbm_ptm.storage.durable_files.os.fsync", refuse)
    durable_files._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        write_file(tmp_path / "file", b"new")
        write_directory(tmp_path / "folder", {"a": b"new", "b": b""})
    assert (tmp_path / "file").read_bytes() == (tmp_path / "folder" / "a").read_bytes() == b"new"
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"cannot force {kind} to disk ({os.strerror(code)})" in message
    assert "power cut" in message


def test_write__goes_on_where_a_directory_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that may be written to and not read, or on a file system that opens none."""
    real = os.open

    def refuse(path: Any, flags: int, *arguments: Any) -> int:
        if flags == os.O_RDONLY and Path(path).is_dir():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, flags, *arguments)

    monkeypatch.setattr("vbm_ptm.storage.durable_files.os.open", refuse)
    durable_files._warn_once.cache_clear()
    write_file(tmp_path / "file", b"new")
    write_directory(tmp_path / "folder", {"a": b"new"})
    assert (tmp_path / "file").read_bytes() == (tmp_path / "folder" / "a").read_bytes() == b"new"
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"cannot force a directory to disk ({os.strerror(errno.EACCES)})" in message
