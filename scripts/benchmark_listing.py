"""How long a data set of DomainNet's size takes to open: from list files, from folders and from parquet.

Listing, splitting, hashing and the search for empty files are real; the images are links to a single pixel.

Usage: python scripts/benchmark_listing.py [NUMBER_OF_IMAGES]
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import datasets
import numpy as np
from datasets import ClassLabel, Dataset, Features, Value
from PIL import Image

from vbm_ptm.data.reading.datasets import DatasetSpec, load_image_dataset

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
NUM_CLASSES = 345


def picture() -> bytes:
    """Return the smallest image that can be decoded."""
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1)).save(buffer, format="PNG")
    return buffer.getvalue()


def write_folders(root: Path, num_images: int) -> None:
    """Write ``<domain>/<class>/<image>.jpg`` and the lists of each domain, a third of it for testing."""
    for domain_index, domain in enumerate(DOMAINS):
        lines: dict[str, list[str]] = {"train": [], "test": []}
        for label in range(NUM_CLASSES):
            folder = root / domain / f"class_{label:03d}"
            folder.mkdir(parents=True)
            first = folder / "000000.jpg"
            first.write_bytes(picture())
            share = num_images // (len(DOMAINS) * NUM_CLASSES)
            for number in range(share):
                path = f"{domain}/class_{label:03d}/{number:06d}.jpg"
                if number:
                    os.link(first, root / path)
                lines["test" if number % 3 == 0 else "train"].append(f"{path} {label}\n")
        for split, listed in lines.items():
            (root / f"{domain}_{split}.txt").write_text("".join(listed))
        sys.stderr.write(f"wrote {domain_index + 1} of {len(DOMAINS)} domains\n")


def write_parquet(root: Path, num_images: int) -> None:
    """Write a table of the same size whose images are a few bytes."""
    rows = np.arange(num_images)
    features = Features(
        {
            "image": datasets.Image(),
            "label": ClassLabel(names=[f"class_{label:03d}" for label in range(NUM_CLASSES)]),
            "domain": Value("string"),
        }
    )
    table = Dataset.from_dict(
        {
            "image": [{"bytes": picture(), "path": None}] * num_images,
            "label": rows % NUM_CLASSES,
            "domain": [DOMAINS[row % len(DOMAINS)] for row in rows.tolist()],
        },
        features=features,
    )
    root.mkdir()
    table.to_parquet(root / "train.parquet")


def main() -> None:
    """Write, open, report."""
    num_images = int(sys.argv[1]) if len(sys.argv) > 1 else 600_000
    folder = Path(tempfile.mkdtemp(prefix="listing-"))
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    datasets.disable_progress_bars()
    try:
        write_folders(folder / "images", num_images)
        write_parquet(folder / "table", num_images)
        common = {"name": "benchmark", "verify": "auto"}
        images = {"path": folder / "images", "layout": "domains", **common}
        table = {"path": folder / "table", "domain_column": "domain", **common}
        lists = {"train_list": "*_train.txt", "test_list": "*_test.txt"}
        for name, fields in (
            ("list files", {**images, **lists}),
            ("list files, one domain", {**images, **lists, "domains": ["clipart"]}),
            ("folders, held out", images),
            ("parquet, first time", table),
            ("parquet, again", table),
        ):
            started, worked = time.perf_counter(), time.process_time()
            found = load_image_dataset(DatasetSpec.model_validate(fields))
            seconds, work = time.perf_counter() - started, time.process_time() - worked
            print(
                f"{name:24}{len(found.train):9,} + {len(found.test):7,} images {seconds:6.1f} s, {work:6.1f} s of work"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
