"""Image data sets: what is configured, and how it becomes a training and a test split with one mapping.

Shapes: N images of a split, K classes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, model_validator

from vbm_ptm.data.folders import Layout, expected_tree
from vbm_ptm.data.images import check_images, decode_image
from vbm_ptm.data.sources import DIGITS, Columns, Source, SourceSplit, open_digits, open_hub, open_path
from vbm_ptm.data.transforms import TransformsConfig
from vbm_ptm.errors import UsageError, unknown_name
from vbm_ptm.settings import AbsolutePath, Settings

__all__ = ["DatasetSpec", "ImageDatasets", "ImageSplit", "decode_image", "load_image_dataset"]

logger = logging.getLogger(__name__)

_MAX_IMAGES_FOR_FULL_CHECK = 20_000


class DatasetSpec(Settings):
    """Where images come from and how they are split.

    Attributes:
        name: What the data set is called in results.
        source: ``builtin:digits`` or the id of a data set on the Hugging Face hub.
        config_name: Configuration of a hub data set.
        revision: Branch, tag or commit of a hub data set.
        path: An image folder, a parquet file, a folder of parquet files, or what ``save_to_disk`` wrote;
            wins over `source`.
        layout: Of an image folder: ``train/<class>/`` (split), ``<class>/`` (flat), or found out (auto).
        image_column: Column with the images (tables only).
        label_column: Column with the class: class labels, integers or text (tables only).
        domain_column: Column with the domain (tables only).
        train_split: Name of the training split or folder.
        test_split: Name of the test split or folder.
        test_fraction: Part of every class that is held out where there is no test split.
        validation_fraction: If above 0, this part of every class of the training data becomes the test
            split and the real one is not touched: for tuning.
        num_classes: Checked against what was found.
        on_bad_image: Refuse to start with images that cannot be decoded, or leave them out.
        verify: Decode every image before training (full), look for empty files only (none: not even that);
            auto is full up to 20,000 images.
        transforms: How views are drawn.
    """

    name: str
    source: str | None = None
    config_name: str | None = None
    revision: str | None = None
    path: AbsolutePath | None = None
    layout: Layout = "auto"
    image_column: str = "image"
    label_column: str = "label"
    domain_column: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    test_fraction: float = Field(default=0.2, gt=0, lt=1)
    validation_fraction: float = Field(default=0.0, ge=0, lt=1)
    num_classes: int | None = Field(default=None, ge=1)
    on_bad_image: Literal["error", "skip"] = "error"
    verify: Literal["auto", "full", "none"] = "auto"
    transforms: TransformsConfig = TransformsConfig()

    @model_validator(mode="after")
    def _check_combination(self) -> DatasetSpec:
        if self.on_bad_image == "skip" and self.verify == "none":
            raise ValueError("on_bad_image=skip has to decode every image: verify=none does not go with it")
        if self.train_split == self.test_split:
            raise ValueError(f"train_split and test_split are both '{self.train_split}'")
        return self


@dataclass(frozen=True)
class ImageSplit:
    """The images of one split and their classes.

    Attributes:
        rows: One column ``image``, undecoded; N rows.
        labels: (N,) class ids.
        domains: (N,) names of domains, if the data set has them.
        name: "train" or "test".
        source_names: (N,) text: the path below the data set's folder, or the row of the source.
    """

    rows: Dataset
    labels: NDArray[np.int64]
    domains: NDArray[np.str_] | None
    name: Literal["train", "test"]
    source_names: pa.Array

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Return an image upright and in RGB; an error says which one is bad."""
        return decode_image(self.rows[int(index)]["image"], name=self.source_name(index))

    def source_name(self, index: int) -> str:
        """Return what the source calls an image."""
        return str(self.source_names[int(index)].as_py())


@dataclass(frozen=True)
class ImageDatasets:
    """A training and a test split with one mapping from class id to name, taken from training.

    Attributes:
        train: Training images.
        test: Test images, or the validation images where a validation fraction is set.
        class_names: Class id -> name as written.
        split_sha256: Over which image is in which split and class; not over the order of the files.
        record: What was found and decided, for the result of a run.
    """

    train: ImageSplit
    test: ImageSplit
    class_names: tuple[str, ...]
    split_sha256: str
    record: dict[str, Any]


def load_image_dataset(spec: DatasetSpec) -> ImageDatasets:
    """Read a data set: its images stay undecoded, its labels are read, its splits are settled.

    The outcome depends on names alone: not on the order of files, the machine or any training seed.

    Raises:
        UsageError: The data set is not there, cannot be read as configured, or holds bad images.
    """
    source = _open(spec)
    has_test_split = source.test is not None
    if spec.validation_fraction > 0:
        source = replace(source, test=None)
    _refuse_wrong_classes(source, spec)
    source, checks = _check(source, spec)
    train, test, held_out = _settle_splits(source, spec, has_test_split=has_test_split)
    class_names = train.label_names
    splits = (_image_split("train", train, class_names), _image_split("test", test, class_names))
    record: dict[str, Any] = {
        "name": spec.name,
        **source.record,
        "num_classes": len(class_names),
        "held_out": held_out,
        **checks,
        **{split.name: _describe(split, class_names) for split in splits},
    }
    for split in splits:
        counts = record[split.name]
        logger.info(
            "%s (%s): %s split: %d images, %d classes, %d to %d images per class.",
            *(spec.name, source.record.get("layout", source.record["kind"]), split.name, counts["images"]),
            *(counts["classes"], counts["min_images_per_class"], counts["max_images_per_class"]),
        )
        missing = counts["classes_without_images"]
        if missing:
            what = "training" if split.name == "train" else "test"
            logger.warning(
                "%s: %d classes without %s images: %s", spec.name, len(missing), what, _some(missing)
            )
    return ImageDatasets(
        train=splits[0],
        test=splits[1],
        class_names=class_names,
        split_sha256=_split_sha256(splits, class_names),
        record=record,
    )


def _open(spec: DatasetSpec) -> Source:
    columns = Columns(spec.image_column, spec.label_column, spec.domain_column)
    if spec.path is not None:
        return open_path(
            spec.path,
            columns=columns,
            layout=spec.layout,
            train_split=spec.train_split,
            test_split=spec.test_split,
        )
    if spec.source is None:
        raise UsageError(
            f"data set '{spec.name}' has no images of its own: set dataset.path to a local image folder, "
            f"parquet file or saved data set. {expected_tree('<path>')}"
        )
    if spec.source.startswith("builtin:"):
        if spec.source != DIGITS:
            raise UsageError(f"dataset.source: {unknown_name('built-in data set', spec.source, [DIGITS])}")
        return open_digits()
    return open_hub(
        spec.source,
        config_name=spec.config_name,
        revision=spec.revision,
        columns=columns,
        train_split=spec.train_split,
        test_split=spec.test_split,
    )


def _refuse_wrong_classes(source: Source, spec: DatasetSpec) -> None:
    """Raise where the classes are not those that were announced, or not the same in both splits."""
    class_names = source.train.label_names
    if spec.num_classes not in (None, len(class_names)):
        raise UsageError(
            f"data set '{spec.name}': dataset.num_classes={spec.num_classes}, but {len(class_names)} classes "
            f"were found: {_some(class_names)}."
        )
    if source.test is not None:
        used = (source.test.label_names[label] for label in np.unique(source.test.labels))
        unknown = [name for name in used if name not in class_names]
        if unknown:
            raise UsageError(
                f"data set '{spec.name}': the test split has classes that the training split does not know: "
                f"{_some(unknown)}. Known are: {_some(class_names)}."
            )


def _check(source: Source, spec: DatasetSpec) -> tuple[Source, dict[str, Any]]:
    """Look for bad images; raise one error that names all of them, or leave them out."""
    splits = [split for split in (source.train, source.test) if split is not None]
    total = sum(len(split.labels) for split in splits)
    if source.record["location"] == DIGITS or spec.verify == "none":
        return source, {"verified": "nothing", "skipped_images": []}
    full = spec.on_bad_image == "skip" or spec.verify == "full" or total <= _MAX_IMAGES_FOR_FULL_CHECK
    if not full:
        logger.info(
            "%s: %d images: only empty and missing files are looked for before training; "
            "dataset.verify=full decodes every image.", spec.name, total,
        )  # fmt: skip
    find = _undecodable if full else _empty_images
    bad = [find(split) for split in splits]
    problems = [problem for found in bad for problem in found.values()]
    verified = "every image decoded" if full else "no empty or missing files"
    record: dict[str, Any] = {"verified": verified, "skipped_images": []}
    if not problems:
        return source, record
    if spec.on_bad_image == "error":
        raise UsageError(
            f"data set '{spec.name}': {len(problems)} of {total} images are bad. Replace or delete them, or "
            f"set dataset.on_bad_image=skip:",
            *problems,
        )
    for problem in problems:
        logger.warning("%s: skipped: %s", spec.name, problem)
    kept = [
        _select(split, np.array([i for i in range(len(split.labels)) if i not in found], dtype=np.int64))
        for split, found in zip(splits, bad, strict=True)
    ]
    lost = sorted(
        {source.train.label_names[label] for label in np.unique(source.train.labels)}
        - {kept[0].label_names[label] for label in np.unique(kept[0].labels)}
    )
    if lost:
        raise UsageError(
            f"data set '{spec.name}': without its bad images no training image is left of: {_some(lost)}.",
            *problems,
        )
    record["skipped_images"] = [
        split.source_names[index].as_py() for split, found in zip(splits, bad, strict=True) for index in found
    ]
    return replace(source, train=kept[0], test=kept[1] if len(kept) > 1 else None), record


def _settle_splits(
    source: Source, spec: DatasetSpec, *, has_test_split: bool
) -> tuple[SourceSplit, SourceSplit, str | None]:
    """Hold images out where it is asked for or needed; return training, test and what was done."""
    train = source.train
    if source.test is not None:
        return train, source.test, None
    if spec.validation_fraction == 0:
        held_out = f"{spec.test_fraction:g} of every class, for want of a test split"
        train, test = _hold_out(train, spec.test_fraction, "test")
    else:
        held_out = f"{spec.validation_fraction:g} of every class, for validation; "
        if has_test_split:
            held_out += "the source's test split is not touched"
        else:
            train, _ = _hold_out(train, spec.test_fraction, "test")
            held_out += f"the {spec.test_fraction:g} that are held out for testing are not touched"
        train, test = _hold_out(train, spec.validation_fraction, "validation")
    if len(test.labels) == 0:
        raise UsageError(
            f"data set '{spec.name}': no class has an image to spare for testing. Give a test split, or more "
            f"images."
        )
    logger.info("%s: held out: %d images, %s.", spec.name, len(test.labels), held_out)
    return train, test, held_out


def _undecodable(split: SourceSplit) -> dict[int, str]:
    return check_images(
        lambda index: split.rows[index]["image"],
        lambda index: str(split.source_names[index].as_py()),
        len(split.labels),
    )


def _empty_images(split: SourceSplit) -> dict[int, str]:
    """Return position -> problem of images without bytes, or whose file is missing or empty."""
    problems: dict[int, str] = {}
    images = split.rows.with_format("arrow")[:].column("image")
    position = 0
    for chunk in images.chunks:
        sizes = pc.binary_length(chunk.field("bytes")).to_pylist()
        for size, path in zip(sizes, chunk.field("path"), strict=True):
            problem = None
            if size is None:
                try:
                    size = os.stat(path.as_py() or "").st_size
                except OSError:
                    problem = "there is no such file"
            if size == 0:
                problem = "the file is empty"
            if problem:
                problems[position] = f"cannot read image '{split.source_names[position].as_py()}': {problem}."
            position += 1
    return problems


def _select(split: SourceSplit, indices: NDArray[np.int64]) -> SourceSplit:
    return replace(
        split,
        rows=split.rows.select(indices),
        labels=split.labels[indices],
        domains=None if split.domains is None else split.domains[indices],
        source_names=split.source_names.take(pa.array(indices)),
    )


def _hold_out(split: SourceSplit, fraction: float, purpose: str) -> tuple[SourceSplit, SourceSplit]:
    """Divide a split per class (and domain); return what stays and what is held out.

    The images of a class are ordered by a hash of their names and the first ones are held out: at least
    one, but never the last image of a class.
    """
    groups: dict[tuple[int, str], list[tuple[bytes, int]]] = {}
    for index, (label, name) in enumerate(zip(split.labels, split.source_names.to_pylist(), strict=True)):
        domain = "" if split.domains is None else str(split.domains[index])
        key = f"{purpose}|{unicodedata.normalize('NFC', name)}".encode()
        digest = hashlib.blake2b(key, digest_size=16).digest()
        groups.setdefault((int(label), domain), []).append((digest, index))
    is_held_out = np.zeros(len(split.labels), dtype=bool)
    for members in groups.values():
        count = min(max(1, int(len(members) * fraction + 0.5)), len(members) - 1)
        is_held_out[[index for _, index in sorted(members)[:count]]] = True
    return _select(split, np.flatnonzero(~is_held_out)), _select(split, np.flatnonzero(is_held_out))


def _image_split(
    name: Literal["train", "test"], split: SourceSplit, class_names: tuple[str, ...]
) -> ImageSplit:
    """Give a source split the class ids of the training split."""
    ids = {class_name: index for index, class_name in enumerate(class_names)}
    mapping = np.array([ids.get(class_name, -1) for class_name in split.label_names], dtype=np.int64)
    return ImageSplit(
        rows=split.rows,
        labels=mapping[split.labels],
        domains=split.domains,
        name=name,
        source_names=split.source_names,
    )


def _describe(split: ImageSplit, class_names: tuple[str, ...]) -> dict[str, Any]:
    """Count the images of a split by class."""
    counts = np.bincount(split.labels, minlength=len(class_names)).tolist()
    missing = [name for name, count in zip(class_names, counts, strict=True) if not count]
    return {
        "images": len(split),
        "classes": len(class_names) - len(missing),
        "min_images_per_class": min(counts),
        "max_images_per_class": max(counts),
        "images_per_class": dict(zip(class_names, counts, strict=True)),
        "classes_without_images": missing,
    }


def _split_sha256(splits: Iterable[ImageSplit], class_names: tuple[str, ...]) -> str:
    lines = sorted(
        unicodedata.normalize("NFC", f"{split.name}\0{class_names[label]}\0{name}\n")
        for split in splits
        for label, name in zip(split.labels, split.source_names.to_pylist(), strict=True)
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _some(names: Iterable[str], limit: int = 10) -> str:
    names = list(names)
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"'{name}'" for name in names[:limit]) + rest
