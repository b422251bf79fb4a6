"""The miniatures open by the shipped files of the benchmarks and hold what those promise."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import miniatures
import pytest
from PIL import Image

from vbm_ptm.config.run_config import compose
from vbm_ptm.data.image_split import ImageDatasets
from vbm_ptm.data.reading.datasets import DatasetSpec, load_image_dataset


def load(arguments: list[str]) -> ImageDatasets:
    overrides = [
        value for option, value in zip(arguments[::2], arguments[1::2], strict=True) if option == "--set"
    ]
    section: dict[str, Any] = compose(dataset=arguments[1], overrides=overrides).tree["dataset"]
    return load_image_dataset(DatasetSpec.model_validate(section))


def modes(found: ImageDatasets) -> set[str]:
    rows = (found.train.rows[index]["image"] for index in range(len(found.train)))
    contents = (row["bytes"] or Path(row["path"]).read_bytes() for row in rows)
    return {Image.open(io.BytesIO(content)).mode for content in contents}


def test_cifar100_miniature__has_all_fine_classes(cifar100_arguments: list[str]) -> None:
    found = load(cifar100_arguments)
    assert (len(found.train), len(found.test), len(found.class_names)) == (300, 100, 100)
    assert "train" in found.class_names
    assert modes(found) == {"RGB", "L"}


def test_imagenet_r_miniature__has_all_classes_of_uneven_size(imagenet_r_arguments: list[str]) -> None:
    found = load(imagenet_r_arguments)
    assert len(found.class_names) == 200
    assert found.record.train.min_images_per_class == 1
    assert found.record.train.max_images_per_class > 3
    assert modes(found) == {"RGB", "L", "CMYK"}


@pytest.mark.slow
def test_domainnet_miniature__has_lists_whose_numbers_order_the_classes(
    domainnet_arguments: list[str],
) -> None:
    found = load([*domainnet_arguments, "--set", "dataset.verify=none"])
    assert found.class_names == tuple(miniatures.domainnet_classes())
    assert found.class_names != tuple(sorted(found.class_names))
    assert "train" in found.class_names
    assert tuple(found.record.train.images_per_domain) == miniatures.DOMAINS
    assert len(set(found.record.train.images_per_domain.values())) > 1
    assert [each.split for each in found.record.lists] == ["train"] * 6 + ["test"] * 6
    assert found.record.ignored_files.count == 0
