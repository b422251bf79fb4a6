"""Measure what speed is promised, and print a table of goals: value, goal, reached or not.

Run: OMP_NUM_THREADS=1 python scripts/bench/run.py [NAME…]. Times are CPU seconds of one thread, the sides of each ratio
measured in turn in this process; each is the median of a few. Needs no network.
"""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch.nn import functional as F

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.building import Setup, build, build_recipe
from vbm_ptm.class_statistics import draw
from vbm_ptm.config.run_config import compose
from vbm_ptm.data.loader_config import LoaderConfig
from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.data.view_batch import ViewBatchSampler
from vbm_ptm.engine.acceleration import build_accelerator, loaders_for
from vbm_ptm.engine.evaluator import Evaluator
from vbm_ptm.engine.objective import ObjectiveConfig, ViewBatchObjective
from vbm_ptm.engine.optimization import OptimizationConfig, build_optimizer
from vbm_ptm.engine.precision import resolve_precision
from vbm_ptm.engine.readings import Readings
from vbm_ptm.engine.task_training import TaskTraining
from vbm_ptm.engine.tracking import RunLog
from vbm_ptm.experiment import run
from vbm_ptm.launch import keep_freed_memory
from vbm_ptm.learners.base import ParameterGroup

PRECISION = resolve_precision("auto", "cpu")


class Goal(NamedTuple):
    """One line of the table."""

    name: str
    value: float
    limit: float
    is_at_least: bool = False
    unit: str = "x"

    def row(self) -> str:
        """Return the line in Markdown."""
        is_reached = self.value >= self.limit if self.is_at_least else self.value <= self.limit
        sign = "at least" if self.is_at_least else "at most"
        return (
            f"| {self.name} | {self.value:.3g} {self.unit} | {sign} {self.limit:g} {self.unit} | "
            f"{'yes' if is_reached else 'no'} |"
        )


def seconds(*functions: Callable[[], Any], repeats: int = 5) -> list[float]:
    """Return the median CPU seconds of each function, called in turn after one call that is not counted."""
    times: list[list[float]] = [[] for _ in functions]
    for number in range(repeats + 1):
        for function, own in zip(functions, times, strict=True):
            started = time.process_time()
            function()
            if number:
                own.append(time.process_time() - started)
    return [statistics.median(own) for own in times]


def setup_of(learner: str, *overrides: str) -> Setup:
    """Return a learner on the digits, with the small ViT."""
    return build(compose(dataset="digits", learner=learner, overrides=overrides).validate())


def training_step(
    learner: Any, images: torch.Tensor, labels: torch.Tensor, num_views: int
) -> Callable[[], None]:
    """Return a function that takes one step on images (N,C,H,W), with plain SGD."""
    parameters = [parameter for group in learner.parameter_groups() for parameter in group.parameters]
    optimizer = torch.optim.SGD(parameters, lr=1e-5, momentum=0.9)
    objective = ViewBatchObjective(ObjectiveConfig())

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=PRECISION == "bf16"):
            output = learner(images, labels.repeat_interleave(num_views))
        loss, _ = objective(output, labels, num_views=num_views, num_global_groups=len(labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def views() -> list[Goal]:
    """Compare a step of 24 images as 6 groups of 4 views with one of 24 groups."""
    setup = setup_of("slca")
    learner = setup.learner
    learner.begin_task(setup.benchmark.scenario.tasks[0])
    learner.train()
    images = torch.randn(24, 3, 64, 64)
    classes = torch.tensor(setup.benchmark.scenario.tasks[0].classes)
    labels = classes[torch.arange(24) % len(classes)]
    one, four = seconds(
        training_step(learner, images, labels, 1), training_step(learner, images, labels[:6], 4), repeats=15
    )
    return [Goal("step of 24 images, SLCA, small ViT: 4 views against 1", four / one, 1.02)]


def compiled() -> list[Goal]:
    """Compare a step as it is with a compiled one, and print what compiling takes; measured where it is named."""
    setup = setup_of("slca")
    setup.learner.begin_task(setup.benchmark.scenario.tasks[0])
    plain, fast = setup.learner.train(), copy.deepcopy(setup.learner).train()
    fast.backbone.compile_parts()
    images, labels = torch.randn(24, 3, 64, 64), torch.arange(24) % 2
    steps = [training_step(learner, images, labels, 1) for learner in (plain, fast)]
    started, began = time.process_time(), time.monotonic()
    steps[1]()
    print(
        f"first compiled step: {time.monotonic() - began:.0f} s, {time.process_time() - started:.0f} s of the CPU "
        "in this process, without the compiler's own"
    )
    one, other = seconds(*steps)
    return [
        Goal("step of 24 images, SLCA, small ViT: plain against compiled", one / other, 1, is_at_least=True)
    ]


def _normal_draws(mean: torch.Tensor, covariance: torch.Tensor, count: int) -> None:
    torch.distributions.MultivariateNormal(mean, covariance).sample((count,))


def alignment() -> list[Goal]:
    """Compare the draws of one alignment epoch with a multivariate normal per class."""
    num_classes, width, count = 100, 768, 256
    goals = []
    for rank in (99, 499, 767):
        rows = torch.randn(rank + 1, width)
        mean, covariance = rows.mean(0), torch.cov(rows.T) + 1e-4 * torch.eye(width)
        factor = (rows - mean)[:rank] / rank**0.5
        out = torch.empty(num_classes, count, width)
        means, factors = mean.expand(num_classes, -1), [factor] * num_classes
        plain, ours = seconds(
            partial(_normal_draws, mean, covariance, count),
            partial(draw, means, factors, out=out),
            repeats=3,
        )
        name = f"draws of 100 classes, width 768, rank {rank}: multivariate normals against ours"
        goals.append(Goal(name, plain * num_classes / ours, 20, is_at_least=True))
    return goals


def _evaluate_anew(accelerator: Any, loaders: Loaders, setup: Setup) -> None:
    Evaluator(accelerator, loaders).judge(setup.learner, setup.benchmark.scenario.tasks)


def evaluation() -> list[Goal]:
    """Compare the first evaluation of the digits' test images with a later one."""
    goals = []
    for name in ("l2p", "dualprompt", "coda_prompt", "linear_probe"):
        setup = setup_of(name)
        for task in setup.benchmark.scenario.tasks:
            setup.learner.begin_task(task)
        accelerator = build_accelerator(device="cpu", mixed_precision=PRECISION)
        loaders = loaders_for(accelerator, setup.benchmark, LoaderConfig())
        first, later = seconds(
            partial(_evaluate_anew, accelerator, loaders, setup),
            partial(Evaluator(accelerator, loaders).judge, setup.learner, setup.benchmark.scenario.tasks),
            repeats=2,
        )
        goals.append(
            Goal(f"evaluation, {name}, digits: a later round against the first", later / first, 0.55)
        )
    return goals


def nearest_mean() -> list[Goal]:
    """Compare a whole run with one pass of the backbone over all images."""
    setup = setup_of("nearest_mean")
    accelerator = build_accelerator(device="cpu", mixed_precision=PRECISION)
    loaders = loaders_for(accelerator, setup.benchmark, LoaderConfig())
    splits = (setup.benchmark.datasets.train, setup.benchmark.datasets.test)

    normalize = setup.benchmark.transforms.normalization

    def one_pass() -> None:
        with torch.inference_mode(), accelerator.autocast():
            for split in splits:
                for batch in loaders.evaluation(
                    split, loaders.parts_of_rank(torch.arange(len(split)).numpy())
                ):
                    setup.learner.query(normalize(batch.images))

    def whole_run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            run(setup.config, output=Path(folder) / "run")

    plain, ours = seconds(one_pass, whole_run, repeats=2)
    return [Goal("nearest_mean, digits: a whole run against one pass over the images", ours / plain, 1.15)]


class _InMemory(Loaders):
    """Loaders whose training batches are there already."""

    def training(self, task: Task, sampler: ViewBatchSampler, **options: Any) -> Any:
        """Return a loader that has read a first epoch and gives the same batches in every one."""
        loader = super().training(task, sampler, **options)
        loader.set_epoch(0)
        batches = list(loader)
        loader.__class__ = type("Read", (loader.__class__,), {"__iter__": lambda self: iter(batches)})
        return loader


def overhead() -> list[Goal]:
    """Compare the steps of a run, data in memory, with a bare loop over the same tensors."""
    setup = setup_of("slca", "optimization.epochs=1", "view_batch.num_views=1")
    task = setup.benchmark.scenario.tasks[0]
    setup.learner.begin_task(task)
    accelerator = build_accelerator(device="cpu", mixed_precision=PRECISION)
    plain = loaders_for(accelerator, setup.benchmark, LoaderConfig())
    loaders = _InMemory(plain.benchmark, plain.config, seed=plain.seed)
    bare_learner = copy.deepcopy(setup.learner).train()
    recipe = build_recipe(setup.config)

    def training() -> TaskTraining:
        readings = Readings(accelerator, RunLog(None, position=0), task_index=0, first_step=0)
        return TaskTraining(
            setup.learner, task, recipe=recipe, loaders=loaders, accelerator=accelerator, readings=readings
        )

    sampler = training().sampler
    sampler.set_epoch(0)
    loader = plain.training(task, sampler)
    batches = list(loader)
    normalize = setup.benchmark.transforms.normalization
    steps = [training_step(bare_learner, normalize(batch.images[:, 0]), batch.labels, 1) for batch in batches]
    times: list[list[float]] = [[], []]
    for _ in range(6):
        iterator = training().steps()
        next(iterator)  # the first step makes the loader and the optimizer
        started = time.process_time()
        for _ in iterator:
            pass
        times[0].append(time.process_time() - started)
        started = time.process_time()
        for step in steps[1:]:
            step()
        times[1].append(time.process_time() - started)
    ours, bare = (statistics.median(own[1:]) for own in times)
    return [Goal("steps of a run, SLCA, small ViT, data in memory: against a bare loop", ours / bare, 1.10)]


def start_up() -> list[Goal]:
    """Measure the CPU seconds from the command to the first step on the digits, and what the libraries alone take."""
    with tempfile.TemporaryDirectory() as folder:
        names = "torch, torchvision, timm, accelerate, datasets"
        programs = {
            "train": "import sys; from vbm_ptm.engine.task_training import TaskTraining;"
            "TaskTraining._take_step = lambda *a: (print(__import__('time').process_time(), flush=True), "
            "__import__('os')._exit(0)); from vbm_ptm.cli.application import main; sys.argv = ['vbm-ptm', 'train', "
            f"'--dataset', 'digits', '--learner', 'slca', '--output', '{folder}/run']; main()",
            "libraries": f"import {names}; print(__import__('time').process_time())",
        }
        found = {}
        for name, program in programs.items():
            done = [
                subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
                for _ in range(1 if name == "train" else 2)
            ]
            found[name] = float(done[-1].stdout.split()[-1])
    return [
        Goal("start to first step, digits", found["train"], 3, unit="s"),
        Goal(f"of which importing {names}", found["libraries"], 3, unit="s"),
    ]


def optimizers() -> list[Goal]:
    """Compare the plain with the fused updates of ViT-Ti/16, and print how far apart they end."""
    goals = []
    cases: dict[str, dict[str, Any]] = {
        "SGD, momentum 0.9": {},
        "SGD, momentum 0.9, weight decay 5e-4": {"weight_decay": 5e-4},
        "Adam": {"optimizer": "adam"},
        "AdamW, weight decay 0.01": {"optimizer": "adamw", "weight_decay": 0.01},
    }
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=100)
    for name, settings in cases.items():
        models = [copy.deepcopy(vit) for _ in range(2)]
        updates = [
            build_optimizer(
                OptimizationConfig(fused=is_fused, **settings),
                [ParameterGroup("all", list(model.parameters()))],
            )
            for model, is_fused in zip(models, (False, True), strict=True)
        ]
        for own in zip(*(model.parameters() for model in models), strict=True):
            own[0].grad = torch.randn_like(own[0])
            own[1].grad = own[0].grad.clone()
        plain, fused = seconds(*(each.step for each in updates), repeats=10)
        apart = max(
            float((one - other).detach().abs().max())
            for one, other in zip(*(model.parameters() for model in models), strict=True)
        )
        print(
            f"{name}: {1e3 * plain:.1f} ms plain, {1e3 * fused:.1f} fused; after 11 updates {apart:.1e} apart"
        )
        goals.append(
            Goal(f"update of ViT-Ti/16, {name}: plain against fused", plain / fused, 1, is_at_least=True)
        )
    return goals


def floor() -> list[Goal]:
    """Compare a training step of ViT-B/16 with its products at the speed of one large product."""
    size = 1536
    one, two = (
        torch.randn(size, size, dtype=torch.bfloat16 if PRECISION == "bf16" else None) for _ in range(2)
    )
    (product,) = seconds(lambda: one @ two)
    rate = 2 * size**3 / product
    backbone = PromptableViT(timm.create_model("vit_base_patch16_224", num_classes=0))
    images, head = torch.randn(4, 3, 224, 224), torch.nn.Linear(768, 10)
    optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=1e-5, momentum=0.9)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=PRECISION == "bf16"):
            logits = head(backbone.features(images))
        F.cross_entropy(logits.float(), torch.arange(4)).backward()
        optimizer.step()
        optimizer.zero_grad()

    (taken,) = seconds(step, repeats=3)
    tokens, width = 197, 768
    multiplications = 12 * (12 * tokens * width**2 + 2 * tokens**2 * width) + 196 * width * 768
    share = 3 * 2 * 4 * multiplications / rate / taken
    print(f"one product of {size}: {rate / 1e9:.0f} GFLOP/s in {PRECISION}; a step of 4 images {taken:.2f} s")
    return [
        Goal(
            "ViT-B/16, all trained, 4 images: share of the floor of its products",
            share,
            0.8,
            is_at_least=True,
        )
    ]


MEASUREMENTS = (views, compiled, alignment, evaluation, nearest_mean, overhead, start_up, optimizers, floor)


def main() -> None:
    """Measure what is named on the command line, or everything."""
    torch.set_num_threads(1)
    keep_freed_memory()
    chosen = [
        each
        for each in MEASUREMENTS
        if each.__name__ in sys.argv[1:] or (len(sys.argv) == 1 and each is not compiled)
    ]
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, precision auto = {PRECISION}\n"
    )
    rows = []
    for measurement in chosen:
        rows += [(goal.row(), measurement.__name__) for goal in measurement()]
        print(f"{measurement.__name__} measured", file=sys.stderr)
    print("\n| what | measured | goal | reached | command |\n|---|---|---|---|---|")
    for row, name in rows:
        print(f"{row} `python scripts/bench/run.py {name}` |")


if __name__ == "__main__":
    main()
