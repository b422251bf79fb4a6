"""Compare whole runs in the default precision with runs in fp32: same images, model and schedule, both in one process.

    OMP_NUM_THREADS=1 python scripts/bench/whole_run.py --images FOLDER [--weights FILE] [--size full|small]

Three tasks of pictures of 20 classes, ViT-Ti/16 at 224 px, batches of 32, two epochs, one view, as a run of PILOT was
measured with (docs/performance.md). FOLDER holds train.parquet and test.parquet with the columns image and label. CPU
seconds of one thread are printed, data layer, evaluation and the end of tasks included. Without bf16 units both sides
are fp32, which shows the noise.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import torch

from vbm_ptm.config.run_config import compose
from vbm_ptm.engine.precision import resolve_precision
from vbm_ptm.experiment import run


class Size(NamedTuple):
    """Classes, training images of each by learner, test images of each, and epochs."""

    num_classes: int
    slca: int
    l2p: int
    test: int
    epochs: int


SIZES = {"full": Size(20, 60, 30, 10, 2), "small": Size(3, 4, 4, 2, 1)}


def write_pictures(source: Path, folder: Path, size: Size, learner: str) -> None:
    """Write the first images of the first classes as files."""
    for split, most in (("train", getattr(size, learner)), ("test", size.test)):
        table = pq.read_table(source / f"{split}.parquet", columns=["image", "label"])
        counts: Counter[int] = Counter()
        for image, label in zip(table["image"], table["label"].to_pylist(), strict=True):
            if label < size.num_classes and counts[label] < most:
                file = folder / split / f"class{label:02d}" / f"{counts[label]}.jpg"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(image["bytes"].as_py())
                counts[label] += 1


def cpu_seconds(learner: str, size: Size, options: argparse.Namespace, precision: str) -> tuple[float, float]:
    """Return the CPU seconds of a run and the accuracy that it ended at, in percent."""
    weights = f"backbone.checkpoint={options.weights}" if options.weights else "backbone.from_scratch=true"
    overrides = [
        *("backbone.name=vit_tiny_patch16_224", weights, "scenario.num_tasks=3", "device=cpu"),
        *("view_batch.num_views=1", "optimization.batch_size=32", f"optimization.epochs={size.epochs}"),
        *("optimization.schedule=constant", "dataset.verify=none", f"trainer.mixed_precision={precision}"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(options.images, Path(folder) / "pictures", size, learner)
        dataset = str(Path(folder) / "pictures")
        config = compose(dataset=dataset, learner=learner, overrides=overrides).validate()
        started = time.process_time()
        result = run(config, output=Path(folder) / "run", is_quiet=True)
        return time.process_time() - started, result["metrics"]["class_incremental"]["top1"]["last_accuracy"]


def main() -> None:
    """Run both learners in both precisions, and print a table."""
    parser = argparse.ArgumentParser(description="Compare whole runs in the default precision with fp32.")
    parser.add_argument(
        "--images", type=Path, required=True, help="folder with train.parquet and test.parquet"
    )
    parser.add_argument("--weights", type=Path, help="weights of ViT-Ti/16; random ones without")
    parser.add_argument("--size", choices=tuple(SIZES), default="full", help="small: to see that it works")
    parser.add_argument("--learners", default="slca,l2p", help="slca, l2p or both")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("vbm_ptm").setLevel(logging.ERROR)
    default = resolve_precision("auto", "cpu")
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, precision auto = {default}\n"
    )
    print("| learner | default, CPU s | fp32, CPU s | fp32 / default | last accuracy, default and fp32 |")
    print("|---|---|---|---|---|")
    for learner in options.learners.split(","):
        (ours, accuracy), (plain, other) = (
            cpu_seconds(learner, SIZES[options.size], options, precision) for precision in ("auto", "no")
        )
        print(
            f"| {learner} | {ours:.0f} | {plain:.0f} | {plain / ours:.2f} | {accuracy:.1f}, {other:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
