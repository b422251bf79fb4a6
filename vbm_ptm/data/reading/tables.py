"""Tables of images: what each part of a split holds, and how the parts are joined.

Shapes: N rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, Features
from numpy.typing import NDArray

from vbm_ptm.data.image_rows import ImageRows, ImageTable, Integers, content_ids
from vbm_ptm.data.names import first_written, form, same_in_other_form
from vbm_ptm.data.reading.sources import SourceSplit, select
from vbm_ptm.data.reading.table_copies import copied
from vbm_ptm.data.reading.table_images import (
    FORMS,
    STRUCTURE,
    check_encoded,
    holds_base64,
    image_structures,
    is_mapped,
)
from vbm_ptm.errors import UsageError, first_line, some_names
from vbm_ptm.stand_ins import STAND_IN_BYTES, describe_stand_in

logger = logging.getLogger(__name__)

_BATCH_BYTES = 32 * 2**20
_UNLABELLED = -1


class TableSettings(NamedTuple):
    """How tables are read.

    Attributes:
        image: Column with the images.
        label: Column with the classes.
        domain: Column with the domains, if there is one.
        on_unlabelled: Whether rows without a class are refused or left out.
        row_names: Whether rows are identified by their content, or only by their numbers.
    """

    image: str
    label: str
    domain: str | None
    on_unlabelled: Literal["error", "skip"] = "error"
    row_names: Literal["content", "number"] = "content"

    @property
    def columns(self) -> list[str]:
        """The columns that are read."""
        return [name for name in (self.image, self.label, self.domain) if name is not None]


@dataclass(frozen=True)
class NameColumn:
    """A column of names in one part of a split.

    Attributes:
        kind: What the names were: class labels, integers or text.
        names: The distinct names, in the part's own order.
        positions: (N,) position of every row's name among them; -1 for a row without one.
    """

    kind: Literal["class labels", "integers", "text"]
    names: tuple[str, ...]
    positions: Integers


@dataclass(frozen=True)
class TablePart:
    """One file of a split, or the whole split.

    Attributes:
        where: Its name in messages.
        images: Its images.
        labels: Their classes.
        domains: Their domains, if a column holds them.
    """

    where: str
    images: ImageTable
    labels: NameColumn
    domains: NameColumn | None


def parquet_part(file: Path, settings: TableSettings) -> TablePart:
    """Read one parquet file; images stay undecoded, in a copy on disk.

    Raises:
        UsageError: It cannot be read, or lacks a column.
    """
    try:
        parquet = pq.ParquetFile(file)
        schema = parquet.schema_arrow
        refuse_missing(settings, schema.names, f"'{file}'")
        features = _features(schema)
        columns = parquet.read(columns=[*dict.fromkeys(settings.columns[1:])])
        images = _parquet_images(file, settings.image)
    except (pa.ArrowException, OSError) as error:
        stand_in = None
        with suppress(OSError), file.open("rb") as stream:
            stand_in = describe_stand_in(stream.read(STAND_IN_BYTES))
        raise UsageError(
            f"cannot read the parquet file '{file}': {stand_in or first_line(error)}."
        ) from error

    def names(column: str) -> NameColumn:
        return read_names(columns.column(column), features.get(column), f"column '{column}' of '{file}'")

    return TablePart(
        str(file),
        ImageTable(images, file.parent),
        names(settings.label),
        None if settings.domain is None else names(settings.domain),
    )


def dataset_part(
    table: Dataset, settings: TableSettings, *, name: str, folder: Path | None = None
) -> TablePart:
    """Read a Hugging Face data set.

    Args:
        table: The data set.
        settings: Its columns.
        name: Its name in messages.
        folder: Where relative paths start from.

    Raises:
        UsageError: It lacks a column, or one holds values of another kind.
    """
    refuse_missing(settings, table.column_names, f"{name} split")
    if table._indices is not None:
        table = table.flatten_indices()

    def names(column: str) -> NameColumn:
        return read_names(
            table.data.column(column), table.features[column], f"column '{column}' of the {name} split"
        )

    return TablePart(
        f"the {name} split",
        ImageTable(
            _dataset_images(table, settings.image, f"column '{settings.image}' of the {name} split"), folder
        ),
        names(settings.label),
        None if settings.domain is None else names(settings.domain),
    )


def refuse_missing(settings: TableSettings, present: Sequence[str], location: str) -> None:
    """Raise if a column is missing or there twice."""
    twice = [name for name in dict.fromkeys(settings.columns) if present.count(name) > 1]
    if twice:
        raise UsageError(
            f"{location} has more than one column {some_names(twice)}: rename or drop all but one."
        )
    missing = [name for name in settings.columns if name not in present]
    if missing:
        raise UsageError(
            f"{location}: no column {', '.join(repr(name) for name in missing)}. The columns are: "
            f"{', '.join(present)}. Set dataset.image_column, dataset.label_column or dataset.domain_column."
        )


def table_split(name: str, parts: Sequence[TablePart], settings: TableSettings) -> SourceSplit:
    """Join the parts of a split; if they number their names differently, these are mapped by name.

    Raises:
        UsageError: There are no rows, rows without a class, or parts that cannot be mapped.
    """
    rows = ImageRows([part.images for part in parts])
    if not len(rows):
        raise UsageError(
            f"the {name} split ({some_names((part.where for part in parts), limit=3)}) has no rows."
        )
    where = f"column '{settings.image}' of the {name} split"
    check_encoded(lambda row: rows[row]["image"], len(rows), where=where)
    label_names, labels = _merged([(part.where, part.labels) for part in parts], settings.label, name)
    domains = None
    of_parts = [(part.where, part.domains) for part in parts if part.domains is not None]
    if settings.domain is not None:
        domain_names, positions = _merged(of_parts, settings.domain, name)
        if (positions < 0).any():
            raise UsageError(
                f"column '{settings.domain}' of the {name} split has {int((positions < 0).sum())} of {len(positions)} "
                "rows without a domain: write one for each, or leave dataset.domain_column out."
            )
        domains = np.array(domain_names, dtype=np.str_)[positions]
    identities = None
    if settings.row_names == "content":
        names = np.array([*label_names, ""], dtype=np.str_)[labels]
        identities = pa.array(_identities(name, rows, names, domains), pa.string())
    split = SourceSplit(
        name=name,
        rows=rows,
        label_names=label_names,
        labels=labels,
        domains=domains,
        source_names=pa.array([f"{name} row {number}" for number in range(len(rows))], pa.string()),
        identities=identities,
    )
    if settings.on_unlabelled == "skip" and (labels < 0).any():
        logger.warning(
            "column '%s' of the %s split: %d of %d rows have no label; left out",
            *(settings.label, name, int((labels < 0).sum()), len(labels)),
        )
        return select(split, np.flatnonzero(labels >= 0))
    _refuse_unlabelled(labels, settings.label, name)
    return split


def read_names(values: pa.ChunkedArray, feature: object, where: str) -> NameColumn:
    """Read a column of class labels, integers or text.

    Integers are named by their digits and ordered by value, even if a missing value has made pandas store them as real
    numbers; text is ordered as text; class labels keep their own order. A missing value, a negative number (-1, or -100
    as losses ignore it) and blank text are not names.

    Raises:
        UsageError: It holds values of another type.
    """
    values = pa.chunked_array(values).combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # more than 2 GiB
        values = values.cast(pa.large_string()).combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_null(values.type):  # a file in which no row has a label
        values = values.cast(pa.int64())
    if pa.types.is_floating(values.type) or pa.types.is_unsigned_integer(values.type):
        values = _whole_numbers(values, where)
    if isinstance(feature, ClassLabel):
        ids = values.cast(pa.int64()).fill_null(_UNLABELLED).to_numpy(zero_copy_only=False)
        outside = int(((ids < _UNLABELLED) | (ids >= feature.num_classes)).sum())
        if outside:
            raise UsageError(
                f"{where} has {outside} rows whose label is not one of the {feature.num_classes} classes."
            )
        _refuse_two_forms(feature.names, where)
        return NameColumn("class labels", tuple(feature.names), ids)
    if pa.types.is_integer(values.type):
        numbers = values.cast(pa.int64()).fill_null(_UNLABELLED).to_numpy(zero_copy_only=False)
        distinct, positions = np.unique(numbers, return_inverse=True)
        is_name = distinct >= 0
        places = np.where(is_name, np.cumsum(is_name) - 1, _UNLABELLED)
        return NameColumn("integers", tuple(map(str, distinct[is_name].tolist())), places[positions])
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type) or _is_view(values.type):
        texts = values.cast(pa.large_string()).fill_null("").to_pylist()
        given = sorted(text for text in set(texts) if text.strip())
        spellings = first_written(given)
        place = {key: position for position, key in enumerate(spellings)}
        places_of = dict.fromkeys(texts, _UNLABELLED) | {text: place[form(text)] for text in given}
        return NameColumn(
            "text", tuple(spellings.values()), np.array([places_of[text] for text in texts], dtype=np.int64)
        )
    raise UsageError(f"{where} holds {values.type}; allowed: class labels, integers, text.")


def _whole_numbers(values: pa.Array, where: str) -> pa.Array:
    """Return numbers as 64-bit integers; values that are not numbers are missing."""
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), None, values)
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise UsageError(f"{where} holds numbers that name no class ({first_line(error)}).") from error


def _is_view(kind: pa.DataType) -> bool:
    return bool(kind == pa.string_view())


def _features(schema: pa.Schema) -> Features:
    """Return what Hugging Face has written about the columns, if anything."""
    try:
        return Features.from_arrow_schema(schema)
    except Exception:  # about columns that are not requested
        return Features()


def _parquet_images(file: Path, column: str) -> Dataset:
    """Return a column of images with the ``content_id`` of each."""
    parquet = pq.ParquetFile(file)

    def batches() -> Iterator[pa.RecordBatch]:
        size = sum(
            parquet.metadata.row_group(group).total_byte_size for group in range(parquet.num_row_groups)
        )
        rows = max(1, parquet.metadata.num_rows)
        batch_size = int(np.clip(_BATCH_BYTES * rows // max(1, size), 16, 65536))
        for batch in parquet.iter_batches(batch_size, columns=[column]):
            images = image_structures(batch.column(0), where=f"column '{column}' of '{file}'")
            yield pa.RecordBatch.from_arrays(
                [images, pa.array(content_ids(images), pa.string())], schema=schema
            )

    schema = pa.schema([pa.field("image", STRUCTURE), pa.field("content", pa.string())])
    return copied(file, column, num_rows=parquet.metadata.num_rows, schema=schema, batches=batches)


def _dataset_images(table: Dataset, column: str, where: str) -> Dataset:
    """Return a column ``image`` of structures; lists are converted in memory."""
    kind = table.data.schema.field(column).type
    rows = table.select_columns([column])
    if column != "image":
        rows = rows.rename_column(column, "image")
    if is_mapped(kind) and not holds_base64(rows.data.column("image")):
        try:
            return rows.cast_column("image", datasets.Image(decode=False)).with_format(None)
        except (pa.ArrowException, TypeError, ValueError) as error:
            if not pa.types.is_large_binary(kind):  # which older versions of datasets do not cast
                raise UsageError(
                    f"{where} holds {table.features[column]}, not images. Accepted are {FORMS}."
                ) from error
    chunks = [image_structures(chunk, where=where) for chunk in rows.data.column("image").chunks]
    return Dataset(pa.table({"image": pa.chunked_array(chunks, STRUCTURE)}))


def _merged(
    parts: Sequence[tuple[str, NameColumn]], column: str, split: str
) -> tuple[tuple[str, ...], Integers]:
    """Return the names of all parts, and (N,) the position of each row's name among them; -1 for a row without one."""
    filled = [(where, each) for where, each in parts if each.names]
    kinds = {each.kind: where for where, each in filled}
    if "integers" in kinds and len(kinds) > 1:
        named = "; ".join(f"'{where}' holds {kind}" for kind, where in kinds.items())
        raise UsageError(
            f"column '{column}' of the {split} split cannot be joined: {named}. Numbers have no names to map "
            "them by: write all parts in the same way."
        )
    spellings = first_written(
        name for _, each in sorted(filled, key=lambda part: part[1].kind == "text") for name in each.names
    )
    if not kinds.keys() - {"integers"}:
        spellings = dict(sorted(spellings.items(), key=lambda item: int(item[0])))
    elif not kinds.keys() - {"text"}:
        spellings = dict(sorted(spellings.items(), key=lambda item: item[1]))
    place = {key: position for position, key in enumerate(spellings)}
    if len({each.names for _, each in filled if each.kind == "class labels"}) > 1:
        logger.info("column '%s' of the %s split: its files number their classes differently; mapped by name",
                    column, split)  # fmt: skip
    mapped = [
        np.array([*(place[form(name)] for name in each.names), _UNLABELLED], dtype=np.int64)[each.positions]
        for _, each in parts
    ]
    names, positions = tuple(spellings.values()), np.concatenate([*mapped, np.empty(0, np.int64)])
    if kinds.keys() == {"integers"} and names != tuple(map(str, range(len(names)))):
        logger.info(
            "column '%s' of the %s split: the %d labels from %s to %s are numbered from 0; names stay as given.",
            *(column, split, len(names), names[0], names[-1]),
        )
    return names, positions


def _refuse_unlabelled(positions: Integers, column: str, split: str) -> None:
    count = int((positions < 0).sum())
    if count:
        raise UsageError(
            f"column '{column}' of the {split} split has {count} of {len(positions)} rows without a value (missing, "
            "negative or empty, which mark unlabelled rows): choose a labelled split, or set "
            "dataset.on_unlabelled=skip to leave them out."
        )


def _refuse_two_forms(names: Sequence[str], where: str) -> None:
    twice = same_in_other_form(names)
    if twice:
        raise UsageError(f"{where} has names that differ only in their Unicode form: {some_names(twice)}.")


def _identities(
    split: str, rows: ImageRows, labels: NDArray[np.str_], domains: NDArray[np.str_] | None
) -> list[str]:
    """Return (N,) what identifies rows whatever their order: the content of an image, or its path if it is a file.

    Equal images are numbered, those of the same class and domain consecutively.
    """
    found = [
        content or path or "no image" for content, path in zip(rows.contents(), rows.paths(), strict=True)
    ]
    again = {value for value, count in Counter(found).items() if count > 1}
    if again:
        several = [row for row, value in enumerate(found) if value in again]
        number: Counter[str] = Counter()
        for row in sorted(
            several, key=lambda row: (found[row], labels[row], "" if domains is None else domains[row])
        ):
            value = found[row]
            number[value] += 1
            if number[value] > 1:
                found[row] = f"{value}#{number[value]}"
    return [f"{split}/{value}" for value in found]
