"""Undecoded images by row number, from Arrow tables that stay on disk.

Shapes: N rows.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray

Integers = NDArray[np.int64]

_END_BYTES = 2048


@dataclass(frozen=True)
class ImageTable:
    """Images of one table.

    Attributes:
        rows: A column ``image`` of structures with the fields bytes and path and, if they are known, a column
            ``content`` with the ``content_id`` of every image.
        folder: Where relative paths start from; None for the current directory.
    """

    rows: Dataset
    folder: Path | None = None


class ImageRows:
    """N images of one or several tables in any order.

    A pickle holds the names of the tables' files, if there are any, but none of their images.

    Args:
        tables: The tables; their rows are numbered consecutively.
        positions: (N,) numbers of rows in all tables; None for all of them in order.
    """

    def __init__(self, tables: Sequence[ImageTable], positions: Integers | None = None) -> None:
        self.tables = tuple(tables)
        # Chunks are looked up by hand: a row costs a few microseconds, and the tables are never concatenated.
        columns = [(table, table.rows.data.column("image")) for table in self.tables]
        self._chunks = [(chunk, table) for table, column in columns for chunk in column.chunks if len(chunk)]
        self._starts = np.cumsum([0, *(len(chunk) for chunk, _ in self._chunks)])
        self.positions = np.arange(self._starts[-1]) if positions is None else positions

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = int(self.positions[index])
        number = int(np.searchsorted(self._starts, row, side="right")) - 1
        chunk, table = self._chunks[number]
        value: dict[str, Any] | None = chunk[row - int(self._starts[number])].as_py()
        if value and table.folder and value["bytes"] is None and value["path"]:
            value["path"] = _file_at(value["path"], table.folder)
        return {"image": value}

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageRows, (self.tables, self.positions)

    def select(self, positions: Integers) -> ImageRows:
        """Return some rows, in the order given."""
        return ImageRows(self.tables, self.positions[positions])

    def chained(self, other: ImageRows) -> ImageRows:
        """Return these rows, followed by those of another object."""
        shifted = other.positions + self._starts[-1]
        return ImageRows((*self.tables, *other.tables), np.concatenate([self.positions, shifted]))

    def sizes(self) -> Integers:
        """Return (N,) the number of encoded bytes in the tables; -1 where a row holds none."""
        lengths = [
            pc.fill_null(pc.cast(pc.binary_length(pc.struct_field(chunk, "bytes")), pa.int64()), -1)
            for chunk, _ in self._chunks
        ]
        return self._taken([each.to_numpy(zero_copy_only=False) for each in lengths], np.int64)

    def paths(self) -> list[str | None]:
        """Return (N,) the path of every row, relative to its table's folder if it lies below that."""
        return self._paths(lambda path, prefix: path.removeprefix(prefix).removeprefix("./"))

    def files(self) -> list[str | None]:
        """Return (N,) the path where the file of every row is looked for."""
        return self._paths(_file_at)

    def _paths(self, of: Callable[[str, str], str]) -> list[str | None]:
        found: list[str | None] = []
        for chunk, table in self._chunks:
            prefix = os.path.join(table.folder or "", "")
            found += [path and of(path, prefix) for path in pc.struct_field(chunk, "path").to_pylist()]
        return [found[position] for position in self.positions.tolist()]

    def contents(self) -> list[str | None]:
        """Return (N,) the ``content_id`` of every row; None where it holds no bytes."""
        found: list[str | None] = []
        for table in self.tables:
            if "content" in table.rows.column_names:
                found += table.rows.data.column("content").to_pylist()
            else:
                for chunk in table.rows.data.column("image").chunks:
                    found += content_ids(chunk)
        return [found[position] for position in self.positions.tolist()]

    def _taken(self, parts: Sequence[NDArray[Any]], dtype: type) -> NDArray[Any]:
        return np.concatenate([*parts, np.empty(0, dtype)])[self.positions].astype(dtype)


def _file_at(path: str, folder: Path | str) -> str:
    """Return the location of a path in a table: URLs stay as they are, backslashes may come from another system."""
    if path.startswith("file://"):
        return url2pathname(urlsplit(path).path)
    if "://" in path:
        return path
    found = os.path.join(folder, path)
    if "\\" in path and not os.path.exists(found):
        return os.path.join(folder, path.replace("\\", "/"))
    return found


def content_ids(images: pa.StructArray) -> list[str | None]:
    """Return what identifies every image of a column; None where it holds no bytes.

    It covers size, first and last bytes: enough to tell images apart, without reading all of them.

    Args:
        images: Structures with the field ``bytes``.
    """
    return [None if content is None else _content_id(content) for content in _buffers(images)]


def _buffers(images: pa.StructArray) -> Iterator[memoryview | None]:
    for value in pc.struct_field(images, "bytes"):
        buffer = value.as_buffer()
        yield None if buffer is None else memoryview(buffer)


def _content_id(content: memoryview) -> str:
    digest = hashlib.blake2b(len(content).to_bytes(8, "little"), digest_size=16)
    digest.update(content[:_END_BYTES])
    digest.update(content[-_END_BYTES:] if len(content) > 2 * _END_BYTES else content[_END_BYTES:])
    return digest.hexdigest()
