"""What a data set of DomainNet's size takes until it is open, and until the first step: seconds and memory.

Listing, splitting, hashing and the search for empty files are real; the images are links to a single pixel. Everything
is measured in a process of its own. With several numbers of images, the growth between them tells of a step that takes
the square of it. Linux alone.

Usage: python scripts/benchmark_listing.py [NUMBER_OF_IMAGES ...]
"""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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
    for domain in DOMAINS:
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
    datasets.disable_progress_bars()
    table.to_parquet(root / "train.parquet")


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of every way to open the images."""
    images = {"path": str(folder / "images"), "layout": "domains"}
    table = {"path": str(folder / "table"), "domain_column": "domain"}
    lists = {"train_list": "*_train.txt", "test_list": "*_test.txt"}
    return {
        "list files": images | lists,
        "list files, one domain": images | lists | {"domains": ["clipart"]},
        "folders, held out": images,
        "parquet, first time": table,
        "parquet, again": table,
    }


def open_images(settings: dict[str, Any], cache: Path) -> None:
    """Open a data set; print what it took beyond importing all that is needed."""
    datasets.config.HF_DATASETS_CACHE = cache
    datasets.disable_progress_bars()
    before, started, worked = peak_mib("self"), time.perf_counter(), time.process_time()
    found = load_image_dataset(DatasetSpec.model_validate({"name": "benchmark", **settings}))
    seconds, work = time.perf_counter() - started, time.process_time() - worked
    print(row(len(found.train) + len(found.test), seconds, work, peak_mib("self") - before))


def start_run(folder: Path, output: Path, num_images: int) -> str:
    """Start a real run on the folders; return what it took until the first step was logged."""
    settings = {
        "dataset.layout": "domains",
        "scenario.num_tasks": 5,
        "backbone.name": "test_vit.r160_in1k",
        "backbone.from_scratch": True,
        "backbone.image_size": 32,
        "trainer.log_every": 1,
        "trainer.mixed_precision": "no",
    }
    options = itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in settings.items())
    command = [
        sys.executable,
        "-m",
        "vbm_ptm",
        "train",
        "--dataset",
        str(folder),
        "--learner",
        "linear_probe",
    ]
    command += ["--preset", "none", "--device", "cpu", *options, "--output", str(output)]
    started, log = time.perf_counter(), output / "log.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (log.exists() and '"event": "step"' in log.read_text()):
            if process.poll() is not None:
                raise RuntimeError(f"the run ended with {process.returncode} before its first step")
            time.sleep(0.05)
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        work = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        line = row(num_images, time.perf_counter() - started, work, peak_mib(str(process.pid)))
        process.kill()
    return line


def peak_mib(process: str) -> float:
    """Return the most resident memory that a process has had."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def row(num_images: int, seconds: float, work: float, mib: float) -> str:
    """Return a line of the table without its name."""
    return f"{num_images:10,}{seconds:9.1f}{work:9.1f}{mib:9.0f}"


def measure(num_images: int) -> None:
    """Write, open in every way, start a run."""
    folder = Path(tempfile.mkdtemp(prefix="listing-"))
    try:
        write_folders(folder / "images", num_images)
        write_parquet(folder / "table", num_images)
        num_files = num_images // (len(DOMAINS) * NUM_CLASSES) * len(DOMAINS) * NUM_CLASSES
        for name, settings in cases(folder).items():
            command = [sys.executable, __file__, "--open", json.dumps(settings), str(folder / "cache")]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            print(f"{name:28}{done.stdout.rstrip()}", flush=True)
        print(f"{'folders, to the first step':28}{start_run(folder / 'images', folder / 'run', num_files)}")
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure for each number of images."""
    if sys.argv[1:2] == ["--open"]:
        open_images(json.loads(sys.argv[2]), Path(sys.argv[3]))
        return
    print(f"{'':28}{'images':>10}{'seconds':>9}{'of work':>9}{'MiB':>9}")
    for number in map(int, sys.argv[1:] or ["600000"]):
        measure(number)


if __name__ == "__main__":
    main()
