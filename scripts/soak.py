"""Run learners over many tasks where little memory can be shared, and see that nothing hangs, grows or is left behind.

Every run is a real one: a small ViT or ResNet on a folder of tiny images, a task for every two classes, with a /dev/shm
of 64 MB (in a mount namespace of its own) and a long TMPDIR. Resident memory of the main process and of its workers is
read after every task. What is known more with every task is read from its checkpoints: the learner, its statistics, and
a row of the matrix of accuracies, which is a cell longer each time. Beyond that, memory must be flat once the first
tasks are over. Exit code 1 if a run fails, hangs, grows or leaves something behind. A second table tells what a task
costs early and late in a run. Linux alone.

Usage: python scripts/soak.py --tasks 50 --workers 0,2
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES_PER_TASK = 2
TRAINING_IMAGES, TEST_IMAGES = 3, 1
SETTINGS = {
    "backbone.name": "test_vit.r160_in1k",
    "backbone.from_scratch": "true",
    "backbone.image_size": "32",
    "view_batch.num_views": "2",
    "optimization.epochs": "2",
    "optimization.batch_size": "8",
    "optimization.learning_rate": "1e-3",
    "trainer.mixed_precision": "no",
    "checkpoint.keep": "all",
}
RESNET = {"backbone.name": "resnet18_cifar", "backbone.from_scratch": "false", "backbone.channels": "2"}
# Learners with an expert for each task take the cube of their number for evaluation, so that EASE is not one of them.
LEARNERS: dict[str, dict[str, str]] = {
    "nearest_mean": {},
    "slca": {"learner.alignment_epochs": "2"},
    "l2p": {},
    "dualprompt": {},
    "coda_prompt": {"learner.pool_size": "50"},
    "s_iprompt": {},
    "finetune": {},
    "er": RESNET | {"learner.capacity": "50"},
}
POLL_SECONDS = 0.1
NUM_SPANS = 10
# An empty folder for kernels that torch makes when it is imported, and means to stay.
CACHE_OF_TORCH = "torchinductor_"
# How much more room JSON takes as objects, which are there while it is written.
OBJECTS_PER_JSON = 10
# What resident memory may grow by for a task beyond what is stored for it: a quarter of a network, since one kept by
# mistake takes 1.5 MiB. Of the 250 to 350 KiB a task of CODA-Prompt, 72 are in use (mallinfo2 and Python's own count,
# tasks 12 to 48); the others are pages that the two allocators keep free, and code that is run for the first time.
FLAT_KIB = 384.0


@dataclass
class Soak:
    """What was seen of a run.

    Attributes:
        learner: Its name.
        workers: Processes that load images.
        code: Exit code; None for a run that was ended at the limit.
        seconds: What it took.
        main_kib: Resident memory of the main process after each task.
        worker_kib: Of the largest worker while each task ran; 0 without one.
        stored_kib: What a checkpoint holds after each task, JSON as objects.
        left: What was left behind, in words.
        milliseconds: Of a training step, the end of a task and the evaluation of an image, for each task.
    """

    learner: str
    workers: int
    code: int | None = None
    seconds: float = 0.0
    main_kib: list[int] = field(default_factory=list)
    worker_kib: list[int] = field(default_factory=list)
    stored_kib: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    milliseconds: list[tuple[float, float, float]] = field(default_factory=list)

    def problems(self, num_tasks: int) -> list[str]:
        """Return what is wrong with it."""
        found = list(self.left)
        if self.code is None:
            found.append("hangs")
        elif self.code:
            found.append(f"exit code {self.code}")
        elif len(self.main_kib) != num_tasks:
            found.append(f"{len(self.main_kib)} tasks of {num_tasks}")
        for name, kib in (("main process", self.main_kib), ("workers", self.worker_kib)):
            if slope(kib) > slope(self.stored_kib) + FLAT_KIB:
                found.append(f"{name}: grows by {slope(kib):.0f} KiB a task")
        return found


def slope(values: list[int] | list[float]) -> float:
    """Return by how much a quantity grows with every task once the first fifth of them is over (at least 5).

    The steady tasks are cut into spans of equal length, and each is known by its largest value, since a worker may be
    seen before it is fully grown. The slope is the median of those between all pairs of spans (Theil-Sen): the
    allocator takes a few MiB at once now and then, which a line of least squares takes for growth if it happens late.
    """
    steady = values[max(5, len(values) // 5) :]
    length = max(1, len(steady) // NUM_SPANS)
    heights = [max(steady[start : start + length]) for start in range(0, len(steady) - length + 1, length)]
    pairs = itertools.combinations(enumerate(heights), 2)
    return statistics.median([(late - early) / (j - i) / length for (i, early), (j, late) in pairs] or [0.0])


def write_images(root: Path, num_classes: int) -> None:
    """Write tiny images, every class a colour of its own."""
    random_numbers = np.random.default_rng(0)
    for label in range(num_classes):
        colour = random_numbers.integers(0, 256, 3)
        for split, count in (("train", TRAINING_IMAGES), ("test", TEST_IMAGES)):
            folder = root / split / f"class_{label:03d}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(colour + random_numbers.normal(0, 20, (32, 32, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")


def in_session(leader: int) -> dict[int, int]:
    """Return the living processes of a session, and the resident memory of each in KiB."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found[int(entry.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") // 1024
    return found


def finished_tasks(log: Path) -> int:
    """Return how many tasks a run has ended."""
    return log.read_text().count('{"event": "task"') if log.exists() else 0


def milliseconds(log: Path) -> list[tuple[float, float, float]]:
    """Return what a training step, the end of each task and the evaluation of an image have taken."""
    events = [
        json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"event": "task"')
    ]
    return [
        (
            1000 * event["training_seconds"] / max(1, event["num_steps"]),
            1000 * event["end_task_seconds"],
            1000 * event["evaluation_seconds"] / event["num_test_images"],
        )
        for event in events
    ]


def stored_kib(run: Path) -> list[float]:
    """Return what a learner has stored after each task, statistics of all tasks included."""
    total, found = 0.0, []
    for checkpoint in sorted((run / "checkpoints").glob("task_*")):
        own = run / "checkpoints" / "statistics" / f"{checkpoint.name}.safetensors"
        total += own.stat().st_size / 1024 if own.exists() else 0
        json_size = (checkpoint / "state.json").stat().st_size * OBJECTS_PER_JSON
        found.append(total + ((checkpoint / "learner.safetensors").stat().st_size + json_size) / 1024)
    return found


def soak(
    learner: str, workers: int, *, images: Path, folder: Path, temporary: Path, num_tasks: int, limit: float
) -> Soak:
    """Run a learner to its end; watch it."""
    run = folder / f"{learner}-{workers}"
    settings = SETTINGS | LEARNERS.get(learner, {})
    settings |= {"scenario.num_tasks": str(num_tasks), "data.num_workers": str(workers)}
    options = itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in settings.items())
    command = [sys.executable, "-m", "vbm_ptm", "train", "--dataset", str(images), "--learner", learner]
    command += ["--device", "cpu", "--preset", "none", *options, "--output", str(run)]
    seen = Soak(learner, workers)
    places = {"/dev/shm": Path("/dev/shm"), "TMPDIR": temporary}
    before = {name: set(os.listdir(place)) for name, place in places.items()}
    environment = os.environ | {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    started, largest = time.monotonic(), 0
    with run.with_suffix(".txt").open("wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment, start_new_session=True)
        while process.poll() is None and time.monotonic() - started < limit:
            time.sleep(POLL_SECONDS)
            alive = in_session(process.pid)
            main_kib = alive.pop(process.pid, 0)
            largest = max([largest, *alive.values()])
            if main_kib and finished_tasks(run / "log.jsonl") > len(seen.main_kib):
                seen.main_kib.append(main_kib)
                seen.worker_kib.append(largest)
                largest = 0
    seen.seconds = time.monotonic() - started
    seen.code = process.poll()
    left = in_session(process.pid)
    if left:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if seen.code is not None:
            seen.left.append(f"{len(left)} processes left")
    for name, place in places.items():
        entries = sorted(each for each in os.listdir(place) if not each.startswith(CACHE_OF_TORCH))
        new = [each for each in entries if each not in before[name]]
        if new:
            seen.left.append(f"left in {name}: {', '.join(new[:5])}")
    if seen.code == 0:
        seen.main_kib += seen.main_kib[-1:] * (finished_tasks(run / "log.jsonl") - len(seen.main_kib))
        seen.stored_kib = stored_kib(run)
        seen.milliseconds = milliseconds(run / "log.jsonl")
        shutil.rmtree(run)
    return seen


def row(seen: Soak, problems: list[str]) -> str:
    """Return a run's line of the table."""
    main, worker = seen.main_kib or [0], [kib for kib in seen.worker_kib if kib] or [0]
    cells = [
        f"{seen.learner:13}{seen.workers:7}",
        f"{'hung' if seen.code is None else seen.code:>5}{seen.seconds:8.1f}",
        f"{main[0] / 1024:9.1f}{main[-1] / 1024:8.1f}{slope(seen.main_kib):8.1f}",
        f"{worker[0] / 1024:9.1f}{worker[-1] / 1024:8.1f}{slope(seen.worker_kib):8.1f}",
        f"{slope(seen.stored_kib):8.1f}",
        f"  {'; '.join(problems) or 'flat, nothing left'}",
    ]
    return "".join(cells)


def costs(seen: Soak) -> str:
    """Return a run's line of the table of costs: medians of the second to the sixth task and of the last five."""
    early, late = seen.milliseconds[1:6], seen.milliseconds[-5:]
    pairs = [[statistics.median(column) for column in zip(*part, strict=True)] for part in (early, late)]
    cells = [f"{first:9.1f}{last:8.1f}" for first, last in zip(*pairs, strict=True)]
    return f"{seen.learner:13}{seen.workers:7}" + "".join(cells)


COSTS_HEADER = (
    f"\n{'':20}    training step    end of the task  an image's evaluation: ms\n"
    f"{'learner':13}{'workers':>7}" + f"{'early':>9}{'late':>8}" * 3
)
HEADER = (
    f"{'':33}   main process: MiB, KiB  largest worker: MiB, KiB  stored: KiB\n"
    f"{'learner':13}{'workers':>7}{'code':>5}{'seconds':>8}"
    + f"{'first':>9}{'last':>8}{'a task':>8}" * 2
    + f"{'a task':>8}"
)


def with_small_memory(megabytes: int) -> None:
    """Start anew in a mount namespace with a small /dev/shm; go on as it is where that is not allowed."""
    if os.environ.get("SOAK_NAMESPACE") is None:
        namespace = ["unshare", "--mount"] + (["--map-root-user"] if os.geteuid() else [])
        if subprocess.run([*namespace, "true"], stderr=subprocess.DEVNULL).returncode == 0:
            os.environ["SOAK_NAMESPACE"] = "1"
            os.execvp("unshare", [*namespace, sys.executable, *sys.argv])
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", "/dev/shm"]
    if os.environ.get("SOAK_NAMESPACE") is None or subprocess.run(mount).returncode:
        print("no permission to mount a small /dev/shm: memory is shared as it is")


def main() -> int:
    """Run the soak; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--learners", default=",".join(LEARNERS), help="Names, also module:Class.")
    parser.add_argument("--workers", default="0,2", help="Numbers of workers.")
    parser.add_argument("--shared-memory", type=int, default=64, help="Size of /dev/shm in MB.")
    parser.add_argument("--temporary-length", type=int, default=120, help="Characters of TMPDIR.")
    parser.add_argument("--limit", type=float, default=300, help="Seconds that a run may take.")
    parser.add_argument("--json", type=Path, help="File for all that was measured.")
    given = parser.parse_args()
    if sys.platform != "linux":
        parser.error("memory and processes are read from /proc, which Linux alone has")
    with_small_memory(given.shared_memory)
    folder = Path(tempfile.mkdtemp(prefix="soak_", dir="/tmp"))
    temporary = folder / ("t" * (given.temporary_length - len(str(folder)) - 1))
    temporary.mkdir()
    write_images(folder / "images", CLASSES_PER_TASK * given.tasks)
    print(HEADER, flush=True)
    measured, lines, has_failed = [], [], False
    workers = [int(number) for number in given.workers.split(",")]
    for learner, number in itertools.product(given.learners.split(","), workers):
        seen = soak(
            learner,
            number,
            images=folder / "images",
            folder=folder,
            temporary=temporary,
            num_tasks=given.tasks,
            limit=given.limit,
        )
        problems = seen.problems(given.tasks)
        has_failed |= bool(problems)
        print(row(seen, problems), flush=True)
        measured.append(vars(seen) | {"problems": problems})
        if len(seen.milliseconds) > 1:
            lines.append(costs(seen))
    print(COSTS_HEADER, *lines, sep="\n")
    if given.json:
        given.json.write_text(json.dumps(measured, indent=1))
    if has_failed:
        print(f"problems were found; all is left in {folder}")
    else:
        shutil.rmtree(folder)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
