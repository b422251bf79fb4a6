"""Images that cannot be used, and images that training and testing share.

Shapes: N images of a split.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray

from vbm_ptm.data.images import check_images
from vbm_ptm.data.sources import SourceSplit

_ROWS_AT_ONCE = 10_000
_END_BYTES = 2048


def undecodable_images(split: SourceSplit) -> dict[int, str]:
    """Return position -> problem of images that cannot be decoded; every image is read."""
    return check_images(
        lambda index: split.rows[index]["image"],
        lambda index: str(split.source_names[index].as_py()),
        len(split.labels),
    )


def empty_images(split: SourceSplit) -> dict[int, str]:
    """Return position -> problem of images without bytes, or whose file is missing or empty; no image is read."""
    sizes = image_sizes(split.rows)
    return {
        position: f"cannot read image '{split.source_names[position].as_py()}': "
        + ("there is no such file." if sizes[position] < 0 else "the file is empty.")
        for position in np.flatnonzero(sizes <= 0).tolist()
    }


def image_sizes(rows: Dataset) -> NDArray[np.int64]:
    """Return (N,) the encoded size of every image in bytes; -1 where its file is missing."""
    sizes: list[int] = []
    for part in _parts(rows):
        lengths = pc.binary_length(part.field("bytes")).to_pylist()
        paths = part.field("path").to_pylist() if None in lengths else [None] * len(lengths)
        sizes += (
            _file_size(path) if length is None else length
            for length, path in zip(lengths, paths, strict=True)
        )
    return np.array(sizes, dtype=np.int64)


def shared_images(one: Dataset, other: Dataset) -> list[tuple[int, int]]:
    """Return pairs of positions whose images have the same bytes, in order of the second.

    Of images of equal size the last bytes are compared by hash, and only if those agree all bytes are.

    Args:
        one: Rows with a column ``image``.
        other: The same.
    """
    sizes = image_sizes(one), image_sizes(other)
    common = np.intersect1d(*sizes)
    candidates = [np.flatnonzero(np.isin(each, common[common > 0])).tolist() for each in sizes]
    for is_whole in (False, True):
        digests = [
            {position: _digest(rows, position, is_whole=is_whole) for position in positions}
            for rows, positions in zip((one, other), candidates, strict=True)
        ]
        common_digests = set(digests[0].values()) & set(digests[1].values())
        candidates = [
            [position for position, digest in each.items() if digest in common_digests] for each in digests
        ]
    first = {digests[0][position]: position for position in reversed(candidates[0])}
    return [(first[digests[1][position]], position) for position in candidates[1]]


def _parts(rows: Dataset) -> Iterator[Any]:
    """Yield the image column piece by piece, so that a table larger than memory is never copied whole."""
    table = rows.with_format("arrow")
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        yield from table[start : start + _ROWS_AT_ONCE].column("image").chunks


def _file_size(path: str | None) -> int:
    try:
        return os.stat(path or "").st_size
    except OSError:
        return -1


def _digest(rows: Dataset, position: int, *, is_whole: bool) -> bytes:
    """Hash size and last bytes of an image, or all of it."""
    image = rows[position]["image"]
    content: bytes | None = image["bytes"]
    if content is None and is_whole:
        content = Path(image["path"]).read_bytes()
    elif content is None:
        with open(image["path"], "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            return hashlib.blake2b(file.read() + str(size).encode(), digest_size=16).digest()
    elif not is_whole:
        content = content[-_END_BYTES:] + str(len(content)).encode()
    return hashlib.blake2b(content, digest_size=16).digest()
