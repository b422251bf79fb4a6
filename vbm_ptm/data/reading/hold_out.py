"""Parts of a source: hold-outs that depend on names alone, domains, and the hash of what is in which split.

Shapes: N images of a split.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from vbm_ptm.data.image_rows import Integers
from vbm_ptm.data.names import form
from vbm_ptm.data.reading.sources import Source, SourceSplit, select
from vbm_ptm.errors import UsageError, unknown_name


def select_domains(source: Source, wanted: Sequence[str]) -> Source:
    """Return a source with only the images of some domains.

    Raises:
        UsageError: There is no such domain, or the source has none.
    """
    named = [split.domains for split in (source.train, source.test) if split and split.domains is not None]
    known = {str(name) for domains in named for name in np.unique(domains)}
    if not known:
        raise UsageError(
            "dataset.domains chooses domains, but the data set has none: set dataset.domain_column for a table, or "
            "dataset.layout=domains for a folder."
        )
    spellings = {form(name): name for name in known}
    unknown = [name for name in wanted if form(name) not in spellings]
    if unknown:
        raise UsageError(*(f"dataset.domains: {unknown_name('domain', name, known)}" for name in unknown))

    def chosen(split: SourceSplit) -> SourceSplit:
        assert split.domains is not None
        return select(
            split, np.flatnonzero(np.isin(split.domains, [spellings[form(name)] for name in wanted]))
        )

    return replace(source, train=chosen(source.train), test=source.test and chosen(source.test))


def hold_out(split: SourceSplit, fraction: float, purpose: str) -> tuple[SourceSplit, SourceSplit]:
    """Divide a split per class (and domain); return what stays and what is held out.

    The images of a class are ordered by a hash of their names, or of whatever identifies them, and the first ones are
    held out: at least one, but never the last image of a class.
    """
    is_held_out = np.zeros(len(split.labels), dtype=bool)
    for members in _in_order_of_hashes(split, purpose):
        count = min(max(1, int(len(members) * fraction + 0.5)), len(members) - 1)
        is_held_out[members[:count]] = True
    return select(split, np.flatnonzero(~is_held_out)), select(split, np.flatnonzero(is_held_out))


def first_per_class(split: SourceSplit, count: int) -> SourceSplit:
    """Return a split with the first `count` images of every class (and domain), in the order of ``hold_out``."""
    kept = [members[:count] for members in _in_order_of_hashes(split, "first")]
    return select(split, np.sort(np.array([index for members in kept for index in members], dtype=np.int64)))


def _in_order_of_hashes(split: SourceSplit, purpose: str) -> Iterator[list[int]]:
    """Yield the images of every class and domain, ordered by a hash of the purpose and of what identifies them."""
    groups: dict[tuple[int, str], list[tuple[bytes, int]]] = {}
    domains = [""] * len(split.labels) if split.domains is None else split.domains.tolist()
    names = split.keys.to_pylist()
    for index, (label, domain, name) in enumerate(zip(split.labels.tolist(), domains, names, strict=True)):
        key = f"{purpose}|{form(name)}".encode()
        digest = hashlib.blake2b(key, digest_size=16).digest()
        groups.setdefault((label, domain), []).append((digest, index))
    for members in groups.values():
        yield [index for _, index in sorted(members)]


def split_sha256(splits: Mapping[str, tuple[Sequence[str], Integers, pa.Array]]) -> str:
    """Hash which image is in which split and class, from names, not pixels, and regardless of order.

    Args:
        splits: Name of the split -> class names, (N,) class ids and (N,) keys of its images.
    """
    lines = sorted(
        form(f"{split}\0{class_names[label]}\0{name}\n")
        for split, (class_names, labels, names) in splits.items()
        for label, name in zip(labels.tolist(), names.to_pylist(), strict=True)
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()
