"""Which parquet files of a folder hold which split, as their names tell, with all numbered parts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from vbm_ptm.data.reading.folders import TEST_SPLIT_NAMES
from vbm_ptm.errors import UsageError, some_lines, some_names, unknown_name

T = TypeVar("T")

_READ_NAMES = (
    "<split>.parquet, <split>-00000-of-00002.parquet ..., or <split>/part-0.parquet ..., here or in data/"
)

# How the name of a numbered part ends, for Hugging Face (-00000-of-00002-0a1b2c) and others (-0, _1).
_PART = r"[-_.]?(\d+)(?:-of-(\d+)(?:-[0-9a-f]{3,})?)?"
# Any name of a part within a split's own folder: 0000, part-0, part-00000-5e0b...-c000.snappy.
_ANY_PART = re.compile(r"((?:[^\W\d]+[-_.]?)*)(\d+)(?:-of-(\d+))?(?:[-_.].*)?\.parquet", re.IGNORECASE)


@dataclass(frozen=True)
class TableFiles:
    """The parquet files of one folder.

    Attributes:
        splits: Name of a split -> its files, in order.
        ignored: Names of the other parquet files, below the folder.
    """

    splits: dict[str, list[Path]]
    ignored: tuple[str, ...]


def find_tables(root: Path, *, train_split: str, test_split: str | None) -> TableFiles | None:
    """Return the files of every split of a folder; None if it holds no tables.

    Raises:
        UsageError: Parts are missing or duplicated, or a name does not say which split it belongs to.
    """
    for folder in (root, root / "data"):
        files = _parquet_files(folder)
        splits = {
            name: found
            for name in (train_split, *_other_names(train_split, test_split))
            if (found := [*_files_of(name, files), *_files_inside(folder, name)])
        }
        for name, found in splits.items():
            _refuse_incomplete(found, name)
        if not splits and files and not (folder / "metadata.parquet" in files and len(files) == 1):
            splits = {"train": _only_table(folder, files, train_split)}
        if splits:
            read = {file for found in splits.values() for file in found}
            others = (
                file for each in {file.parent for file in read} | {folder} for file in _parquet_files(each)
            )
            ignored = sorted(file.relative_to(root).as_posix() for file in {*others} - read)
            return TableFiles(splits, tuple(ignored))
    return None


def refuse_tables_below(root: Path) -> None:
    """Raise if tables lie in sub-folders that are not splits."""
    below = sorted(
        {file.parent for pattern in ("*/*.parquet", "*/*/*.parquet") for file in root.glob(pattern)}
    )
    keys = sorted({folder.name.partition("=")[0] for folder in below if "=" in folder.name})
    if keys:
        raise UsageError(
            f"dataset.path: the tables below '{root}' are partitioned by a column that only the names of their "
            f"folders hold, which is not read: {some_names(folder.relative_to(root).as_posix() for folder in below)}. "
            f"Write a table with the column {some_names(keys)}."
        )
    if below:
        raise UsageError(
            f"dataset.path: the tables below '{root}' are in folders that are not splits: "
            f"{some_names(folder.relative_to(root).as_posix() for folder in below)}. Set dataset.path to one of them, "
            "or dataset.train_split and dataset.test_split to their names."
        )


def pick_splits(
    splits: Mapping[str, T], location: str, *, train_split: str, test_split: str | None
) -> tuple[T, T | None, str | None]:
    """Return the training split, the test split and its name, if there is one besides the training split.

    For "test", its usual other names are looked for too; None is for no test split.
    """
    if train_split not in splits:
        raise UsageError(f"in '{location}': {unknown_name('dataset.train_split', train_split, splits)}")
    if test_split not in (None, "test", *splits):
        raise UsageError(
            f"in '{location}': {unknown_name('dataset.test_split', str(test_split), splits)} Null holds images out."
        )
    wanted = {None: (), "test": TEST_SPLIT_NAMES}.get(test_split, (str(test_split),))
    name = next((name for name in wanted if name in splits and name != train_split), None)
    return splits[train_split], splits[name] if name else None, name


def _other_names(train_split: str, test_split: str | None) -> list[str]:
    """Return the names of splits to look for beside the training split, whose files are told by names of any case."""
    names = [*([test_split] if test_split else []), *TEST_SPLIT_NAMES]
    return [name for name in names if name.casefold() != train_split.casefold()]


def _parquet_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    names = (file for file in folder.iterdir() if file.suffix.lower() == ".parquet")
    return sorted(file for file in names if file.is_file() and not file.name.startswith((".", "_")))


def _files_of(split: str, files: Iterable[Path]) -> list[Path]:
    pattern = re.compile(rf"{re.escape(split)}(?:{_PART})?\.parquet", re.IGNORECASE)
    return [file for file in files if pattern.fullmatch(file.name)]


def _files_inside(folder: Path, split: str) -> list[Path]:
    """Return the files in a split's own folder: one of any name, or numbered parts."""
    for name in (split, f"split={split}", f"{split}.parquet"):
        # metadata.parquet describes the images of a folder
        files = [file for file in _parquet_files(folder / name) if file.name != "metadata.parquet"]
        if len(files) <= 1 and files:
            return files
        parts = [file for file in files if _ANY_PART.fullmatch(file.name)]
        if files and not parts:
            raise UsageError(
                f"'{folder / name}' holds {len(files)} tables that are not numbered as parts of one: "
                f"{some_names(file.name for file in files)}. Accepted are {_READ_NAMES}."
            )
        if parts:
            return parts
    return []


def _only_table(folder: Path, files: Sequence[Path], train_split: str) -> list[Path]:
    """Return the files of a table whose name names no split: one file, or its parts."""
    beside = [entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    if beside:
        raise UsageError(
            f"'{folder}' reads two ways: as a table ({some_names((file.name for file in files), limit=3)}) and as "
            f"folders ({some_names(beside, limit=3)}). Set dataset.path to the table's file, or move it elsewhere."
        )
    prefixes = {match[1] if (match := _ANY_PART.fullmatch(file.name)) else file.name for file in files}
    if len(prefixes) > 1 or train_split != "train":
        stems = sorted({re.split(r"[-_.]", file.name)[0] for file in files})
        raise UsageError(
            f"in '{folder}': {unknown_name('dataset.train_split', train_split, stems)} Accepted are {_READ_NAMES}."
        )
    if len(files) > 1:
        _refuse_incomplete(files, files[0].name)
    return list(files)


def _refuse_incomplete(files: Sequence[Path], split: str) -> None:
    """Raise if numbered parts of a split are missing or duplicated."""
    if len(files) == 1 and not re.search(r"-of-\d+", files[0].name):
        return
    numbers: list[tuple[int, int | None]] = []
    folders = {file.parent for file in files}
    for file in files:
        match = re.search(_PART + r"\.parquet$", file.name, re.IGNORECASE) or _ANY_PART.fullmatch(file.name)
        groups = match.groups()[-2:] if match else (None, None)
        numbers.append((int(groups[0]) if groups[0] else -1, int(groups[1]) if groups[1] else None))
    given = Counter(number for number, _ in numbers)
    totals = {total for _, total in numbers}
    names = some_lines([file.name for file in files], limit=6)
    if len(totals) > 1 or len(folders) > 1 or -1 in given or max(given.values()) > 1:
        raise UsageError(
            f"'{files[0].parent}' holds the split '{split}' more than once, or parts of several: {names}. "
            "Keep one of them."
        )
    (total,) = totals
    first = 0 if total is not None or 0 in given else 1
    wanted = range(first, first + total) if total is not None else range(first, max(given) + 1)
    missing = list(islice((number for number in wanted if number not in given), 10))
    extra = sorted(given.keys() - set(wanted))
    if missing or extra:
        raise UsageError(
            f"'{files[0].parent}' does not hold all parts of the split '{split}': "
            + (
                f"part {', '.join(map(str, missing))} is missing"
                if missing
                else f"part {extra[0]} is too many"
            )
            + f" (there are: {names}). Restore it, or write the table again."
        )
