"""The benchmarks in small: true columns, class names, domains and list files, a few tiny images of each class.

Every function but the last writes below a folder and returns the arguments that open it, ``--dataset NAME --set
dataset.path=...``. All images of a data set differ, classes differ in hue, and some images are grey or CMYK, as in the
originals.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, Features
from images import encoded, tinted

CIFAR100_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle "
    "caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant "
    "flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man "
    "maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train "
    "trout tulip turtle wardrobe whale willow_tree wolf woman worm"
).split()
DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


def imagenet_r_classes(number: int = 200) -> list[str]:
    """Folder names like those of WordNet, in their order."""
    return [f"n{1440000 + 1000 * index:08d}" for index in range(number)]


def domainnet_classes(number: int = 345) -> list[str]:
    """Names in the order of the official numbers, which puts capitals where small letters would be."""
    real = ["aircraft_carrier", "airplane", "t-shirt", "The_Eiffel_Tower", "toe", "train"]
    invented = [f"thing_{index:03d}" for index in range(max(0, number - len(real)))]
    return sorted([*real, *invented], key=str.lower)[:number] if number > len(real) else real[-number:]


def picture(index: int, *, of: int, number: int, size: int = 16, file_format: str = "JPEG") -> bytes:
    """A noisy picture of its class's hue; every tenth is grey and, as JPEG, every eleventh is CMYK."""
    hue = np.array(colorsys.hsv_to_rgb(index / of, 0.9, 0.8)) * 255
    image = tinted(hue, [index, number], size=size)
    serial = 7 * index + number
    if serial % 10 == 9:
        image = image.convert("L")
    elif serial % 11 == 10 and file_format == "JPEG":
        image = image.convert("CMYK")
    return encoded(image, file_format)


def cifar100_miniature(root: Path, *, num_train: int = 3, num_test: int = 1) -> list[str]:
    """The parquet files of the hub: columns img, fine_label and coarse_label, rows in no order of classes."""
    features = Features(
        {
            "img": datasets.Image(),
            "fine_label": ClassLabel(names=CIFAR100_CLASSES),
            "coarse_label": ClassLabel(names=[f"group_{index:02d}" for index in range(20)]),
        }
    )
    folder = root / "cifar100"
    folder.mkdir(parents=True)
    for split, first, count in (("train", 0, num_train), ("test", num_train, num_test)):
        order = np.random.default_rng(0).permutation(100 * count)
        rows = [(int(row) % 100, first + int(row) // 100) for row in order]
        columns = {
            "img": [
                {"bytes": picture(label, of=100, number=number, size=32, file_format="PNG"), "path": None}
                for label, number in rows
            ],
            "fine_label": [label for label, _ in rows],
            "coarse_label": [label % 20 for label, _ in rows],
        }
        Dataset.from_dict(columns, features=features).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return _arguments("cifar100", folder)


def imagenet_r_miniature(
    root: Path, *, num_classes: int = 200, layout: Literal["flat", "split"] = "flat"
) -> list[str]:
    """200 class folders of 2 to 6 images; flat as in the archive, or divided 80 to 20 as many repositories want it."""
    folder = root / "imagenet-r"
    for index, name in enumerate(imagenet_r_classes(num_classes)):
        count = 2 + index * 7 % 5
        for number in range(count):
            part = "" if layout == "flat" else "test" if number == count - 1 else "train"
            file = folder / part / name / f"{('art', 'cartoon', 'sketch')[number % 3]}_{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(picture(index, of=num_classes, number=number))
    return _arguments("imagenet_r", folder, None if num_classes == 200 else num_classes)


def domainnet_miniature(
    root: Path, *, num_classes: int = 345, domains: Sequence[str] = DOMAINS, dataset: str = "domainnet"
) -> list[str]:
    """Folders ``<domain>/<class>`` and the official lists ``<domain>_train.txt``; domains of uneven size."""
    folder = root / "DomainNet"
    for rank, domain in enumerate(domains):
        lines: dict[str, list[str]] = {"train": [], "test": []}
        for label, name in enumerate(domainnet_classes(num_classes)):
            (folder / domain / name).mkdir(parents=True)
            num_train = 1 + (label + rank) % 3 // 2 + (domain == "quickdraw")
            for number in range(num_train + 1):
                path = f"{domain}/{name}/{domain}_{label + 1:03d}_{number + 1:06d}.jpg"
                content = picture(label, of=num_classes, number=10 * rank + number)
                (folder / path).write_bytes(content)
                lines["train" if number < num_train else "test"].append(f"{path} {label}\n")
        for split, listed in lines.items():
            (folder / f"{domain}_{split}.txt").write_text("".join(listed))
    return _arguments(dataset, folder, None if num_classes == 345 else num_classes)


def write_toy_folder(root: Path, names: list[str], *, num_train: int = 6, num_test: int = 4) -> Path:
    """Write PNG images of 32 pixels: every class a hue of its own plus noise."""
    generator = np.random.default_rng(0)
    for index, name in enumerate(names):
        colour = np.array(colorsys.hsv_to_rgb(index / len(names), 0.9, 0.8)) * 255
        for split, count in (("train", num_train), ("test", num_test)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                tinted(colour, generator).save(folder / f"{number}.png")
    return root


def _arguments(dataset: str, folder: Path, num_classes: int | None = None) -> list[str]:
    settings = {"path": folder, "expected": "null", **({"num_classes": num_classes} if num_classes else {})}
    options = [word for key, value in settings.items() for word in ("--set", f"dataset.{key}={value}")]
    return ["--dataset", dataset, *options, "--set", "trainer.mixed_precision=no"]


def write_table(
    file: Path,
    labels: Sequence[Any],
    *,
    class_names: Sequence[str] | None = None,
    first: int = 0,
    images: Sequence[Any] | None = None,
    image_type: pa.DataType | None = None,
    **columns: Sequence[Any],
) -> Path:
    """Write a parquet file with the columns image and label, all images of it and of other ``first`` rows different.

    Args:
        file: The file.
        labels: Of every row.
        class_names: Makes the labels class labels, as Hugging Face writes them.
        first: Number of the first row's picture.
        images: In place of pictures as structures with bytes and path.
        image_type: Their type.
        columns: Further columns.
    """
    pictures = [
        {"bytes": picture(0, of=1, number=first + row, file_format="PNG"), "path": None}
        for row in range(len(labels))
    ]
    table = pa.table({"image": pa.array(images or pictures, image_type), "label": labels, **columns})
    if class_names is not None:
        features = Features({"label": ClassLabel(names=list(class_names))})
        table = table.replace_schema_metadata(features.arrow_schema.metadata)
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file)
    return file
