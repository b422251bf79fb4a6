"""Image data sets: what is configured, and how it becomes a training and a test split with one class mapping.

Shapes: N images of a split, K classes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from vbm_ptm.data.image_split import ImageDatasets, ImageSplit
from vbm_ptm.data.images import decode_image
from vbm_ptm.data.names import alike, form
from vbm_ptm.data.reading.division import DividedSource, divide
from vbm_ptm.data.reading.expected import ExpectedCounts, compare
from vbm_ptm.data.reading.folders import Layout, expected_tree
from vbm_ptm.data.reading.hold_out import first_per_class, hold_out, select_domains, split_sha256
from vbm_ptm.data.reading.integrity import Verification, check_source, flat_images
from vbm_ptm.data.reading.list_files import ListFiles, SplitLists, SplitName, read_lists, write_split_file
from vbm_ptm.data.reading.opening import DIGITS, open_digits, open_hub, open_path
from vbm_ptm.data.reading.sources import Source, SourceSplit, with_occurring_classes, with_one_spelling
from vbm_ptm.data.reading.tables import TableSettings
from vbm_ptm.data.record import DataRecord, ExpectedRecord, SomeNames, SplitRecord
from vbm_ptm.data.transforms import TransformsConfig
from vbm_ptm.errors import UsageError, some_lines, some_names, unknown_name
from vbm_ptm.settings import AbsolutePath, Settings

__all__ = ["DatasetSpec", "ImageDatasets", "ImageSplit", "decode_image", "load_image_dataset"]

logger = logging.getLogger(__name__)

# Of which a result keeps a few.
_MANY_NAMES = ("ignored_files", "ignored_tables", "unlisted_images")
_TABLES = ("parquet", "saved data set", "hub")
_WEAK_IDENTITY = (
    "rows are identified by their numbers alone (dataset.row_names=number): other images, or the same in another "
    "order, would not be noticed"
)


class DatasetSpec(Settings):
    """Where images come from and how they are split.

    Attributes:
        name: Name of the data set in results.
        source: ``builtin:digits`` or the id of a data set on the Hugging Face Hub.
        config_name: Configuration of a Hub data set.
        revision: Branch, tag or commit of a Hub data set.
        path: An image folder, a parquet file, a folder of parquet files, or what ``save_to_disk`` wrote;
            wins over `source`.
        layout: Layout of an image folder: ``train/<class>/`` (split), ``<class>/`` (flat), whichever of these two is
            found (auto), ``<domain>/<class>/`` (domains), or folders without a meaning (listed: lists name classes).
        image_column: Column with the images (tables only).
        label_column: Column with the class: class labels, integers or text (tables only).
        domain_column: Column with the domain (tables only).
        train_split: Name of the training split or folder.
        test_split: Name of the test split or folder; null: a part of the training split is held out.
        domains: Use only these domains; default: all.
        split_file: CSV with columns path, split (train or test) and optionally label and domain. It alone decides which
            image belongs to which split, as ``vbm-ptm split`` writes it; it overrides the lists.
        train_list: Files, or patterns of files, that list the training images: CSV, YAML (lists ``data`` and
            ``targets``) or text (``path`` or ``path label`` per line), looked up in the current directory, then below
            ``path``.
        test_list: The same for test images.
        test_fraction: Part of every class that is held out if there is no test split.
        validation_fraction: If above 0, this part of every class of the training data becomes the test split, and the
            real one is not used: for tuning.
        train_images_per_class: At most this many training images of each class (and domain), for studies on few cores;
            names alone decide which. All test images are kept.
        num_classes: Expected number of classes; it must be the number found.
        expected: Name of a variant -> its numbers of images. Other numbers give a warning.
        on_unlabelled: Refuse tables with rows that have no class (missing, negative or empty), or leave such rows out.
        row_names: What identifies the rows of tables: their content (the split and its hash do not depend on the order
            of the rows, and change with the images), or their number (as in runs of earlier versions).
        on_bad_image: Refuse to start if images cannot be decoded, or leave these images out.
        verify: Decode every image before training (full), look for empty files only (none: not even that);
            auto is full up to 20,000 images.
        transforms: How views are drawn.
    """

    name: str = Field(min_length=1)
    source: str | None = None
    config_name: str | None = None
    revision: str | None = None
    path: AbsolutePath | None = None
    layout: Layout = "auto"
    image_column: str = "image"
    label_column: str = "label"
    domain_column: str | None = None
    train_split: str = "train"
    test_split: str | None = "test"
    domains: tuple[str, ...] | None = Field(default=None, min_length=1)
    split_file: AbsolutePath | None = None
    train_list: ListFiles | None = None
    test_list: ListFiles | None = None
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    train_images_per_class: int | None = Field(default=None, ge=1)
    num_classes: int | None = Field(default=None, ge=1)
    expected: dict[str, ExpectedCounts] | None = None
    on_unlabelled: Literal["error", "skip"] = "error"
    row_names: Literal["content", "number"] = "content"
    on_bad_image: Literal["error", "skip"] = "error"
    verify: Verification = "auto"
    transforms: TransformsConfig = TransformsConfig()

    @model_validator(mode="after")
    def _check_combination(self) -> DatasetSpec:
        if self.on_bad_image == "skip" and self.verify == "none":
            raise ValueError("on_bad_image=skip has to decode every image, which verify=none rules out")
        if self.train_split == self.test_split:
            raise ValueError(
                f"train_split and test_split are both '{self.train_split}': set test_split=null to hold a part out"
            )
        if self.test_list and not self.train_list:
            raise ValueError(
                "test_list names the test images, but the training images are not given: set train_list"
            )
        if self.layout == "listed" and not self.has_lists:
            raise ValueError("layout=listed reads classes from lists: set split_file or train_list")
        return self

    @property
    def has_lists(self) -> bool:
        """Whether lists say which image is in which split."""
        return self.split_file is not None or bool(self.train_list)


def load_image_dataset(spec: DatasetSpec) -> ImageDatasets:
    """Read a data set: images stay undecoded, labels are read, splits are decided.

    The outcome depends on names alone: not on the order of files, the machine or any training seed.

    Raises:
        UsageError: The data set is not there, cannot be read as configured, or holds bad images: as many problems
            as can be told at once.
    """
    # A split that is not used is not checked.
    source = with_one_spelling(_open(spec, reads_test=spec.validation_fraction == 0 or spec.has_lists))
    if spec.domains and (source.train.domains is not None or not spec.has_lists):
        source = select_domains(source, spec.domains)
    listed = _read_splits(source, spec) if spec.has_lists else None
    if listed is not None:
        source = listed.source
    has_test_split = source.has_test if listed is None else source.test is not None
    if spec.validation_fraction > 0:
        source = replace(source, test=None)
    if listed is None:
        _refuse_empty(source, spec)
    if spec.domains:
        source = replace(source, train=with_occurring_classes(source.train))
    problems = [*(listed.problems if listed else ()), *_wrong_classes(source, spec)]
    source, checks, bad = check_source(
        source,
        name=spec.name,
        verify=spec.verify,
        skips=spec.on_bad_image == "skip",
        missing=listed.missing if listed else (),
    )
    if problems or bad:
        raise UsageError(*(f"data set '{spec.name}': {problem}" for problem in problems), *bad)
    train, test, held_out = _settle_splits(source, spec, has_test_split=has_test_split)
    class_names = train.label_names
    if spec.train_images_per_class is not None:
        train = first_per_class(train, spec.train_images_per_class)
    splits = (_image_split("train", train, class_names), _image_split("test", test, class_names))
    described = {str(split.name): _describe(split, class_names) for split in splits}
    expected = _compare(spec, described, is_divided=bool(held_out or checks.skipped_images))
    missing_domains = expected.missing_domains if expected and not spec.domains else ()
    names = {name: getattr(source.record, name) for name in source.record.model_fields_set}
    record = DataRecord(
        name=spec.name,
        **names | {name: SomeNames.of(names[name]) for name in _MANY_NAMES if name in names},
        num_classes=len(class_names),
        held_out=held_out,
        **checks._asdict(),
        train=described["train"],
        test=described["test"],
        expected=expected,
        warnings=(
            *_warnings(source, described, listed, missing_domains),
            *([_WEAK_IDENTITY] if source.record.kind in _TABLES and train.identities is None else []),
            *filter(None, map(flat_images, (train, test))),
        ),
    )
    for name, counts in described.items():
        logger.info(
            "%s (%s): %s split: %d images, %d classes, %s images per class.",
            *(spec.name, source.record.layout or source.record.kind, name),
            *(counts.images, counts.classes, counts.class_sizes),
        )
    unexpected = record.expected and record.expected.problem
    for warning in [*record.warnings, *([unexpected] if unexpected else [])]:
        logger.warning("%s: %s", spec.name, warning)
    return ImageDatasets(
        train=splits[0],
        test=splits[1],
        class_names=class_names,
        split_sha256=split_sha256(
            {split.name: (class_names, split.labels, split.split_keys) for split in splits}
        ),
        record=record,
    )


def split_lists_of(spec: DatasetSpec) -> SplitLists:
    """Read the lists of a configuration; empty if it names none.

    Raises:
        UsageError: One is missing or cannot be read as a list.
    """
    return read_lists(
        spec.path,
        split_file=spec.split_file,
        train_list=() if spec.split_file else spec.train_list or (),
        test_list=() if spec.split_file else spec.test_list or (),
    )


def write_split(datasets: ImageDatasets, path: Path) -> None:
    """Write which image is in which split as a CSV file that ``dataset.split_file`` takes.

    Raises:
        UsageError: The file exists already.
    """

    def rows(split: ImageSplit) -> Iterator[tuple[str, SplitName, str, str | None]]:
        domains = [None] * len(split) if split.domains is None else split.domains.tolist()
        for name, label, domain in zip(
            split.split_keys.to_pylist(), split.labels.tolist(), domains, strict=True
        ):
            yield name, split.name, datasets.class_names[label], domain

    write_split_file(path, [*rows(datasets.train), *rows(datasets.test)])


def _read_splits(source: Source, spec: DatasetSpec) -> DividedSource:
    """Divide a source by the lists of a configuration."""
    lists = split_lists_of(spec)
    divided = divide(source, lists.entries, domains=spec.domains)
    if divided.problems and not len(divided.source.train.labels):
        raise UsageError(*(f"data set '{spec.name}': {problem}" for problem in divided.problems))
    own = {each.file for each in lists.record}
    added: dict[str, Any] = {"lists": tuple(lists.record), "unlisted_images": divided.unlisted}
    if source.record.ignored_files:
        added["ignored_files"] = tuple(
            file
            for file in source.record.ignored_files
            if os.path.join(source.record.location, file) not in own
        )
    listed = replace(divided.source, record=source.record.model_copy(update=added))
    if spec.domains:
        listed = select_domains(listed, spec.domains)
    return replace(divided, source=listed)


def _warnings(
    source: Source,
    splits: Mapping[str, SplitRecord],
    listed: DividedSource | None,
    missing_domains: Sequence[str],
) -> tuple[str, ...]:
    """Return everything worth a warning."""
    record, num_domains = source.record, len(splits["train"].images_per_domain)
    known = {form(name) for name in splits["train"].images_per_class}
    nameless = {path for path in record.empty_class_folders if form(path.rpartition("/")[2]) not in known}
    warnings = [
        f"{len(names)} {what}: {some_names(names)}"
        for what, names in (
            ("class folders without images, which are not classes", sorted(nameless)),
            (
                "empty folders of classes that have images elsewhere",
                sorted({*record.empty_class_folders} - nameless),
            ),
            ("files that are not images of a class, ignored", record.ignored_files),
            ("tables that are not part of a split in use, ignored", record.ignored_tables),
            ("folders that belong to no split, ignored", record.unused_folders),
            ("images in no list, left out", record.unlisted_images),
            ("images listed more than once, used once", listed and listed.repeated),
            ("classes without training images", splits["train"].classes_without_images),
            ("classes without test images", splits["test"].classes_without_images),
        )
        if names
    ]
    for what, several in (
        ("classes", splits["train"].images_per_class),
        ("domains", splits["train"].images_per_domain | splits["test"].images_per_domain),
    ):
        if same := alike(several):
            warnings.append(
                f"{what} whose names differ only in case or white space: {some_lines(same, limit=5)}"
            )
    if missing_domains:
        warnings.append(
            f"{num_domains} of {num_domains + len(missing_domains)} domains are there; without: "
            f"{some_names(missing_domains)}"
        )
    return tuple(warnings)


def _compare(
    spec: DatasetSpec, splits: Mapping[str, SplitRecord], *, is_divided: bool
) -> ExpectedRecord | None:
    """Return how the images differ from the published ones; None without such numbers, or for a part of them."""
    if spec.expected is None or spec.validation_fraction > 0 or spec.train_images_per_class is not None:
        return None
    has_own_split = bool(spec.split_file) or is_divided
    train, test = splits["train"], splits["test"]
    domains = {
        name: (count, test.images_per_domain.get(name, 0)) for name, count in train.images_per_domain.items()
    }
    compared = compare(
        spec.expected,
        (train.images, test.images),
        domains,
        has_own_split=has_own_split,
    )
    problem = None
    if compared.differences:
        problem = (
            f"not the images of '{compared.variant}': {some_lines(compared.differences, limit=4)}. Find what is "
            "missing, or set dataset.expected=null if these are the images you want"
        )
    return ExpectedRecord(
        variant=None if compared.differences else compared.variant,
        nearest=compared.variant,
        differences=compared.differences,
        missing_domains=compared.missing_domains,
        has_own_split=has_own_split,
        problem=problem,
    )


def _open(spec: DatasetSpec, *, reads_test: bool) -> Source:
    settings = TableSettings(
        spec.image_column, spec.label_column, spec.domain_column, spec.on_unlabelled, spec.row_names
    )
    if spec.path is not None:
        return open_path(
            spec.path,
            settings=settings,
            layout=spec.layout,
            train_split=spec.train_split,
            test_split=spec.test_split,
            reads_test=reads_test,
        )
    if spec.source is None:
        raise UsageError(
            f"data set '{spec.name}' has no images of its own: set dataset.path to a local image folder, "
            f"parquet file or saved data set. {expected_tree('<path>', spec.layout)}"
        )
    if spec.source.startswith("builtin:"):
        if spec.source != DIGITS:
            raise UsageError(f"dataset.source: {unknown_name('built-in data set', spec.source, [DIGITS])}")
        digits = open_digits()
        return digits if spec.test_split else replace(digits, test=None, has_test=False)
    return open_hub(
        spec.source,
        config_name=spec.config_name,
        revision=spec.revision,
        settings=settings,
        train_split=spec.train_split,
        test_split=spec.test_split,
        reads_test=reads_test,
    )


def _wrong_classes(source: Source, spec: DatasetSpec) -> list[str]:
    """Say whether the classes are not the announced ones, or not the same in both splits."""
    class_names = source.train.label_names
    problems = []
    if spec.num_classes not in (None, len(class_names)):
        problems.append(
            f"dataset.num_classes={spec.num_classes}, but {len(class_names)} classes were found: "
            f"{some_names(class_names)}."
        )
    if source.test is not None:
        used = (source.test.label_names[label] for label in np.unique(source.test.labels))
        known = {form(name) for name in class_names}
        unknown = [name for name in used if form(name) not in known]
        if unknown:
            problems.append(
                f"the test split has classes that the training split does not know: {some_names(unknown)}. It knows: "
                f"{some_names(class_names)}."
            )
    return problems


def _refuse_empty(source: Source, spec: DatasetSpec) -> None:
    """Raise if a split has no image left, and name the settings that leave images out."""
    skips = {"on_unlabelled=skip": spec.on_unlabelled, "on_bad_image=skip": spec.on_bad_image}
    leaving = ["domains"] * bool(spec.domains) + [name for name, value in skips.items() if value == "skip"]
    why = f", as {' and '.join(f'dataset.{each}' for each in leaving)} may leave out all" if leaving else ""
    if not len(source.train.labels):
        raise UsageError(f"data set '{spec.name}': the training split has no image left{why}.")
    if source.test is not None and not len(source.test.labels):
        advice = "" if spec.has_lists else ", or set dataset.test_split=null to hold some out"
        raise UsageError(
            f"data set '{spec.name}': the test split has no image left{why}. Give it images{advice}."
        )


def _settle_splits(
    source: Source, spec: DatasetSpec, *, has_test_split: bool
) -> tuple[SourceSplit, SourceSplit, str | None]:
    """Hold images out if this is asked for or needed; return training, test and what was done."""
    train = source.train
    _refuse_empty(source, spec)
    if source.test is not None:
        return train, source.test, None
    if spec.validation_fraction == 0:
        why = "there is no test split" if spec.test_split else "dataset.test_split is null"
        held_out = f"{spec.test_fraction:g} of every class, as {why}"
        train, test = hold_out(train, spec.test_fraction, "test")
    else:
        held_out = f"{spec.validation_fraction:g} of every class, for validation; "
        if has_test_split:
            held_out += "the source's test split is not used"
        else:
            train, _ = hold_out(train, spec.test_fraction, "test")
            held_out += f"the {spec.test_fraction:g} that are held out for testing are not used"
        train, test = hold_out(train, spec.validation_fraction, "validation")
    if len(test.labels) == 0:
        raise UsageError(
            f"data set '{spec.name}': no class has an image to spare for testing. Give a test split, or more "
            f"images."
        )
    logger.info("%s: held out: %d images, %s.", spec.name, len(test.labels), held_out)
    return train, test, held_out


def _image_split(
    name: Literal["train", "test"], split: SourceSplit, class_names: tuple[str, ...]
) -> ImageSplit:
    """Give a source split the class ids of the training split."""
    ids = {form(class_name): index for index, class_name in enumerate(class_names)}
    mapping = np.array([ids.get(form(class_name), -1) for class_name in split.label_names], dtype=np.int64)
    return ImageSplit(
        rows=split.rows,
        labels=mapping[split.labels],
        domains=split.domains,
        name=name,
        source_names=split.source_names,
        keys=split.identities,
    )


def _describe(split: ImageSplit, class_names: tuple[str, ...]) -> SplitRecord:
    """Count the images of a split by class."""
    counts = np.bincount(split.labels, minlength=len(class_names)).tolist()
    missing = [name for name, count in zip(class_names, counts, strict=True) if not count]
    return SplitRecord(
        images=len(split),
        classes=len(class_names) - len(missing),
        min_images_per_class=min(counts),
        max_images_per_class=max(counts),
        images_per_class=dict(zip(class_names, counts, strict=True)),
        images_per_domain={} if split.domains is None else _count_domains(split.domains),
        classes_without_images=tuple(missing),
    )


def _count_domains(domains: NDArray[np.str_]) -> dict[str, int]:
    names, counts = np.unique(domains, return_counts=True)
    return dict(zip(names.tolist(), counts.tolist(), strict=True))
