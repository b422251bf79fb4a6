"""Digits, their transforms and the views of some of them."""

from __future__ import annotations

from typing import Any

import pytest
from view_batches import ROWS

from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.data.reading.datasets import DatasetSpec, load_image_dataset
from vbm_ptm.data.transforms import TransformsConfig, build_transforms
from vbm_ptm.data.view_transforms import ViewTransforms
from vbm_ptm.data.views import MultiViewDataset


@pytest.fixture(scope="module", name="split")
def training_split() -> ImageSplit:
    return load_image_dataset(DatasetSpec(name="digits", source="builtin:digits")).train


@pytest.fixture(scope="module", name="class_indices")
def reversed_labels(split: ImageSplit) -> Any:
    return 9 - split.labels


@pytest.fixture(scope="module", name="transforms")
def photograph_transforms() -> ViewTransforms:
    return build_transforms(
        TransformsConfig(),
        image_size=16,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        interpolation="bicubic",
        crop_fraction=1.0,
    )


@pytest.fixture(name="build")
def dataset_builder(split: ImageSplit, class_indices: Any, transforms: ViewTransforms) -> Any:
    def build(
        *,
        rows: Any = ROWS,
        num_views: int = 4,
        seed: int = 1,
        task_index: int = 2,
        strong_share: float = 0.0,
        transforms: ViewTransforms = transforms,
    ) -> MultiViewDataset:
        return MultiViewDataset(
            split,
            rows=rows,
            class_indices=class_indices,
            transforms=transforms,
            num_views=num_views,
            seed=seed,
            task_index=task_index,
            strong_share=strong_share,
        )

    return build
