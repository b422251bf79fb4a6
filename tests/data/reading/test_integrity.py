from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset

from vbm_ptm.data.image_rows import ImageRows, ImageTable
from vbm_ptm.data.reading.integrity import image_sizes, shared_images
from vbm_ptm.errors import UnreachableError


def rows(*images: dict[str, Any]) -> ImageRows:
    table = Dataset.from_dict({"image": list(images)}).cast_column("image", datasets.Image(decode=False))
    return ImageRows([ImageTable(table)])


def stored(content: bytes | None, path: Path | None = None) -> dict[str, Any]:
    return {"bytes": content, "path": None if path is None else str(path)}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three files, two of them of the same size and with the same last bytes."""
    contents = [b"a" + bytes(5000), b"b" + bytes(5000), b"other"]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    return [tmp_path / str(number) for number in range(3)]


def test_image_sizes__of_bytes_and_files(files: list[Path], tmp_path: Path) -> None:
    table = rows(
        stored(b"1234"), stored(None, files[2]), stored(b""), stored(None, tmp_path / "none"), stored(None)
    )
    assert image_sizes(table).tolist() == [4, 5, 0, -1, -1]
    assert image_sizes(table.select(np.array([4, 1, 0], dtype=np.int64))).tolist() == [-1, 5, 4]
    assert image_sizes(rows(stored(b"12")).select(np.array([], dtype=np.int64))).tolist() == []


def test_shared_images__are_those_of_the_same_bytes(files: list[Path]) -> None:
    one = rows(stored(None, files[0]), stored(b"other"), stored(b"x"), stored(b""), stored(b"other"))
    other = rows(
        stored(None, files[2]), stored(None, files[1]), stored(b"a" + bytes(5000)), stored(b""), stored(b"x")
    )
    assert shared_images(one, other) == [(1, 0), (0, 2), (2, 4)]
    assert (
        shared_images(
            one.select(np.array([2], dtype=np.int64)), other.select(np.array([0, 1], dtype=np.int64))
        )
        == []
    )


def test_shared_images__survives_a_file_that_goes_away(files: list[Path]) -> None:
    assert shared_images(rows(stored(None, files[0])), rows(stored(None, files[0].parent / "none"))) == []


def test_image_sizes__are_not_minus_one_where_the_system_does_not_say(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Any) -> Any:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(UnreachableError, match=os.strerror(errno.ESTALE)):
        image_sizes(rows(stored(None, files[0])))
