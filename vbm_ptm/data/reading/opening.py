"""The places that images come from: the built-in digits, a path, or the Hugging Face Hub."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict
from numpy.typing import NDArray
from PIL import Image

from vbm_ptm.data.names import first_written, form
from vbm_ptm.data.reading.folders import FolderSplit, Layout, expected_tree, read_image_folder
from vbm_ptm.data.reading.sources import Source, SourceSplit, image_rows
from vbm_ptm.data.reading.table_files import find_tables, pick_splits, refuse_tables_below
from vbm_ptm.data.reading.tables import TableSettings, dataset_part, parquet_part, table_split
from vbm_ptm.data.record import SourceRecord
from vbm_ptm.errors import UsageError, nearest_name
from vbm_ptm.stand_ins import STAND_IN_BYTES, describe_stand_in

logger = logging.getLogger(__name__)

DIGITS = "builtin:digits"
_HUB_TIMEOUT_SECONDS = 5.0
_EXPECTED_TABLE = "Give a parquet file, or a folder with train*.parquet and test*.parquet."


class _SplitNames(TypedDict):
    train_split: str
    test_split: str | None


def open_digits() -> Source:
    """Open scikit-learn's handwritten digits; every fifth of the 1797 images is for testing."""
    # Only the file is read: importing scikit-learn takes a second.
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",", dtype=np.int64)
    pixels, labels = table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    images = np.rint(pixels * (255 / 16)).astype(np.uint8)
    numbers = np.arange(len(images))

    def split(name: str, chosen: NDArray[np.int64]) -> SourceSplit:
        return SourceSplit(
            name=name,
            rows=image_rows([_png(images[number]) for number in chosen], [None] * len(chosen)),
            label_names=tuple(str(name) for name in range(10)),
            labels=labels[chosen],
            domains=None,
            source_names=pa.array([f"row {number}" for number in chosen]),
        )

    return Source(
        train=split("train", numbers[numbers % 5 != 0]),
        test=split("test", numbers[numbers % 5 == 0]),
        record=SourceRecord(kind="builtin", location=DIGITS),
        has_test=True,
    )


def open_path(
    path: Path,
    *,
    settings: TableSettings,
    layout: Layout,
    train_split: str,
    test_split: str | None,
    reads_test: bool = True,
) -> Source:
    """Open whatever is at a path: an image folder, parquet files, or a saved Hugging Face data set.

    Args:
        path: A path, never a pattern.
        settings: How tables are read.
        layout: Layout of an image folder.
        train_split: Name of the training split.
        test_split: Name of the test split; None to hold images out.
        reads_test: If false, test images are neither read nor checked.

    Raises:
        UsageError: There is nothing that can be read.
    """
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        nearest = nearest_name(path.name, siblings)
        hint = f" Did you mean '{path.parent / nearest}'?" if nearest else ""
        is_table = path.suffix.lower() == ".parquet"
        expected = _EXPECTED_TABLE if is_table else expected_tree(path, layout)
        raise UsageError(f"dataset.path: '{path}' does not exist.{hint} {expected}")
    path = path.absolute()
    names = _SplitNames(train_split=train_split, test_split=test_split)
    if path.is_file():
        if path.suffix.lower() != ".parquet":
            raise UsageError(
                f"dataset.path: '{path}' is a file. Give an image folder, a parquet file, a folder of "
                f"parquet files, or a data set saved with save_to_disk. {expected_tree(path.parent)}"
            )
        return _open_parquet({"train": [path]}, path, settings, **names, reads_test=False, ignored=())
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _open_saved(path, settings, **names, reads_test=reads_test)
    tables = find_tables(path, **names)
    if tables is not None:
        return _open_parquet(
            tables.splits, path, settings, **names, reads_test=reads_test, ignored=tables.ignored
        )
    if settings.domain is not None:
        refuse_tables_below(path)
        raise UsageError(
            f"dataset.domain_column='{settings.domain}' names a column, but '{path}' is an image folder, "
            f"which has none. Set dataset.layout=domains for folders <domain>/<class>/, or leave the setting out."
        )
    return _open_folder(path, layout, **names, reads_test=reads_test)


def open_hub(
    name: str,
    *,
    config_name: str | None,
    revision: str | None,
    settings: TableSettings,
    train_split: str,
    test_split: str | None,
    reads_test: bool = True,
) -> Source:
    """Open a data set of the Hugging Face Hub, from the cache if it is there."""
    if name.startswith((".", "/", "~")) or Path(name).exists():
        raise UsageError(
            f"dataset.source: '{name}' is the id of a data set on the Hugging Face Hub, but a folder or file of that "
            "name is here: set dataset.path to read it, or start from another folder to read what the Hub has."
            if Path(name).exists()
            else f"dataset.source: '{name}' is a path; a source is the id of a data set on the Hugging Face Hub, "
            "owner/name. Set dataset.path to read local files."
        )
    tables = _load_hub(name, config_name, revision)
    return _open_tables(
        tables,
        name,
        settings,
        train_split=train_split,
        test_split=test_split,
        reads_test=reads_test,
        record=SourceRecord(kind="hub", location=name, config_name=config_name, revision=revision),
    )


def _png(pixels: NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _open_folder(
    root: Path, layout: Layout, *, train_split: str, test_split: str | None, reads_test: bool
) -> Source:
    try:
        found = read_image_folder(
            root, layout=layout, train_split=train_split, test_split=test_split, reads_test=reads_test
        )
    except UsageError:
        refuse_tables_below(root)
        raise
    prefix = os.path.join(root, "")

    def split(name: str, part: FolderSplit) -> SourceSplit:
        spellings = first_written(sorted(set(part.classes)))
        ids = {key: index for index, key in enumerate(spellings)}
        domains = None if part.domains is None else first_written(sorted(set(part.domains)))
        return SourceSplit(
            name=name,
            rows=image_rows([None] * len(part.files), [prefix + file for file in part.files]),
            label_names=tuple(spellings.values()),
            labels=np.array([ids[form(class_name)] for class_name in part.classes], dtype=np.int64),
            domains=None
            if domains is None
            else np.array([domains[form(name)] for name in part.domains or ()], dtype=np.str_),
            source_names=pa.array(part.files, pa.string()),
        )

    return Source(
        train=split("train", found.train),
        test=None if found.test is None else split("test", found.test),
        record=SourceRecord(
            kind="folder",
            location=str(root),
            layout=found.layout,
            test_folder=found.test_folder,
            empty_class_folders=found.empty_class_folders,
            ignored_files=found.ignored_files,
            unused_folders=found.unused_folders,
        ),
        has_test=found.test_folder is not None,
    )


def _open_parquet(
    splits: Mapping[str, Sequence[Path]],
    location: Path,
    settings: TableSettings,
    *,
    train_split: str,
    test_split: str | None,
    reads_test: bool,
    ignored: Sequence[str],
) -> Source:
    train, test, chosen = splits["train"] if location.is_file() else [], None, {"train"}
    if not location.is_file():
        train, test, test_name = pick_splits(
            splits, str(location), train_split=train_split, test_split=test_split
        )
        chosen = {train_split, test_name or ""}
    files = {"train": train, **({"test": test} if test and reads_test else {})}
    unused = [str(file.relative_to(location)) for name in splits.keys() - chosen for file in splits[name]]
    read = {
        name: table_split(name, [parquet_part(file, settings) for file in each], settings)
        for name, each in files.items()
    }
    return Source(
        train=read["train"],
        test=read.get("test"),
        record=SourceRecord(
            kind="parquet",
            location=str(location),
            files={split: tuple(path.name for path in paths) for split, paths in files.items()},
            ignored_tables=tuple(sorted([*ignored, *unused])),
        ),
        has_test=test is not None,
    )


def _open_saved(
    path: Path, settings: TableSettings, *, train_split: str, test_split: str | None, reads_test: bool
) -> Source:
    if "::" in str(path):
        raise UsageError(
            f"dataset.path: '{path}' contains '::', which Hugging Face reads as several locations: rename the folder."
        )
    try:
        saved = datasets.load_from_disk(str(path))
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        # Which error it is depends on the file that is damaged.
        stand_in = next(filter(None, map(_stand_in, sorted(path.rglob("*.arrow")))), None)
        raise UsageError(
            f"cannot read the saved data set '{path}': {stand_in or _first_line(error)}."
        ) from error
    is_whole = not isinstance(saved, DatasetDict)
    # One table has no test split, whatever it is called.
    return _open_tables(
        {train_split: saved} if is_whole else saved,
        str(path),
        settings,
        train_split=train_split,
        test_split=None if is_whole else test_split,
        reads_test=reads_test,
        record=SourceRecord(kind="saved data set", location=str(path)),
        folder=path,
    )


def _open_tables(
    tables: Mapping[str, Dataset],
    location: str,
    settings: TableSettings,
    *,
    train_split: str,
    test_split: str | None,
    reads_test: bool,
    record: SourceRecord,
    folder: Path | None = None,
) -> Source:
    train, test, test_name = pick_splits(tables, location, train_split=train_split, test_split=test_split)
    if test_name not in (None, test_split):
        logger.info("%s: no split '%s'; '%s' is used for testing.", location, test_split, test_name)

    def split(name: str, table: Dataset) -> SourceSplit:
        return table_split(name, [dataset_part(table, settings, name=name, folder=folder)], settings)

    return Source(
        train=split("train", train),
        test=split("test", test) if test is not None and reads_test else None,
        record=record,
        has_test=test is not None,
    )


def _stand_in(file: Path) -> str | None:
    with file.open("rb") as stream:
        said = describe_stand_in(stream.read(STAND_IN_BYTES))
    return said and f"'{file.name}' is {said}"


def _load_hub(name: str, config_name: str | None, revision: str | None) -> DatasetDict:
    """Load from the cache; otherwise make sure with one short request that the Hub answers."""
    if revision is None:
        try:
            with _offline():
                return datasets.load_dataset(name, config_name)
        except Exception as error:  # whatever the cache lacks, the Hub is asked next
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
    """Let `datasets` look only into its cache."""
    before = datasets.config.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
