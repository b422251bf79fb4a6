"""Parts of a source: hold-outs that depend on names alone, domains, and the hash of what is in which split.

Shapes: N images of a split.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray

from vbm_ptm.data.reading.sources import Source, SourceSplit, image_rows
from vbm_ptm.errors import UsageError, unknown_name

Positions = NDArray[np.int64]


def select(split: SourceSplit, indices: Positions) -> SourceSplit:
    """Return some rows of a split, in the order given."""
    return replace(
        split,
        rows=_take(split.rows, indices),
        labels=split.labels[indices],
        domains=None if split.domains is None else split.domains[indices],
        source_names=split.source_names.take(pa.array(indices)),
    )


def select_domains(source: Source, wanted: Sequence[str]) -> Source:
    """Return a source with the images of some domains alone.

    Raises:
        UsageError: There is no such domain, or the source names none.
    """
    named = [split.domains for split in (source.train, source.test) if split and split.domains is not None]
    known = {str(name) for domains in named for name in np.unique(domains)}
    if not known:
        raise UsageError(
            "dataset.domains chooses domains, but the data set names none: set dataset.domain_column of a table, or "
            "dataset.layout=domains of a folder."
        )
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(*(f"dataset.domains: {unknown_name('domain', name, known)}" for name in unknown))

    def chosen(split: SourceSplit) -> SourceSplit:
        assert split.domains is not None
        return select(split, np.flatnonzero(np.isin(split.domains, list(wanted))))

    return replace(source, train=chosen(source.train), test=source.test and chosen(source.test))


def hold_out(split: SourceSplit, fraction: float, purpose: str) -> tuple[SourceSplit, SourceSplit]:
    """Divide a split per class (and domain); return what stays and what is held out.

    The images of a class are ordered by a hash of their names and the first ones are held out: at least
    one, but never the last image of a class.
    """
    groups: dict[tuple[int, str], list[tuple[bytes, int]]] = {}
    domains = [""] * len(split.labels) if split.domains is None else split.domains.tolist()
    names = split.source_names.to_pylist()
    for index, (label, domain, name) in enumerate(zip(split.labels.tolist(), domains, names, strict=True)):
        key = f"{purpose}|{unicodedata.normalize('NFC', name)}".encode()
        digest = hashlib.blake2b(key, digest_size=16).digest()
        groups.setdefault((label, domain), []).append((digest, index))
    is_held_out = np.zeros(len(split.labels), dtype=bool)
    for members in groups.values():
        count = min(max(1, int(len(members) * fraction + 0.5)), len(members) - 1)
        is_held_out[[index for _, index in sorted(members)[:count]]] = True
    return select(split, np.flatnonzero(~is_held_out)), select(split, np.flatnonzero(is_held_out))


def split_sha256(splits: Mapping[str, tuple[Sequence[str], Positions, pa.Array]]) -> str:
    """Hash which image is in which split and class: over names, not over pixels, in no order.

    Args:
        splits: Name of the split -> class names, (N,) class ids and (N,) names of its images.
    """
    lines = sorted(
        unicodedata.normalize("NFC", f"{split}\0{class_names[label]}\0{name}\n")
        for split, (class_names, labels, names) in splits.items()
        for label, name in zip(labels.tolist(), names.to_pylist(), strict=True)
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _take(rows: Dataset, indices: Positions) -> Dataset:
    """Return some rows. Tables of mere paths are made anew: behind a list of positions each row would cost a search."""
    if not len(rows) or rows[0]["image"]["bytes"] is not None:
        return rows.select(indices)
    images = rows.with_format("arrow")[:].column("image").combine_chunks()
    return image_rows(images.take(pa.array(indices)))
