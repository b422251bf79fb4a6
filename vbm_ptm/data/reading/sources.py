"""The places that images come from, opened as undecoded rows with a class name for each."""

from __future__ import annotations

import io
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, DatasetDict
from numpy.typing import NDArray
from PIL import Image

from vbm_ptm.data.reading.folders import (
    TEST_SPLIT_NAMES,
    FolderSplit,
    Layout,
    expected_tree,
    read_image_folder,
)
from vbm_ptm.data.record import SourceRecord
from vbm_ptm.errors import UsageError, nearest_name, unknown_name

logger = logging.getLogger(__name__)

DIGITS = "builtin:digits"
_HUB_TIMEOUT_SECONDS = 5.0
_EXPECTED_TABLE = "Give a parquet file, or a folder with train*.parquet and test*.parquet."

T = TypeVar("T")


class Columns(NamedTuple):
    """Names of the columns of a table source."""

    image: str
    label: str
    domain: str | None


@dataclass(frozen=True)
class SourceSplit:
    """One split as its source gives it (N images).

    Attributes:
        name: What the source calls it.
        rows: One column ``image``, undecoded.
        label_names: The class names this split knows, in their order.
        labels: (N,) int64, positions in `label_names`.
        domains: (N,) text, if the source has domains.
        source_names: (N,) what each row is called: its path below the root, or its row number.
    """

    name: str
    rows: Dataset
    label_names: tuple[str, ...]
    labels: NDArray[np.int64]
    domains: NDArray[np.str_] | None
    source_names: pa.Array


@dataclass(frozen=True)
class Source:
    """A source's splits, and what a result should say about it."""

    train: SourceSplit
    test: SourceSplit | None
    record: SourceRecord


def open_digits() -> Source:
    """Open scikit-learn's handwritten digits; every fifth of the 1797 images is for testing."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    numbers = np.arange(len(images))

    def split(name: str, chosen: NDArray[np.int64]) -> SourceSplit:
        return SourceSplit(
            name=name,
            rows=image_rows(_images([_png(images[number]) for number in chosen], [None] * len(chosen))),
            label_names=tuple(str(name) for name in digits.target_names),
            labels=digits.target[chosen].astype(np.int64),
            domains=None,
            source_names=pa.array([f"row {number}" for number in chosen]),
        )

    return Source(
        train=split("train", numbers[numbers % 5 != 0]),
        test=split("test", numbers[numbers % 5 == 0]),
        record=SourceRecord(kind="builtin", location=DIGITS),
    )


def open_path(path: Path, *, columns: Columns, layout: Layout, train_split: str, test_split: str) -> Source:
    """Open what stands at a path: an image folder, parquet files, or a saved Hugging Face data set."""
    path = path.expanduser()
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        nearest = nearest_name(path.name, siblings)
        hint = f" Did you mean '{path.parent / nearest}'?" if nearest else ""
        is_table = path.suffix.lower() == ".parquet"
        expected = _EXPECTED_TABLE if is_table else expected_tree(path, layout)
        raise UsageError(f"dataset.path: there is nothing at '{path}'.{hint} {expected}")
    path = path.absolute()
    if path.is_file():
        if path.suffix.lower() != ".parquet":
            raise UsageError(
                f"dataset.path: '{path}' is a file. Give an image folder, a parquet file, a folder of "
                f"parquet files, or a data set saved with save_to_disk. {expected_tree(path.parent)}"
            )
        return _open_parquet({"train": [path]}, path, columns)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _open_saved(path, columns, train_split, test_split)
    files = sorted(path.glob("*.parquet")) or sorted(path.glob("data/*.parquet"))
    if files:
        return _open_parquet(_parquet_splits(path, files, train_split, test_split), path, columns)
    if columns.domain is not None:
        raise UsageError(
            f"dataset.domain_column='{columns.domain}' names a column, but '{path}' is an image folder, "
            f"which has none. Set dataset.layout=domains for folders <domain>/<class>/, or leave the setting out."
        )
    return _open_folder(path, layout, train_split, test_split)


def open_hub(
    name: str,
    *,
    config_name: str | None,
    revision: str | None,
    columns: Columns,
    train_split: str,
    test_split: str,
) -> Source:
    """Open a data set of the Hugging Face hub, from the cache if it is there."""
    tables = _load_hub(name, config_name, revision)
    return open_tables(
        _pick_splits(dict(tables), name, train_split, test_split),
        columns=columns,
        record=SourceRecord(kind="hub", location=name, config_name=config_name, revision=revision),
    )


def open_tables(tables: tuple[Dataset, Dataset | None], *, columns: Columns, record: SourceRecord) -> Source:
    """Open a training table and, if there is one, a test table."""
    train, test = tables
    return Source(
        train=_table_split("train", train, columns),
        test=None if test is None else _table_split("test", test, columns),
        record=record,
    )


def _png(pixels: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def image_rows(images: pa.StructArray) -> Dataset:
    """Return rows with one column ``image`` of structures with the fields bytes and path, undecoded."""
    return Dataset(pa.table({"image": images})).cast_column("image", datasets.Image(decode=False))


def _images(contents: Sequence[bytes | None], paths: Sequence[str | None]) -> pa.StructArray:
    fields = [pa.array(contents, pa.binary()), pa.array(paths, pa.string())]
    return pa.StructArray.from_arrays(fields, names=["bytes", "path"])


def _open_folder(root: Path, layout: Layout, train_split: str, test_split: str) -> Source:
    found = read_image_folder(root, layout=layout, train_split=train_split, test_split=test_split)

    prefix = os.path.join(root, "")

    def split(name: str, part: FolderSplit) -> SourceSplit:
        names = sorted(set(part.classes))
        ids = {class_name: index for index, class_name in enumerate(names)}
        return SourceSplit(
            name=name,
            rows=image_rows(_images([None] * len(part.files), [prefix + file for file in part.files])),
            label_names=tuple(names),
            labels=np.array([ids[class_name] for class_name in part.classes], dtype=np.int64),
            domains=None if part.domains is None else np.array(part.domains, dtype=np.str_),
            source_names=pa.array(part.files, pa.string()),
        )

    return Source(
        train=split("train", found.train),
        test=None if found.test is None else split("test", found.test),
        record=SourceRecord(
            kind="folder",
            location=str(root),
            layout=found.layout,
            test_folder=found.test.folder if found.test else None,
            empty_class_folders=found.empty_class_folders,
            ignored_files=found.ignored_files,
            unused_folders=found.unused_folders,
        ),
    )


def _parquet_splits(
    folder: Path, files: list[Path], train_split: str, test_split: str
) -> dict[str, list[Path]]:
    """Sort parquet files into splits by the beginning of their names."""
    found: dict[str, list[Path]] = {}
    for file in files:
        found.setdefault(re.split(r"[-_.]", file.name)[0], []).append(file)
    for split in (train_split, test_split):  # a split's own name may hold one of the separators
        named = [file for file in files if re.match(re.escape(split) + r"[-_.]", file.name)]
        if named:
            found[split] = named
    if len(files) == 1 and not found.keys() & {train_split, test_split, *TEST_SPLIT_NAMES}:
        return {"train": files}
    train, test = _pick_splits(found, str(folder), train_split, test_split)
    return {"train": train} if test is None else {"train": train, "test": test}


def _open_parquet(files: dict[str, list[Path]], location: Path, columns: Columns) -> Source:
    wanted = [column for column in columns if column is not None]
    tables: dict[str, Dataset] = {}
    for split, paths in files.items():
        try:
            present = pq.read_schema(paths[0]).names
        except (pa.ArrowException, OSError) as error:
            raise UsageError(f"cannot read the parquet file '{paths[0]}': {error}.") from error
        _refuse_missing(wanted, present, str(paths[0]))
        try:
            tables[split] = datasets.load_dataset(
                "parquet", data_files=[str(path) for path in paths], columns=wanted, split="train"
            )
        except (datasets.exceptions.DatasetGenerationError, pa.ArrowException, OSError, ValueError) as error:
            raise UsageError(
                f"cannot read the parquet files {', '.join(map(str, paths))}: {error.__cause__ or error}"
            ) from error
    return open_tables(
        (tables["train"], tables.get("test")),
        columns=columns,
        record=SourceRecord(
            kind="parquet",
            location=str(location),
            files={split: tuple(path.name for path in paths) for split, paths in files.items()},
        ),
    )


def _open_saved(path: Path, columns: Columns, train_split: str, test_split: str) -> Source:
    try:
        saved = datasets.load_from_disk(str(path))
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        # Which one depends on the file that is damaged.
        raise UsageError(f"cannot read the saved data set '{path}': {_first_line(error)}.") from error
    tables = dict(saved) if isinstance(saved, DatasetDict) else {train_split: saved}
    return open_tables(
        _pick_splits(
            tables, str(path), train_split, test_split if isinstance(saved, DatasetDict) else "test"
        ),
        columns=columns,
        record=SourceRecord(kind="saved data set", location=str(path)),
    )


def _pick_splits(
    splits: dict[str, T], location: str, train_split: str, test_split: str
) -> tuple[T, T | None]:
    """Return the training split and the test split; for "test" its usual other names are looked for too."""
    if train_split not in splits:
        raise UsageError(f"in '{location}': {unknown_name('dataset.train_split', train_split, splits)}")
    if test_split in splits:
        return splits[train_split], splits[test_split]
    if test_split != "test":
        raise UsageError(f"in '{location}': {unknown_name('dataset.test_split', test_split, splits)}")
    for name in TEST_SPLIT_NAMES:
        if name in splits:
            logger.info("%s: no split 'test'; '%s' is used for testing.", location, name)
            return splits[train_split], splits[name]
    return splits[train_split], None


def _load_hub(name: str, config_name: str | None, revision: str | None) -> DatasetDict:
    """Load from the cache; else make sure with one short request that the hub can be asked."""
    if revision is None:
        try:
            with _offline():
                return datasets.load_dataset(name, config_name)
        except Exception as error:  # whatever the cache lacks, the hub is the next to ask
            logger.debug("'%s' is not in the cache: %s", name, error)
    advice = (
        "Download it where there is a network (the cache is then used), or set dataset.path to a local image "
        "folder, parquet file or saved data set."
    )
    if datasets.config.HF_HUB_OFFLINE:
        raise UsageError(f"data set '{name}' is not in the cache and HF_HUB_OFFLINE is set. {advice}")
    try:
        huggingface_hub.HfApi().dataset_info(name, revision=revision, timeout=_HUB_TIMEOUT_SECONDS)
        return datasets.load_dataset(name, config_name, revision=revision)
    except Exception as error:
        raise UsageError(
            f"cannot load data set '{name}' from the hub: {_first_line(error)}. {advice}"
        ) from error


@contextmanager
def _offline() -> Iterator[None]:
    """Let `datasets` look into its cache alone."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _refuse_missing(wanted: Sequence[str], present: Sequence[str], location: str) -> None:
    missing = [name for name in wanted if name not in present]
    if missing:
        raise UsageError(
            f"{location}: no column {', '.join(repr(name) for name in missing)}. The columns are: "
            f"{', '.join(present)}. Set dataset.image_column, dataset.label_column or dataset.domain_column."
        )


def _table_split(name: str, table: Dataset, columns: Columns) -> SourceSplit:
    wanted = [column for column in columns if column is not None]
    _refuse_missing(wanted, table.column_names, f"{name} split")
    if len(table) == 0:
        raise UsageError(f"the {name} split has no rows.")
    label_names, labels = _read_names(table, columns.label, name)
    domains = None
    if columns.domain is not None:
        domain_names, positions = _read_names(table, columns.domain, name)
        domains = np.array(domain_names)[positions]
    rows = table.select_columns([columns.image])
    if columns.image != "image":
        rows = rows.rename_column(columns.image, "image")
    try:
        rows = rows.cast_column("image", datasets.Image(decode=False)).with_format(None)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UsageError(
            f"column '{columns.image}' of the {name} split holds {table.features[columns.image]}, not images."
        ) from error
    return SourceSplit(
        name=name,
        rows=rows,
        label_names=label_names,
        labels=labels,
        domains=domains,
        source_names=pa.array([f"{name} row {number}" for number in range(len(table))]),
    )


def _read_names(table: Dataset, column: str, split: str) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Read a column of class labels, integers or text without touching the images.

    Returns:
        The names, and (N,) the position of each row's name among them. Integers are named by their
        digits and ordered by value, text is ordered as text; class labels keep their own order.
    """
    feature = table.features[column]
    values = table.select_columns([column]).with_format("arrow")[:].column(column).combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if values.null_count:
        raise UsageError(
            f"column '{column}' of the {split} split has {values.null_count} rows without a value."
        )
    if isinstance(feature, ClassLabel):
        ids = values.to_numpy(zero_copy_only=False).astype(np.int64)
        outside = int(((ids < 0) | (ids >= feature.num_classes)).sum())
        if outside:
            raise UsageError(
                f"column '{column}' of the {split} split has {outside} rows whose label is not one of the "
                f"{feature.num_classes} classes (-1 marks unlabelled rows): choose a labelled split."
            )
        return tuple(feature.names), ids
    if not (
        pa.types.is_integer(values.type)
        or pa.types.is_string(values.type)
        or pa.types.is_large_string(values.type)
    ):
        raise UsageError(
            f"column '{column}' of the {split} split holds {values.type}; allowed: class labels, "
            f"integers, text."
        )
    distinct, positions = np.unique(values.to_numpy(zero_copy_only=False), return_inverse=True)
    if pa.types.is_integer(values.type) and not np.array_equal(distinct, np.arange(len(distinct))):
        logger.info(
            "column '%s' of the %s split: the %d labels from %d to %d are numbered from 0; names stay as given.",
            *(column, split, len(distinct), distinct[0], distinct[-1]),
        )
    return tuple(str(value) for value in distinct), positions.astype(np.int64)
