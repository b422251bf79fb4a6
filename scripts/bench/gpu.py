"""Measure one GPU within a time budget: numbers against the CPU, images per second, memory, share of the floor.

Run by scripts/bench/gpu.sh. Weights are random, and nothing is downloaded. What the budget leaves no time for is left
out, and named at the end. With --tiny everything is small enough for a CPU, to see that it works.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from PIL import Image

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.building import build
from vbm_ptm.config.run_config import compose
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.objective import ObjectiveConfig, ViewBatchObjective
from vbm_ptm.engine.optimization import OptimizationConfig, build_optimizer
from vbm_ptm.errors import TrainingInterrupted
from vbm_ptm.experiment import run
from vbm_ptm.learners import create_learner
from vbm_ptm.randomness import seeded

LEARNERS = ("slca", "l2p", "dualprompt", "coda_prompt", "linear_probe")
NUM_CLASSES = 10
# Largest difference to float64 on the CPU after three steps in fp32, relative to the largest value.
TOLERANCE = 1e-3


class Size(NamedTuple):
    """How large everything is.

    Attributes:
        models: Name -> arguments of timm.
        batch_size: Images of a step.
        num_images: Pictures of each class behind the data layer.
        side: Longer side of these pictures.
        seconds_per_case: How long the steps of a case are repeated.
        product: Side of the matrices whose product gives the floor.
    """

    models: dict[str, dict[str, Any]]
    batch_size: int
    num_images: int
    side: int
    seconds_per_case: float
    product: int


FULL = Size({"vit_base_patch16_224": {}, "vit_tiny_patch16_224": {}}, 128, 128, 500, 1.5, 8192)
TINY = Size({"vit_tiny_patch16_224": {"img_size": 32, "depth": 6}}, 8, 4, 40, 0.0, 128)


class Case(NamedTuple):
    """One row of the table of speeds."""

    model: str
    learner: str
    precision: str
    is_compiled: bool
    num_views: int


def cases(size: Size, learners: Sequence[str]) -> list[Case]:
    """Return all cases, those that matter most first: bf16, views, fp32 and tf32, compiled."""
    groups = [
        *(("bf16", False, num_views) for num_views in (1, 4)),
        *((precision, False, 1) for precision in ("fp32", "tf32")),
        *((precision, True, 1) for precision in ("bf16", "tf32", "fp32")),
        *((precision, False, 4) for precision in ("fp32", "tf32")),
        *((precision, True, 4) for precision in ("bf16", "tf32", "fp32")),
    ]
    return [Case(model, learner, *group) for group in groups for model in size.models for learner in learners]


class Bench:
    """Measures on one device, and knows how much time is left."""

    def __init__(self, device: str, size: Size, learners: Sequence[str], budget: float) -> None:
        self.device = torch.device(device)
        self.size = size
        self.learners = learners
        self.ends = time.monotonic() + budget
        self.left_out: list[str] = []

    def left(self) -> float:
        """Return the seconds that are left."""
        return self.ends - time.monotonic()

    def has_time(self, seconds: float, what: str) -> bool:
        """Return whether something that takes so long still fits; what does not is kept for the end."""
        if self.left() < seconds:
            self.left_out.append(what)
        return self.left() >= seconds

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def per_call(self, function: Callable[[], Any]) -> float:
        """Return the seconds of one call, over calls that fill the time of a case, after two that are not counted."""
        for _ in range(2):
            function()
        self.wait()
        started, count = time.monotonic(), 0
        while not count or time.monotonic() - started < self.size.seconds_per_case:
            function()
            count += 1
            if count % 3 == 0:
                self.wait()
        self.wait()
        return (time.monotonic() - started) / count


@contextmanager
def precision_of(name: str, device: torch.device) -> Iterator[None]:
    """Compute in "fp32", "tf32" or "bf16" for a while."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    try:
        with torch.autocast(device.type, torch.bfloat16, enabled=name == "bf16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def stepper(
    learner: Any, images: torch.Tensor, labels: torch.Tensor, num_views: int
) -> Callable[[], torch.Tensor]:
    """Return a function that takes a step on images (N,C,H,W) uint8, N = G * V, and returns its loss."""
    optimizer = build_optimizer(OptimizationConfig(learning_rate=1e-3), learner.parameter_groups())
    objective = ViewBatchObjective(ObjectiveConfig())
    dtype = next(learner.parameters()).dtype
    learner.train()

    def step() -> torch.Tensor:
        values = images.to(dtype).div(127.5).sub(1)
        output = learner(values, labels.repeat_interleave(num_views))
        loss, _ = objective(output, labels, num_views=num_views, num_global_groups=len(labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def correctness(bench: Bench) -> bool:
    """Print losses and scores of three steps on the device against float64 on the CPU; return whether they agree."""
    is_right = True
    print(
        "\n| learner, small ViT | loss, relative | scores, relative | within tolerance |\n|---|---|---|---|"
    )
    for name in bench.learners:
        if not bench.has_time(10, f"correctness of {name}"):
            continue
        setup = build(compose(dataset="digits", learner=name).validate())
        task = setup.benchmark.scenario.tasks[0]
        generator = torch.Generator().manual_seed(0)
        side = setup.learner.backbone.preprocessing.image_size
        images = torch.randint(256, (8, 3, side, side), generator=generator, dtype=torch.uint8)
        labels = torch.tensor(task.classes)[torch.arange(8) % len(task.classes)]
        with seeded(0):
            setup.learner.begin_task(task)
        found = []
        for device, dtype in (("cpu", torch.float64), (bench.device, torch.float32)):
            learner = copy.deepcopy(setup.learner).to(device, dtype)
            with precision_of("fp32", torch.device(device)):
                step = stepper(learner, images.to(device), labels.to(device), 1)
                losses = torch.stack([step() for _ in range(3)])
                with torch.no_grad():
                    scores = learner.eval().predict(images.to(device, dtype).div(127.5).sub(1))
            found.append((losses.double().cpu(), scores.double().cpu()))
        apart = [float((one - two).abs().max() / two.abs().max()) for two, one in zip(*found, strict=True)]
        is_near = max(apart) <= TOLERANCE
        is_right &= is_near
        verdict = "yes" if is_near else "NO"
        print(f"| {name} | {apart[0]:.1e} | {apart[1]:.1e} | {verdict} ({TOLERANCE:g}) |", flush=True)
    return is_right


@cache
def _backbone(model: str, arguments: str) -> PromptableViT:
    return PromptableViT(timm.create_model(model, num_classes=0, **json.loads(arguments)))


def rate_of(bench: Bench, precision: str) -> float:
    """Return the operations per second of one large product."""
    side = bench.size.product
    one, two = (torch.randn(side, side, device=bench.device) for _ in range(2))
    with precision_of(precision, bench.device):
        return 2 * side**3 / bench.per_call(lambda: one @ two)


def multiplications(backbone: PromptableViT) -> int:
    """Return those of a forward pass for an image, without prompts."""
    tokens, width = backbone.num_patches + 1, backbone.width
    blocks = backbone.depth * (12 * tokens * width**2 + 2 * tokens**2 * width)
    embedding: int = backbone.num_patches * width * backbone.vit.patch_embed.proj.weight[0].numel()
    return blocks + embedding


def speed(bench: Bench, case: Case, rates: dict[str, float]) -> str:
    """Return a row: images per second, peak memory and share of the floor of a step without the data layer."""
    backbone = _backbone(case.model, json.dumps(bench.size.models[case.model]))
    learner = create_learner(case.learner, backbone=copy.deepcopy(backbone), num_tasks=10)
    learner.begin_task(Task(0, tuple(range(NUM_CLASSES)), tuple(range(NUM_CLASSES)), NUM_CLASSES))
    learner.to(bench.device)
    if case.is_compiled:
        torch._dynamo.reset()  # sizes of an earlier case would leave this one's open
        learner.backbone.compile_parts(backend="eager" if bench.size is TINY else "inductor")
    count, side = bench.size.batch_size, backbone.preprocessing.image_size
    images = torch.randint(256, (count, 3, side, side), device=bench.device, dtype=torch.uint8)
    labels = torch.arange(count // case.num_views, device=bench.device) % NUM_CLASSES
    is_cuda = bench.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    with precision_of(case.precision, bench.device):
        step = stepper(learner, images, labels, case.num_views)
        step()
        bench.wait()
        first = time.monotonic() - began
        taken = bench.per_call(step)
    memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if is_cuda else "-"
    # All is trained: once forward, twice backward. With prompts: a query, forward, and backward to the prompts.
    passes = 1 if case.learner == "linear_probe" else 3
    share = passes * 2 * count * multiplications(backbone) / rates[case.precision] / taken
    compiled = "yes" if case.is_compiled else "no"
    return (
        f"| {case.model} | {case.learner} | {case.precision} | {compiled} | {case.num_views} | {count / taken:.0f} | "
        f"{memory} | {share:.0%} | {first:.1f} s |"
    )


def speeds(bench: Bench, reserve: float) -> None:
    """Print the table of speeds; cases that would eat into a reserve of seconds are left out."""
    rates = {name: rate_of(bench, name) for name in ("fp32", "tf32", "bf16")}
    print("\nproducts: " + ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in rates.items()))
    print(
        "\n| model | learner | precision | compiled | views | images/s | peak memory | of the floor | first step |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    longest = {False: 4.0, True: 45.0} if bench.size is FULL else {False: 0.0, True: 0.0}
    for case in cases(bench.size, bench.learners):
        if not bench.has_time(longest[case.is_compiled] + reserve, " ".join(map(str, case))):
            continue
        try:
            row = speed(bench, case, rates)
        except torch.OutOfMemoryError:
            row = f"| {' | '.join(map(str, case))} | out of memory | | | |"
        print(row, flush=True)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def write_pictures(folder: Path, size: Size) -> None:
    """Write JPEGs of four classes, smooth as photographs are."""
    generator = np.random.default_rng(0)
    for split, count in (("train", size.num_images), ("test", 2)):
        for number in range(4):
            (folder / split / f"class{number}").mkdir(parents=True)
            for index in range(count):
                small = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
                picture = Image.fromarray(small).resize(
                    (size.side, size.side * 3 // 4), Image.Resampling.BICUBIC
                )
                picture.save(folder / split / f"class{number}" / f"{index}.jpg")


def with_data_layer(bench: Bench) -> None:
    """Print images per second of whole tasks: decoding, views, training loop and log included."""
    print("\n| model | learner | views | images/s with the data layer | of the time waiting for images |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_pictures(Path(folder) / "pictures", bench.size)
        for model in bench.size.models:
            for num_views in (1, 4):
                if not bench.has_time(
                    25 if bench.size is FULL else 0, f"data layer, {model}, {num_views} views"
                ):
                    continue
                output = Path(folder) / f"{model}-{num_views}"
                _stopped_after_one(
                    Path(folder) / "pictures",
                    output,
                    f"view_batch.num_views={num_views}",
                    "optimization.epochs=4",
                    f"optimization.batch_size={bench.size.batch_size}",
                    "scenario.num_tasks=2",
                    *_on(bench, model),
                )
                record = _record(output)
                rate = record["num_images"] / record["step_seconds"]
                share = record["data_seconds"] / record["step_seconds"]
                print(f"| {model} | finetune | {num_views} | {rate:.0f} | {share:.0%} |", flush=True)


def cifar100(bench: Bench, path: Path) -> None:
    """Print what one task of S-CIFAR-100 takes: 5,000 images, four views, one visit."""
    model = next(iter(bench.size.models))
    if not bench.has_time(90 if bench.size is FULL else 0, "a task of S-CIFAR-100"):
        return
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        _stopped_after_one(
            "cifar100", output, f"dataset.path={path}", "optimization.epochs=4", *_on(bench, model)
        )
        record = _record(output)
    rate = record["num_images"] / record["step_seconds"]
    print(
        f"\nS-CIFAR-100, first task, finetune, {model}: {rate:.0f} images/s; "
        f"{record['step_seconds']:.0f} s of steps, {record['data_seconds']:.0f} of them waiting for images"
    )


def _on(bench: Bench, model: str) -> list[str]:
    device = f"device={bench.device.type}"
    if bench.size is TINY:
        return [device]
    return [f"backbone.name={model}", "backbone.from_scratch=true", device]


def _stopped_after_one(dataset: Path | str, output: Path, *overrides: str) -> None:
    config = compose(dataset=str(dataset), learner="finetune", overrides=overrides).validate()
    try:
        run(config, output=output, stop_after_task=1, is_quiet=True)
    except TrainingInterrupted:
        pass  # asked for


def _record(output: Path) -> dict[str, Any]:
    events = map(json.loads, (output / "log.jsonl").read_text().splitlines())
    record: dict[str, Any] = next(event for event in events if event["event"] == "task")
    return record


def main() -> None:
    """Measure in the order of what matters, as long as there is time."""
    parser = argparse.ArgumentParser(description="Measure one GPU within a time budget.")
    parser.add_argument("--seconds", type=float, default=450, help="time budget (450)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU, to see that it works")
    parser.add_argument("--cifar100", type=Path, help="folder with the parquet files of CIFAR-100")
    parser.add_argument("--learners", default=",".join(LEARNERS), help=f"some of {', '.join(LEARNERS)}")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        sys.exit("there is no GPU here; --tiny measures in sizes for a CPU, to see that it works")
    bench = Bench(
        options.device, TINY if options.tiny else FULL, options.learners.split(","), options.seconds
    )
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else bench.device.type
    print(f"torch {torch.__version__}, {name}, {options.seconds:g} s")
    is_right = correctness(bench)
    speeds(bench, reserve=110 if bench.size is FULL else 0)
    with_data_layer(bench)
    if options.cifar100:
        cifar100(bench, options.cifar100)
    if bench.left_out:
        print(f"\nleft out for lack of time ({len(bench.left_out)}): {'; '.join(bench.left_out)}")
    print(f"\n{options.seconds - bench.left():.0f} s in all")
    sys.exit(0 if is_right else "numbers on this device are not those of the CPU: see the first table")


if __name__ == "__main__":
    main()
