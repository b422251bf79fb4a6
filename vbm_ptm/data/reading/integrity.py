"""Images that cannot be used, and images shared by training and testing.

Shapes: N images of a split.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vbm_ptm.data.image_rows import ImageRows
from vbm_ptm.data.images import called, check_images, has_flat_shape, is_unreachable, no_such_file
from vbm_ptm.data.reading.sources import Source, SourceSplit, select
from vbm_ptm.errors import UnreachableError, some_names

Verification = Literal["auto", "full", "none"]

logger = logging.getLogger(__name__)

_MAX_IMAGES_FOR_FULL_CHECK = 20_000
_NUM_SAMPLES = 50
_FILES_PER_THREAD = 1000
_END_BYTES = 2048


class Checks(NamedTuple):
    """How the images of a source were checked.

    Attributes:
        verified: What was checked, in words.
        skipped_images: Names of bad images that were left out.
    """

    verified: str
    skipped_images: tuple[str, ...] = ()


def check_source(
    source: Source, *, name: str, verify: Verification, skips: bool, missing: Sequence[str]
) -> tuple[Source, Checks, list[str]]:
    """Look for bad images, including listed ones that are missing; leave them out or report them.

    Args:
        source: Where the images come from.
        name: What messages call the data set.
        verify: Decode every image (full), look for empty and missing files (none: not even that); auto is full up to
            20,000 images.
        skips: Leave bad images out; every image is then decoded.
        missing: Listed files that do not exist.

    Returns:
        The source without its bad images, how they were checked, and what is wrong, one line per image.
    """
    splits = [split for split in (source.train, source.test) if split is not None]
    total = sum(len(split.labels) for split in splits) + len(missing)
    is_checked = source.record.kind != "builtin" and verify != "none"
    full = is_checked and (skips or verify == "full" or total <= _MAX_IMAGES_FOR_FULL_CHECK)
    if is_checked and not full:
        logger.info(
            "%s: %d images: before training only empty and missing files are searched for; "
            "dataset.verify=full decodes every image.", name, total,
        )  # fmt: skip
    find = undecodable_images if full else empty_images
    bad = [find(split) if is_checked else {} for split in splits]
    problems = [f"cannot read image '{path}': it is listed, but there is no such file." for path in missing]
    problems += [problem for found in bad for problem in found.values()]
    verified = "every image decoded" if full else "no empty or missing files" if is_checked else "nothing"
    checks = Checks(verified)
    if not problems:
        return source, checks, []
    if not skips:
        summary = (
            f"data set '{name}': {len(problems)} of {total} images are bad. Replace or delete them, or set "
            "dataset.on_bad_image=skip:"
        )
        return source, checks, [summary, *problems]
    for problem in problems:
        logger.warning("%s: skipped: %s", name, problem)
    kept = [
        select(split, np.array([i for i in range(len(split.labels)) if i not in found], dtype=np.int64))
        for split, found in zip(splits, bad, strict=True)
    ]
    lost = sorted(
        {source.train.label_names[label] for label in np.unique(source.train.labels)}
        - {kept[0].label_names[label] for label in np.unique(kept[0].labels)}
    )
    if lost:
        summary = f"data set '{name}': without its bad images these classes have no training image: {some_names(lost)}."
        return source, checks, [summary, *problems]
    skipped = (
        split.source_names[index].as_py() for split, found in zip(splits, bad, strict=True) for index in found
    )
    source = replace(source, train=kept[0], test=kept[1] if len(kept) > 1 else None)
    return source, Checks(verified, (*missing, *skipped)), []


def undecodable_images(split: SourceSplit) -> dict[int, str]:
    """Return position -> problem for images that cannot be decoded; every image is read."""
    return check_images(
        lambda index: split.rows[index]["image"],
        lambda index: str(split.source_names[index].as_py()),
        len(split.labels),
    )


def empty_images(split: SourceSplit) -> dict[int, str]:
    """Return position -> problem for images without bytes, or with a missing or empty file; no image is read."""
    sizes = image_sizes(split.rows)
    problems: dict[int, str] = {}
    for position in np.flatnonzero(sizes <= 0).tolist():
        path = (split.rows[position]["image"] or {}).get("path")
        problem = "the file is empty" if sizes[position] == 0 else no_such_file(path)
        problems[position] = (
            f"cannot read image '{called(str(split.source_names[position].as_py()), path)}': {problem}."
        )
    return problems


def image_sizes(rows: ImageRows) -> NDArray[np.int64]:
    """Return (N,) the encoded size of every image in bytes; -1 where its file is missing.

    Raises:
        UnreachableError: The system cannot tell.
    """
    sizes = rows.sizes()
    in_files = np.flatnonzero(sizes < 0)
    if len(in_files):
        sizes[in_files] = _file_sizes(rows.select(in_files).files())
    return sizes


def flat_images(split: SourceSplit) -> str | None:
    """Return a warning if every image is one pixel high or wide; a few across the split are looked at."""
    positions = np.unique(np.linspace(0, len(split.rows) - 1, min(len(split.rows), _NUM_SAMPLES), dtype=int))
    if not len(positions) or not all(
        has_flat_shape(split.rows[position]["image"]) for position in positions.tolist()
    ):
        return None
    return (
        f"every image of the {split.name} split is one pixel high or wide, like strips of numbers that were "
        "mistaken for images"
    )


def shared_images(one: ImageRows, other: ImageRows) -> list[tuple[int, int]]:
    """Return pairs of positions whose images have the same bytes, in order of the second.

    For images of equal size the last bytes are compared by hash, and all bytes only if those agree.

    Args:
        one: Undecoded images.
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


def _file_sizes(paths: Sequence[str | None]) -> list[int]:
    """Check files on a few threads: on a network drive each of them waits for an answer."""

    def sizes(part: Sequence[str | None]) -> list[int]:
        return [_file_size(path) for path in part]

    parts = [paths[start : start + _FILES_PER_THREAD] for start in range(0, len(paths), _FILES_PER_THREAD)]
    with ThreadPoolExecutor(max_workers=16) as pool:
        return [size for found in pool.map(sizes, parts) for size in found]


def _file_size(path: str | None) -> int:
    try:
        return os.stat(path or "").st_size
    except OSError as error:
        if is_unreachable(error):
            raise UnreachableError(f"cannot read image '{path}': {error.strerror}.") from error
        return -1


def _digest(rows: ImageRows, position: int, *, is_whole: bool) -> bytes:
    """Hash the size and last bytes of an image, or all of it."""
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
