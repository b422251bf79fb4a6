"""What a source of images yields: undecoded rows, each with a class name.

Shapes: N images of a split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray

from vbm_ptm.data.image_rows import ImageRows, ImageTable, Integers
from vbm_ptm.data.names import first_written, form
from vbm_ptm.data.record import SourceRecord


@dataclass(frozen=True)
class SourceSplit:
    """One split as its source provides it (N images).

    Attributes:
        name: What the source calls it.
        rows: The images, undecoded.
        label_names: The class names this split knows, in their order.
        labels: (N,) positions in `label_names`.
        domains: (N,) text, if the source has domains.
        source_names: (N,) name of each row in messages: its path below the root, or its row number.
        identities: (N,) what identifies each row whatever the order, if its name does not.
    """

    name: str
    rows: ImageRows
    label_names: tuple[str, ...]
    labels: Integers
    domains: NDArray[np.str_] | None
    source_names: pa.Array
    identities: pa.Array | None = None

    @property
    def keys(self) -> pa.Array:
        """(N,) what identifies each row in a split, its hash and its file."""
        return self.source_names if self.identities is None else self.identities


@dataclass(frozen=True)
class Source:
    """The splits of a source, and what a result should say about it.

    Attributes:
        train: Training images.
        test: Test images, if there are any and they were asked for.
        record: What a result says.
        has_test: Whether there are test images, asked for or not.
    """

    train: SourceSplit
    test: SourceSplit | None
    record: SourceRecord
    has_test: bool


def select(split: SourceSplit, indices: Integers) -> SourceSplit:
    """Return some rows of a split, in the order given."""
    taken = pa.array(indices)
    return replace(
        split,
        rows=split.rows.select(indices),
        labels=split.labels[indices],
        domains=None if split.domains is None else split.domains[indices],
        source_names=split.source_names.take(taken),
        identities=None if split.identities is None else split.identities.take(taken),
    )


def with_occurring_classes(split: SourceSplit) -> SourceSplit:
    """Return a split that knows only the classes that occur in it."""
    occurring, labels = np.unique(split.labels, return_inverse=True)
    names = tuple(split.label_names[label] for label in occurring)
    return replace(split, label_names=names, labels=labels.astype(np.int64))


def with_one_spelling(source: Source) -> Source:
    """Return a source with each domain spelled as it was first written, in training before testing."""
    parts = [split for split in (source.train, source.test) if split is not None]
    names = [str(name) for split in parts if split.domains is not None for name in np.unique(split.domains)]
    spellings = first_written(names)
    if len(spellings) == len(set(names)):
        return source

    def spelled(split: SourceSplit) -> SourceSplit:
        domains = [] if split.domains is None else split.domains.tolist()
        return replace(split, domains=np.array([spellings[form(name)] for name in domains], dtype=np.str_))

    return replace(source, train=spelled(source.train), test=source.test and spelled(source.test))


def image_rows(contents: Sequence[bytes | None], paths: Sequence[str | None]) -> ImageRows:
    """Return rows of images that are given as bytes or by their paths."""
    fields = [pa.array(contents, pa.binary()), pa.array(paths, pa.string())]
    images = pa.StructArray.from_arrays(fields, names=["bytes", "path"])
    return ImageRows([ImageTable(Dataset(pa.table({"image": images})))])
