"""Giving every image the split that lists name for it, and finding contradictions between lists and images.

Shapes: N images of a source, M entries of lists.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from vbm_ptm.data.image_rows import Integers
from vbm_ptm.data.names import by_form, first_written, form
from vbm_ptm.data.reading.list_files import ListEntry
from vbm_ptm.data.reading.sources import Source, SourceSplit, select, with_occurring_classes
from vbm_ptm.errors import some_names

logger = logging.getLogger(__name__)

_SAMPLE_SIZE = 1000
# What lists contain for an image without a label.
_NO_LABEL = (None, "", "-1")


@dataclass(frozen=True)
class DividedSource:
    """A source divided by lists.

    Attributes:
        source: Its splits; no test split if the lists name no image for testing.
        missing: Listed files that do not exist.
        unlisted: Names of images that are in no list, and so in no split.
        repeated: Names that a list contains more than once; such an image is used once.
        problems: What makes the lists unusable.
    """

    source: Source
    missing: tuple[str, ...]
    unlisted: tuple[str, ...]
    repeated: tuple[str, ...]
    problems: tuple[str, ...]


def divide(
    source: Source, entries: Sequence[ListEntry], *, domains: Sequence[str] | None = None
) -> DividedSource:
    """Give every image of a source the split that lists name for it.

    Files are matched by path, whatever folders precede it and whichever way its slashes lean; rows of tables by their
    content, or by their numbers, as in older lists. Class ids follow numeric labels, if the lists give them, and
    otherwise keep the order of the source.

    Args:
        source: All images; its own splits do not count.
        entries: The M entries of the lists.
        domains: Skip entries of other domains, whose images need not be there.
    """
    pool = _pool(source)
    names: list[str] = pool.source_names.to_pylist()
    keys = _keys_of(entries, pool)
    has_domain_folders = source.record.layout == "domains"
    paths = _paths_below_root(entries, keys)
    if domains is not None:
        wanted = {form(name) for name in domains}
        folders = [path.partition("/")[0] if has_domain_folders else None for path in paths]
        named_domains = [entry.domain or folder for entry, folder in zip(entries, folders, strict=True)]
        kept = [index for index, name in enumerate(named_domains) if name is None or form(name) in wanted]
        entries, paths = [entries[index] for index in kept], [paths[index] for index in kept]
    found = _locate(paths, keys)
    missing = tuple(path for path, position in zip(paths, found.tolist(), strict=True) if position < 0)
    listed = [entry for entry, position in zip(entries, found.tolist(), strict=True) if position >= 0]
    positions = found[found >= 0]
    is_test = np.array([entry.split == "test" for entry in listed], dtype=bool)
    counts = [np.bincount(positions[is_test == part], minlength=len(names)) for part in (False, True)]

    def named(mask: NDArray[np.bool_]) -> tuple[str, ...]:
        return tuple(names[index] for index in np.flatnonzero(mask))

    problems: list[str] = []
    in_both = named((counts[0] > 0) & (counts[1] > 0))
    if in_both:
        problems.append(
            f"{len(in_both)} images are listed both for training and for testing: {some_names(in_both)}."
        )
    if entries and not len(positions):
        problems.append(
            f"none of the {len(entries)} listed files is there: the lists say '{entries[0].path}', the data set has "
            f"'{keys[0]}'. Set dataset.path to the folder that the lists refer to."
        )
    label_names, labels, of_labels = _labels(pool, listed, positions)
    listed_domains, of_domains = _domains(pool, listed, positions)
    problems += of_labels + of_domains
    pool = replace(pool, label_names=label_names, labels=labels, domains=listed_domains)
    train, test = (
        _part(pool, np.flatnonzero(count), name)
        for count, name in zip(counts, ("train", "test"), strict=True)
    )
    return DividedSource(
        source=replace(source, train=train, test=test if len(test.labels) else None),
        missing=missing,
        unlisted=named(counts[0] + counts[1] == 0),
        repeated=named((counts[0] > 1) | (counts[1] > 1)),
        problems=tuple(problems),
    )


def _pool(source: Source) -> SourceSplit:
    """Return all images of a source as one split."""
    train, test = source.train, source.test
    if test is None:
        return train
    spellings = first_written((*train.label_names, *test.label_names))
    ids = {key: index for index, key in enumerate(spellings)}
    mapping = np.array([ids[form(name)] for name in test.label_names], dtype=np.int64)
    has_domains = train.domains is not None and test.domains is not None
    return SourceSplit(
        name="all",
        rows=train.rows.chained(test.rows),
        label_names=tuple(spellings.values()),
        labels=np.concatenate([train.labels, mapping[test.labels]]),
        domains=np.concatenate([train.domains, test.domains]) if has_domains else None,
        source_names=pa.concat_arrays([train.source_names, test.source_names]),
        identities=None if train.identities is None else pa.concat_arrays([train.keys, test.keys]),
    )


def _keys_of(entries: Sequence[ListEntry], pool: SourceSplit) -> list[str]:
    """Return (N,) what identifies the images in lists."""
    keys: list[str] = pool.keys.to_pylist()
    names: list[str] = pool.source_names.to_pylist()
    if pool.identities is not None and entries and {entry.path for entry in entries} <= set(names):
        logger.warning(
            "the lists name rows by number: if the rows of the table are now in another order, this goes unnoticed; "
            "lists that name images by their content do not have this problem"
        )
        return names
    return keys


def _part(pool: SourceSplit, indices: Integers, name: str) -> SourceSplit:
    """Return some images as a split that knows only the classes that occur in it."""
    return replace(with_occurring_classes(select(pool, indices)), name=name)


def _paths_below_root(entries: Sequence[ListEntry], names: Sequence[str]) -> list[str]:
    """Return the paths of entries without the folders that lead to the data set on another machine."""
    known = set(names)
    paths = [
        entry.path if entry.path in known else entry.path.replace("\\", "/").removeprefix("./")
        for entry in entries
    ]
    step = max(1, len(paths) // _SAMPLE_SIZE)
    sample = [path.split("/") for path in paths[::step]]
    depth = max((len(parts) for parts in sample), default=1)
    matches = [sum("/".join(parts[skip:]) in known for parts in sample) for skip in range(depth)]
    skip = matches.index(max(matches)) if any(matches) else 0
    return ["/".join(path.split("/")[skip:]) or path for path in paths] if skip else paths


def _locate(paths: Sequence[str], names: Sequence[str]) -> Integers:
    """Return (M,) the position of each path among the names; -1 if it is not among them."""
    position = {name: index for index, name in enumerate(names)}
    found = [position.get(path, -1) for path in paths]
    if -1 in found:
        composed = by_form(position)
        found = [
            composed.get(form(path), -1) if index < 0 else index
            for path, index in zip(paths, found, strict=True)
        ]
    return np.array(found, dtype=np.int64)


def _labels(
    pool: SourceSplit, listed: Sequence[ListEntry], positions: Integers
) -> tuple[tuple[str, ...], Integers, list[str]]:
    """Compare the labels of lists with the classes of the source.

    Returns:
        The class names, in the order of their ids; (N,) the class id of every image; the contradictions.
    """
    pairs = zip((entry.label for entry in listed), positions.tolist(), strict=True)
    labelled = [(label, position) for label, position in pairs if label not in _NO_LABEL]
    names = pool.label_names
    if names == ("",):  # folders mean nothing: only the lists know the classes
        return _labels_of_lists(pool, labelled, num_unlabelled=len(listed) - len(labelled))
    classes = pool.labels.tolist()
    differing = [
        (label, position) for label, position in labelled if form(label) != form(names[classes[position]])
    ]
    if not differing:
        return names, pool.labels, []
    if all(label.isdecimal() for label, _ in labelled):
        return _numbered(pool, labelled)
    wrong = [f"{pool.source_names[position]} (listed as '{label}')" for label, position in differing]
    return (
        names,
        pool.labels,
        [
            f"{len(wrong)} listed labels contradict the images' classes: {some_names(wrong)}. Correct them, or set "
            "dataset.layout=listed if folders do not name classes."
        ],
    )


def _labels_of_lists(
    pool: SourceSplit, labelled: Sequence[tuple[str, int]], *, num_unlabelled: int
) -> tuple[tuple[str, ...], Integers, list[str]]:
    given = first_written(sorted({label for label, _ in labelled}))
    numeric = all(label.isdecimal() for label in given)
    names = tuple(sorted(given.values(), key=int) if numeric else given.values())
    ids = {form(name): index for index, name in enumerate(names)}
    labels = np.full(len(pool.labels), -1, dtype=np.int64)
    several: set[str] = set()
    for label, position in labelled:
        if labels[position] not in (-1, ids[form(label)]):
            several.add(str(pool.source_names[position]))
        labels[position] = ids[form(label)]
    problems = []
    if several:
        problems.append(
            f"{len(several)} images are listed with several labels: {some_names(sorted(several))}."
        )
    if num_unlabelled:
        problems.append(
            f"{num_unlabelled} images are listed without a label, which dataset.layout=listed needs."
        )
        names, labels = names or ("",), np.maximum(labels, 0)
    return names, labels, problems


def _numbered(
    pool: SourceSplit, labelled: Sequence[tuple[str, int]]
) -> tuple[tuple[str, ...], Integers, list[str]]:
    """Order the classes by their numbers; each class must have one number, and each number one class."""
    classes, names = pool.labels.tolist(), pool.label_names
    pairs = Counter((classes[position], int(label)) for label, position in labelled)
    number_of: dict[int, int] = {}
    for (label, number), _ in pairs.most_common():
        number_of.setdefault(label, number)
    wrong = [
        f"{pool.source_names[position]} (listed as {label}, other images of '{names[classes[position]]}' as "
        f"{number_of[classes[position]]})"
        for label, position in labelled
        if number_of[classes[position]] != int(label)
    ]
    problems = (
        [f"{len(wrong)} listed labels contradict the images' classes: {some_names(wrong)}."] if wrong else []
    )
    for number, count in Counter(number_of.values()).items():
        if count > 1:
            sharing = [names[label] for label, other in number_of.items() if other == number]
            problems.append(f"label {number} is listed for images of several classes: {some_names(sharing)}.")
    last = max(number_of.values(), default=0) + 1
    order = sorted(range(len(names)), key=lambda label: (number_of.get(label, last), label))
    rank = np.empty(len(names), dtype=np.int64)
    rank[order] = np.arange(len(names))
    return tuple(names[label] for label in order), rank[pool.labels], problems


def _domains(
    pool: SourceSplit, listed: Sequence[ListEntry], positions: Integers
) -> tuple[NDArray[np.str_] | None, list[str]]:
    """Return (N,) the domain of every image, from the source or else from lists, and the contradictions."""
    given = {
        position: entry.domain
        for entry, position in zip(listed, positions.tolist(), strict=True)
        if entry.domain
    }
    if pool.domains is None:
        if not given:
            return None, []
        without = [
            str(pool.source_names[position]) for position in positions.tolist() if position not in given
        ]
        problems = (
            [f"{len(without)} images are listed without a domain: {some_names(without)}."] if without else []
        )
        spellings = first_written(given.values())
        named = [spellings.get(form(given.get(index, "")), "") for index in range(len(pool.labels))]
        return np.array(named), problems
    wrong = [
        f"{pool.source_names[position]} (listed as '{domain}')"
        for position, domain in given.items()
        if form(domain) != form(pool.domains[position])
    ]
    problems = (
        [f"{len(wrong)} listed domains contradict the images' own: {some_names(wrong)}."] if wrong else []
    )
    return pool.domains, problems
