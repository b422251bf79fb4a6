"""Kill real runs at random moments, resume them, and compare each with a run that was never killed.

Every run trains on a few digits with the ViT in the package and saves itself after every step. Every file of the
checkpoints of a killed run is damaged and repaired before the run is resumed, and a run is let run into a full disk.
Exit code 1 if anything differs.

Usage: python scripts/fault_drill.py --kills 30 --learners slca,coda_prompt,s_iprompt --ranks 1,2
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vbm_ptm.errors import UsageError
from vbm_ptm.storage.checkpoint import CheckpointStore, read_checkpoint

SETTINGS = {
    "dataset.train_images_per_class": "16",
    "backbone.image_size": "32",
    "scenario.num_tasks": "null",
    "scenario.task_sizes": "[5,5]",
    "trainer.max_steps_per_task": "8",
    "trainer.log_every": "2",
    "optimization.batch_size": "16",
    "optimization.epochs": "2",
    "view_batch.num_views": "2",
    "checkpoint.every": "1 step",
    "checkpoint.keep": "all",
}
LEARNER_SETTINGS = {"slca": {"learner.alignment_epochs": "5"}}
# What a result says of a run that does not depend on the time it took.
COMPARED = ("status", "metrics", "accuracy_counts", "class_names", "task_records", "num_steps", "num_images")


@dataclass(frozen=True)
class Cell:
    """A learner on a number of ranks."""

    learner: str
    ranks: int

    def command(self, output: Path, *more: str) -> list[str]:
        """Return what trains it."""
        settings = SETTINGS | LEARNER_SETTINGS.get(self.learner, {})
        chosen = itertools.chain.from_iterable(("--set", f"{key}={value}") for key, value in settings.items())
        train = [
            "-m",
            "vbm_ptm",
            "train",
            "--dataset",
            "digits",
            "--learner",
            self.learner,
            "--device",
            "cpu",
        ]
        launch = [] if self.ranks == 1 else self._launcher()
        return [sys.executable, *launch, *train, *chosen, "--output", str(output), *more]

    def _launcher(self) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return ["-m", "torch.distributed.run", f"--nproc-per-node={self.ranks}", f"--master-port={port}"]


@contextmanager
def started(cell: Cell, output: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run; what it says goes to a file beside its directory."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with output.with_suffix(".txt").open("ab") as said:
        process = subprocess.Popen(
            cell.command(output, *more),
            stdout=said,
            stderr=said,
            env=environment,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def finish(cell: Cell, output: Path, *more: str) -> int:
    """Let a run go to its end; return its exit code."""
    with started(cell, output, *more) as process:
        return process.wait()


def when_training(process: subprocess.Popen[bytes], output: Path) -> bool:
    """Wait until the run has begun to write its log; return False if it has ended before."""
    while process.poll() is None:
        if (output / "log.jsonl").exists():
            return True
        time.sleep(0.02)
    return False


def writer(output: Path) -> int | None:
    """Return the number of the process that holds a run directory, or held it last."""
    text = (output / ".lock").read_text() if (output / ".lock").exists() else ""
    return int(text) if text else None


def is_alive(process: int) -> bool:
    """Return whether a process runs; one that nobody has collected yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(cell: Cell, output: Path, *, after: float, whom: str) -> str:
    """Start a run, and kill it so many seconds after it has begun to train; return where it was."""
    with started(cell, output, "--resume") as process:
        if when_training(process, output):
            time.sleep(after)
        rank = writer(output)
        victim = rank if whom == "rank" and rank else process.pid
        if process.poll() is None and is_alive(victim):
            os.kill(victim, signal.SIGKILL)
        process.wait()
    while rank is not None and is_alive(rank):  # without its launcher it saves itself and leaves
        time.sleep(0.1)
    checkpoints = CheckpointStore(output / "checkpoints").newest_first()
    partial = [path.name for path in (output / "checkpoints").glob(".*.partial")]
    return ", ".join([checkpoints[0].name if checkpoints else "nothing saved", *partial])


def log_of(output: Path) -> list[dict[str, Any]]:
    """Return the events of a run without what they took."""
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if "seconds" not in key and "memory" not in key}
        for line in lines
    ]


def differences(cell: Cell, reference: Path, output: Path) -> list[str]:
    """Return in what two finished runs differ."""
    one, two = (json.loads((path / "result.json").read_text()) for path in (reference, output))
    found = [key for key in COMPARED if one[key] != two[key]]
    if two["num_ranks"] != cell.ranks:
        found.append(f"{two['num_ranks']} ranks")
    if log_of(reference) != log_of(output):
        found.append("log.jsonl")
    files = [
        {
            str(file.relative_to(path)): file.read_bytes()
            for file in (path / "checkpoints").rglob("*")
            if file.is_file() and file.name not in ("state.json", "SHA256SUMS")
        }
        for path in (reference, output)
    ]
    names = sorted(files[0].keys() | files[1].keys())
    return found + [name for name in names if files[0].get(name) != files[1].get(name)]


def drill(
    cell: Cell, reference: Path, seconds: float, output: Path, random_numbers: random.Random
) -> list[str]:
    """Kill a run once, damage what it has saved, repair and resume it, compare; return a row of the table."""
    after = random_numbers.uniform(0, seconds)
    whom = random_numbers.choice(["rank", "launcher"]) if cell.ranks > 1 else "rank"
    where = kill(cell, output, after=after, whom=whom)
    count, unnoticed = damage(output, random_numbers)
    code = finish(cell, output, "--resume")
    found = [f"unnoticed: {name}" for name in unnoticed]
    found += [f"exit code {code}"] if code else differences(cell, reference, output)
    row = [cell.learner, str(cell.ranks), whom, f"{after:.1f} s", where, str(count)]
    return [*row, ", ".join(found) or "identical"]


def damage(run: Path, random_numbers: random.Random) -> tuple[int, list[str]]:
    """Damage every file of every checkpoint in turn; return how many were, and those that went unnoticed."""
    count, unnoticed = 0, []
    for directory in CheckpointStore(run / "checkpoints").newest_first():
        names = read_checkpoint(directory).digests
        for file in [*((run / "checkpoints" / name) for name in names), directory / "SHA256SUMS"]:
            content = file.read_bytes()
            place = random_numbers.randrange(len(content))
            flipped = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
            for kind, damaged in (("cut", content[:place]), (f"byte {place} flipped", flipped)):
                file.write_bytes(damaged)
                count += 1
                try:
                    read_checkpoint(directory).verify()
                    unnoticed.append(f"{file} {kind}")
                except UsageError:
                    pass
            file.write_bytes(content)
        read_checkpoint(directory).verify()
    return count, unnoticed


def fill_disk(cell: Cell, reference: Path, folder: Path) -> str:
    """Let a run fill a small disk, make the disk larger and resume; return the outcome."""
    folder.mkdir()
    size = sum(file.stat().st_size for file in (reference / "checkpoints/task_00").iterdir())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={4 * size}", "none", str(folder)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        return "not tried: no permission to mount a small disk"
    try:
        output = folder / "run"
        code = finish(cell, output)
        said = output.with_suffix(".txt").read_text()
        expected = 2 if cell.ranks == 1 else 1  # a launcher ends with its own code
        if code != expected or "No space left on device" not in said:
            return f"FAILED: exit code {code} on a full disk"
        for path in CheckpointStore(output / "checkpoints").newest_first():
            read_checkpoint(path).verify()
        subprocess.run(["mount", "-o", f"remount,size={100 * size}", str(folder)], check=True)
        code = finish(cell, output, "--resume")
        found = differences(cell, reference, output) if code == 0 else [f"exit code {code}"]
        return f"FAILED: {', '.join(found)}" if found else "stopped, went on with more space: identical"
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def main() -> int:
    """Run the drill; return 1 if anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--learners", default="slca,coda_prompt,s_iprompt")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="Where to run; a temporary folder without it.")
    given = parser.parse_args()
    learners, ranks = given.learners.split(","), [int(number) for number in given.ranks.split(",")]
    cells = [Cell(learner, number) for learner, number in itertools.product(learners, ranks)]
    random_numbers = random.Random(given.seed)
    folder = Path(tempfile.mkdtemp(prefix="fault_drill_")) if given.folder is None else given.folder
    folder.mkdir(parents=True, exist_ok=True)
    has_failed = False

    references: dict[Cell, tuple[Path, float]] = {}
    for number, cell in enumerate(itertools.islice(itertools.cycle(cells), given.kills), start=1):
        if cell not in references:
            reference = folder / f"{cell.learner}-{cell.ranks}"
            with started(cell, reference) as process:
                when_training(process, reference)
                began = time.monotonic()
                if process.wait():
                    print(reference.with_suffix(".txt").read_text())
                    return 1
            references[cell] = reference, time.monotonic() - began
        row = drill(cell, *references[cell], folder / f"kill_{number}", random_numbers)
        has_failed |= row[-1] != "identical"
        line = "{:3} {:14}{:>2} ranks, killed {:9}after {:>7} at {}, {} damaged files: {}"
        print(line.format(number, *row), flush=True)
        if row[-1] == "identical":
            shutil.rmtree(folder / f"kill_{number}")

    first, (reference, _) = next(iter(references.items()))
    outcome = fill_disk(first, reference, folder / "small disk")
    print(f"full disk: {outcome}")
    has_failed |= outcome.startswith("FAILED")
    if not has_failed:
        shutil.rmtree(folder)
    print("differences were found; all is left in " + str(folder) if has_failed else "no difference")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
