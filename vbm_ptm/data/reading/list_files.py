"""Lists of files that say which image is for training and which for testing: how they are found, read and written.

CSV (columns path and split, or only path if the file stands for one split; optionally label and domain), YAML with
lists ``data`` and ``targets``, or text with ``path`` or ``path label`` on each line.

Shapes: M entries of all lists.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard

import yaml
from pydantic import AfterValidator, BeforeValidator

from vbm_ptm.data.images import IMAGE_SUFFIXES
from vbm_ptm.data.record import ListRecord
from vbm_ptm.errors import UsageError, did_you_mean
from vbm_ptm.stand_ins import describe_stand_in

SplitName = Literal["train", "test"]

_Loader: type[Any] = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # ten times slower without the C library


def _absolute_if_here(name: str) -> str:
    if not _matches(Path(), name) or os.path.isabs(os.path.expanduser(name)):
        return os.path.expanduser(name)
    is_pattern = not os.path.isfile(name)
    return os.path.join(glob.escape(os.getcwd()) if is_pattern else os.getcwd(), os.path.normpath(name))


def _one_or_several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


# Files, or patterns of files, in the current directory (then kept as absolute paths), or below dataset.path.
ListFiles = Annotated[
    tuple[Annotated[str, AfterValidator(_absolute_if_here)], ...], BeforeValidator(_one_or_several)
]


class ListEntry(NamedTuple):
    """What a list says about one image; None where it says nothing."""

    path: str
    split: SplitName
    label: str | None
    domain: str | None


@dataclass(frozen=True)
class SplitLists:
    """The lists of a data set.

    Attributes:
        entries: M entries, file by file.
        record: What was read, for the result of a run.
    """

    entries: list[ListEntry] = field(default_factory=list)
    record: list[ListRecord] = field(default_factory=list)


def read_lists(
    root: Path | None, *, split_file: Path | None, train_list: Sequence[str], test_list: Sequence[str]
) -> SplitLists:
    """Read the list files of a data set.

    Args:
        root: Where files with a relative name lie.
        split_file: A CSV file with a column ``split``.
        train_list: Files or patterns that list training images.
        test_list: The same for testing.

    Raises:
        UsageError: A file is missing or cannot be read as a list.
    """
    wanted: list[tuple[Path, SplitName | None]] = []
    problems: list[str] = []
    if split_file is not None:
        wanted.append((split_file, None))
    named: tuple[tuple[SplitName, Sequence[str]], ...] = (("train", train_list), ("test", test_list))
    for split, names in named:
        for name in names:
            files = _matches(root or Path(), name)
            if not files:
                problems.append(_no_file(f"dataset.{split}_list", name, root or Path()))
            wanted += ((file, split) for file in files)
    lists = SplitLists()
    for file, split_of_file in wanted:
        try:
            content = file.read_bytes()
            stand_in = describe_stand_in(content)
            if stand_in:
                raise UsageError(f"the list '{file}' is {stand_in}.")
            entries = _parse(content.decode("utf-8-sig"), file, split_of_file)
        except OSError as error:
            problems.append(f"cannot read the list '{file}': {error.strerror}.")
        except UnicodeDecodeError:
            problems.append(f"cannot read the list '{file}': it is not UTF-8 text.")
        except UsageError as error:
            problems += error.problems
        else:
            lists.entries.extend(entries)
            lists.record.append(
                ListRecord(
                    file=str(file),
                    split=split_of_file or "both",
                    sha256=hashlib.sha256(content).hexdigest(),
                    images=len(entries),
                )
            )
    if problems:
        raise UsageError(*problems)
    return lists


def write_split_file(path: Path, rows: Iterable[tuple[str, SplitName, str, str | None]]) -> None:
    """Write a CSV file that ``dataset.split_file`` takes.

    Args:
        path: The file; it must not exist.
        rows: Path (or name of the row), split, class name and, if there is one, domain of every image.

    Raises:
        UsageError: The file exists already.
    """
    lines = sorted(rows, key=lambda row: (row[1] == "test", row[0]))
    has_domains = any(row[3] is not None for row in lines)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["path", "split", "label", *(["domain"] if has_domains else [])])
    writer.writerows(row if has_domains else row[:3] for row in lines)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise UsageError(f"{path} lies below {folder}, which is a file; give another path.")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())
    except FileExistsError:
        raise UsageError(f"'{path}' exists already: remove it, or give another path.") from None


def _matches(root: Path, name: str) -> list[Path]:
    """Return the file of that name, or those that a pattern stands for."""
    name = os.path.expanduser(name)
    path = os.path.join(root, name)
    found = (
        [path] if os.path.isfile(path) else sorted(glob.glob(name, root_dir=root))
    )  # the root is not a pattern
    return [file for file in (Path(root, each) for each in found) if file.is_file()]


def _no_file(key: str, name: str, root: Path) -> str:
    folder = (root / name).parent
    beside = [entry.name for entry in folder.iterdir() if entry.is_file()] if folder.is_dir() else []
    hint = did_you_mean(Path(name).name, beside, folder=folder)
    return (
        f"{key}: no file '{name}' in the current directory or in '{root}'.{hint} Put it there, or set "
        "dataset.train_list and dataset.test_list to other files, or both to null: a part of every class is then held "
        "out for testing."
    )


def _parse(text: str, file: Path, split: SplitName | None) -> list[ListEntry]:
    suffix = file.suffix.lower()
    if suffix == ".csv" or split is None:
        return _parse_csv(text, file, split)
    entries = _parse_yaml(text, file, split) if suffix in (".yaml", ".yml") else _parse_text(text, split)
    if not entries:
        raise UsageError(f"the list '{file}' names no image.")
    return entries


def _parse_csv(text: str, file: Path, split: SplitName | None) -> list[ListEntry]:
    rows = csv.reader(io.StringIO(text), strict=True)
    try:
        header = [name.strip().lower() for name in next(rows, [])]
        lines = [row for row in rows if row]
    except csv.Error as error:
        raise UsageError(f"the list '{file}' is not a CSV file: line {rows.line_num}: {error}.") from None
    wanted = ("path", "split") if split is None else ("path",)
    missing = [name for name in wanted if name not in header]
    if missing:
        raise UsageError(
            f"the list '{file}' has no column {', '.join(map(repr, missing))}. Its first line must name the columns: "
            "path, split (train or test) and, optionally, label and domain."
        )
    if split is not None and "split" in header:
        raise UsageError(f"the list '{file}' has a column 'split': give it as dataset.split_file.")
    column = {name: header.index(name) for name in ("path", "split", "label", "domain") if name in header}
    entries: list[ListEntry] = []
    for number, row in enumerate(lines, start=2):
        if len(row) != len(header):
            raise UsageError(f"the list '{file}', row {number}: {len(row)} values for {len(header)} columns.")
        given = split or row[column["split"]].strip().lower()
        if given not in ("train", "test"):
            raise UsageError(
                f"the list '{file}', row {number}: the split is '{given}'; allowed: train, test. "
                "Leave out the rows of other splits."
            )
        label = row[column["label"]] if "label" in column else None
        domain = row[column["domain"]] if "domain" in column else None
        entries.append(ListEntry(row[column["path"]], "test" if given == "test" else "train", label, domain))
    if not entries:
        raise UsageError(f"the list '{file}' names no image.")
    return entries


def _parse_yaml(text: str, file: Path, split: SplitName) -> list[ListEntry]:
    try:
        tree = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UsageError(f"the list '{file}' is not valid YAML: {error}") from None
    paths = tree.get("data") if isinstance(tree, dict) else tree
    labels = tree.get("targets") if isinstance(tree, dict) else None
    if not _is_list_of_text(paths) or not (labels is None or _is_list_of_text(labels)):
        raise UsageError(
            f"the list '{file}' must hold a list 'data' of paths and, optionally, a list 'targets' of labels."
        )
    if labels is not None and len(labels) != len(paths):
        raise UsageError(f"the list '{file}' has {len(paths)} paths in 'data', but {len(labels)} 'targets'.")
    given: Sequence[str | None] = labels if labels is not None else [None] * len(paths)
    return [ListEntry(path, split, label, None) for path, label in zip(paths, given, strict=True)]


def _is_list_of_text(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _parse_text(text: str, split: SplitName) -> list[ListEntry]:
    entries: list[ListEntry] = []
    for line in text.split("\n"):
        parts = line.strip().rsplit(maxsplit=1)
        if len(parts) == 2 and (parts[1].isdecimal() or not _names_image(line.strip())):
            entries.append(ListEntry(parts[0], split, parts[1], None))
        elif parts:
            entries.append(ListEntry(line.strip(), split, None, None))
    return entries


def _names_image(path: str) -> bool:
    return os.path.splitext(path)[1].lower() in IMAGE_SUFFIXES
