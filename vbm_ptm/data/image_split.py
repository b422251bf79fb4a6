"""Checked image splits: what everything above the reading of data works with.

Shapes: N images of a split.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
from datasets import Dataset
from numpy.typing import NDArray
from PIL import Image

from vbm_ptm.data.image_rows import ImageRows
from vbm_ptm.data.images import decode_image
from vbm_ptm.data.record import DataRecord


@dataclass(frozen=True)
class ImageSplit:
    """The images of one split and their classes.

    Attributes:
        rows: N undecoded images.
        labels: (N,) class ids.
        domains: (N,) names of domains, if the data set has them.
        name: "train" or "test".
        source_names: (N,) text: the path below the data set's folder, or the row of the source.
        keys: (N,) text: what identifies each row in the split's hash and file; None: the names.
        draft_size: Pixels that both sides of a JPEG keep when it is decoded in draft mode; None for all pixels.
    """

    rows: ImageRows | Dataset
    labels: NDArray[np.int64]
    domains: NDArray[np.str_] | None
    name: Literal["train", "test"]
    source_names: pa.Array
    keys: pa.Array | None = None
    draft_size: int | None = None

    @property
    def split_keys(self) -> pa.Array:
        """(N,) what identifies each row in the split's hash and file."""
        return self.source_names if self.keys is None else self.keys

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Return an image, upright and in RGB; an error says which one is bad."""
        value = self.rows[int(index)]["image"]
        return decode_image(value, name=self.source_name(index), draft_size=self.draft_size)

    def source_name(self, index: int) -> str:
        """Return what the source calls an image."""
        return str(self.source_names[int(index)].as_py())


@dataclass(frozen=True)
class ImageDatasets:
    """A training and a test split with one mapping from class id to name, that of the training split.

    Attributes:
        train: Training images.
        test: Test images, or the validation images where a validation fraction is set.
        class_names: Class id -> name as written.
        split_sha256: Over which image is in which split and class; not over the order of files or rows.
        record: What was found and decided, for the result of a run.
    """

    train: ImageSplit
    test: ImageSplit
    class_names: tuple[str, ...]
    split_sha256: str
    record: DataRecord

    def drafted(self, draft_size: int | None) -> ImageDatasets:
        """Return the same splits, with JPEGs decoded in draft mode."""
        return replace(
            self,
            train=replace(self.train, draft_size=draft_size),
            test=replace(self.test, draft_size=draft_size),
        )
