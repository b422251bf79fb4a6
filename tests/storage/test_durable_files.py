"""Files that are there as a whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vbm_ptm.storage.durable_files import remove_partials, write_directory, write_file, write_json


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
