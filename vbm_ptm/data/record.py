"""What was found in a data set and decided about it, as results record it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

_MOST_NAMES = 100


class Record(BaseModel):
    """A part of what a run stores: frozen; keys written by another version are kept."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for the keys that were set: each kind of data set has some of its own."""
        return self.model_dump(mode="json", exclude_unset=True)


class TransformsRecord(Record):
    """What the transforms of a run do, as its result describes them.

    Attributes:
        image_size: Side of the square that the backbone takes.
        weak: Operations of the weak view, in order.
        strong: What a strong view adds.
        evaluate: Operations of the evaluation view, in order.
        mean: Mean of each channel, for values in 0..1.
        std: Standard deviation of each channel.
        interpolation: Filter of every resize.
        normalization: Where mean and std come from.
        draft_size: Smallest side that JPEG files are decoded to; None: their own size.
        strong_on: Where strong views are made; None: by the loaders.
    """

    image_size: int
    weak: tuple[str, ...]
    strong: str
    evaluate: tuple[str, ...]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str | None = None
    normalization: str | None = None
    draft_size: int | None = None
    strong_on: str | None = None


class SplitRecord(Record):
    """The images of one split.

    Attributes:
        images: Number of images.
        classes: Number of classes with at least one image.
        min_images_per_class: Images of the smallest class, which may have none.
        max_images_per_class: Images of the largest class.
        images_per_class: Images by name of the class.
        images_per_domain: Images by name of the domain; empty if the data set has no domains.
        classes_without_images: Their names.
    """

    images: int
    classes: int
    min_images_per_class: int
    max_images_per_class: int
    images_per_class: dict[str, int]
    images_per_domain: dict[str, int] = {}
    classes_without_images: tuple[str, ...] = ()

    @property
    def class_sizes(self) -> str:
        """The images per class, in words: "6", or "4 to 5"."""
        smallest, largest = self.min_images_per_class, self.max_images_per_class
        return str(largest) if smallest == largest else f"{smallest} to {largest}"


class ListRecord(Record):
    """A list that says which image is in which split.

    Attributes:
        file: Its path.
        split: "train", "test" or "both".
        sha256: Hash of its bytes.
        images: Number of images that it lists.
    """

    file: str
    split: str
    sha256: str
    images: int


class SourceFacts(Record):
    """Where images come from. Fields that do not apply to a kind of source are not set.

    Attributes:
        kind: "builtin", "hub", "folder", "parquet" or "saved data set".
        location: Folder, file or name on the Hub.
        config_name: Configuration of a Hub data set.
        revision: Revision of a Hub data set.
        files: Names of parquet files by split.
        layout: Layout of an image folder.
        test_folder: Folder of test images within an image folder.
        empty_class_folders: Class folders without images, which are not classes.
        unused_folders: Folders that belong to no split.
        lists: Files that say which image is in which split.
    """

    kind: str
    location: str
    config_name: str | None = None
    revision: str | None = None
    files: dict[str, tuple[str, ...]] = {}
    layout: str | None = None
    test_folder: str | None = None
    empty_class_folders: tuple[str, ...] = ()
    unused_folders: tuple[str, ...] = ()
    lists: tuple[ListRecord, ...] = ()


class SourceRecord(SourceFacts):
    """The same, with the names of everything that is left out, which may be very many.

    Attributes:
        ignored_files: Files that are not images of a class.
        ignored_tables: Parquet files of a folder that are not part of a split in use.
        unlisted_images: Images in none of the lists.
    """

    ignored_files: tuple[str, ...] = ()
    ignored_tables: tuple[str, ...] = ()
    unlisted_images: tuple[str, ...] = ()


class SomeNames(Record):
    """Names, of which there may be very many.

    Attributes:
        count: How many there are.
        first: The first of them.
    """

    count: int
    first: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> SomeNames:
        """Keep the first names."""
        return cls(count=len(names), first=tuple(names[:_MOST_NAMES]))


class ExpectedRecord(Record):
    """How the images compare with the published ones.

    Attributes:
        variant: The published variant that they match; None if they match none.
        nearest: The variant that they are closest to.
        differences: What differs from it, in words.
        missing_domains: Its domains that were not found.
        has_own_split: Whether only totals could be compared.
        problem: What to do about the differences; None without any.
    """

    variant: str | None
    nearest: str
    differences: tuple[str, ...]
    missing_domains: tuple[str, ...]
    has_own_split: bool
    problem: str | None


class DataRecord(SourceFacts):
    """What was found in a data set and decided about it: the facts of its source, and these.

    Attributes:
        name: What the configuration calls it.
        ignored_files: Files that are not images of a class.
        ignored_tables: Parquet files of a folder that are not part of a split in use.
        unlisted_images: Images in none of the lists.
        num_classes: Classes of the training split.
        held_out: Which part of the training images was held out for testing; None with a test split.
        verified: How the images were checked.
        skipped_images: Bad images that were left out.
        train: The training images.
        test: The test images.
        expected: How they compare with the published ones, if those numbers are known.
        warnings: Everything worth a warning.
    """

    name: str
    ignored_files: SomeNames | None = None
    ignored_tables: SomeNames | None = None
    unlisted_images: SomeNames | None = None
    num_classes: int
    held_out: str | None
    verified: str
    skipped_images: tuple[str, ...]
    train: SplitRecord
    test: SplitRecord
    expected: ExpectedRecord | None = None
    warnings: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where the images were read from, in words."""
        if self.kind == "builtin":
            return f"{self.location}, which comes with this package"
        if self.kind == "hub":
            return f"'{self.location}' of the Hugging Face Hub"
        kind = f"{self.layout} folder" if self.layout else self.kind
        return f"{kind} '{self.location}'"
