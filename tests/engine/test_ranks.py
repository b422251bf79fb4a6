"""Runs on two ranks, in two real processes, against the same runs on one.

All cells of the comparison are walked by one pair of processes.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.multiprocessing
from launching import become_rank
from small_runs import depth_for
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import vbm_ptm.engine.features
from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.loader_config import LoaderConfig
from vbm_ptm.data.scenario import Task
from vbm_ptm.data.view_transforms import Normalization
from vbm_ptm.engine.acceleration import build_accelerator, loaders_for
from vbm_ptm.engine.evaluator import Evaluation, Evaluator
from vbm_ptm.engine.features import TaskFeatures
from vbm_ptm.errors import TrainingError, TrainingInterrupted, UsageError
from vbm_ptm.experiment import run
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.registry import learner_class, list_learners
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.randomness import seed_for, seeded
from vbm_ptm.runs.measurement import Measurement

pytestmark = pytest.mark.distributed

# Each loader of each rank starts its own, which takes longer than all the steps: images of the task alone, with draws
# from a buffer, and merged with exemplars.
WITH_WORKERS = ("finetune", "der_pp", "icarl")
# With batch norm.
ON_RESNET = ("finetune", "er", "agem", "fdr", "icarl", "der_pp", "lwf", "expandable", "tcil")
QUICK: dict[str, dict[str, Any]] = {
    **{
        name: {"capacity": 6, "draw_size": 4} for name in ("er", "dark_er", "der_pp", "agem", "agem_r", "fdr")
    },
    "icarl": {"capacity": 9},
    **{name: {"capacity": 9} for name in ("wa", "bic", "ucir")},
    "tcil": {"capacity": 9, "reset_epoch": 1},
    "expandable": {"capacity": 9, "reset_epoch": 1, "balanced_epochs": 2},
    "slca": {"alignment_epochs": 2, "alignment_samples_per_class": 8},
    # 1e-8 on the diagonal of a Gram matrix of 9 images blows rounding up to 1e-6.
    "ran_pac": {"ridges": (1.0, 10.0)},
}

# Training and test images of every class; classes of every task. Together tasks of 1, 2, 3, 7 and 8 samples, whose
# steps leave a rank without any, and of 0, 1, 2, 3 and 7 test images.
SIZES = {
    "7, 3, 1": {"train_sizes": [4, 3, 2, 1, 1], "test_sizes": [4, 3, 1, 0, 0], "task_sizes": (2, 2, 1)},
    "8, 2, 7": {"train_sizes": [4, 4, 1, 1, 4, 3], "test_sizes": [1, 1, 1, 2, 1, 2], "task_sizes": (2, 2, 2)},
}


class Cell(NamedTuple):
    """One run that both sides do."""

    learner: str
    num_views: int
    sizes: str
    num_workers: int
    gradient_accumulation_steps: int
    optimizer: str
    precision: str = "float64"
    batchwise_prompt: bool = False
    on_resnet: bool = False
    views_for: str = "all"


def cells() -> list[Cell]:
    """Every learner with every value but of the workers, and every two values together with some learner."""
    values: list[tuple[Any, Any]] = [(4, 1), tuple(SIZES), (2, 1), ("sgd", "adam")]
    patterns = [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 1, 0), (1, 0, 1, 1), (0, 1, 0, 1)]
    chosen = []
    for number, name in enumerate(list_learners()):
        for flip in (0, 1):  # a pattern and its opposite
            views, sizes, *others = (
                pair[pick ^ flip] for pair, pick in zip(values, patterns[number % 5], strict=True)
            )
            chosen.append(Cell(name, views, sizes, 1 if name in WITH_WORKERS else 0, *others))
    chosen += [Cell("l2p", 4, sizes, 0, 1, "adam", batchwise_prompt=True) for sizes in SIZES]
    chosen += [Cell(name, 4, "7, 3, 1", 0, 2, "sgd", "float32") for name in ("finetune", "l2p")]
    chosen += [Cell(name, 4, "8, 2, 7", 0, 1, "adam", "float32") for name in ("slca", "coda_prompt")]
    chosen += [Cell(name, 4, "8, 2, 7", 0, 1, "sgd", on_resnet=True) for name in ON_RESNET]
    chosen += [
        Cell("icarl", 4, "8, 2, 7", 2, 1, "sgd", on_resnet=True, views_for="current"),
        Cell("icarl", 4, "8, 2, 7", 0, 1, "sgd", on_resnet=True, views_for="buffer"),
        Cell("icarl", 4, "8, 2, 7", 0, 2, "adam", views_for="buffer"),
    ]
    return chosen


class DoubleNormalization(Normalization):
    """The input of the network in float64."""

    def __call__(self, views: Tensor) -> Tensor:
        return super().__call__(views).double()


@pytest.fixture(scope="module")
def fit(
    new_benchmark: Callable[..., Benchmark], new_learner: Callable[..., Learner]
) -> Callable[..., dict[str, Any]]:
    """Return a function that does the run of a cell and tells what can be compared of it."""
    benchmarks = {name: new_benchmark(**sizes) for name, sizes in SIZES.items()}

    def run_cell(new_run: Callable[..., Any], cell: Cell, name: str) -> dict[str, Any]:
        is_double = cell.precision == "float64"
        with default_dtype(torch.float64 if is_double else torch.float32):
            settings = QUICK.get(cell.learner, {}) | (
                {"batchwise_prompt": True} if cell.batchwise_prompt else {}
            )
            learner = new_learner(
                cell.learner,
                depth=depth_for(cell.learner),
                on_resnet=cell.on_resnet,
                **settings,
            )
            benchmark = benchmarks[cell.sizes]
            if is_double:
                learner.double()
                plain = benchmark.transforms.normalization
                transforms = dataclasses.replace(
                    benchmark.transforms, normalization=DoubleNormalization(plain.mean, plain.std)
                )
                benchmark = dataclasses.replace(benchmark, transforms=transforms)
            shown: list[list[float]] = []
            learner.register_forward_pre_hook(
                lambda module, inputs: shown.append(inputs[0].double().flatten(1).sum(1).tolist())
            )
            run = new_run(
                learner,
                benchmark,
                name=name,
                num_views=cell.num_views,
                batch_size=8 if cell.num_views == 4 else 3,
                epochs=4 if cell.num_views == 4 else 2,
                num_workers=cell.num_workers,
                optimizer=cell.optimizer,
                learning_rate=0.01 if cell.optimizer == "sgd" else 0.002,
                gradient_accumulation_steps=cell.gradient_accumulation_steps,
                view_batch={"views_for": cell.views_for},
            )
            run.trainer.fit()
        assert not run.accelerator._models
        assert not run.accelerator._optimizers
        return {
            "num_ranks": run.accelerator.num_processes,
            "state": {name: tensor.contiguous() for name, tensor in learner.state_dict().items()},
            "matrix": run.trainer.matrix.to_dict(),
            "counts": [(record.num_images, record.num_test_images) for record in run.trainer.records],
            "hashes": [(record.frozen_sha256, record.trained_sha256) for record in run.trainer.records],
            "reports": [record.learner_report for record in run.trainer.records],
            "shown": shown,
            "steps": run.events("step"),
        }

    return run_cell


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def on_two_ranks(function: Callable[..., None], *arguments: Any, port: int) -> None:
    """Run a function in two processes that form a group; what one of them raises is raised here."""
    for name in list_learners():
        learner_class(name)  # imported once, and not by each rank
    torch.multiprocessing.start_processes(
        _join_and_call, args=(port, function, arguments), nprocs=2, start_method="fork"
    )


def _join_and_call(rank: int, port: int, function: Callable[..., None], arguments: Sequence[Any]) -> None:
    become_rank(rank, port)
    torch.set_num_threads(1)
    gc.freeze()  # what is there already is not searched after every task
    function(rank, *arguments)
    torch.distributed.destroy_process_group()


def _walk(rank: int, fit: Callable[..., Any], new_run: Callable[..., Any], folder: Path) -> None:
    """Do all cells on this rank; leave what is to be compared behind."""
    sent = []
    send = DistributedDataParallel._sync_buffers
    DistributedDataParallel._sync_buffers = lambda wrapper: sent.append(send(wrapper))  # type: ignore[method-assign]
    unshared: list[None] = []
    no_sync = DistributedDataParallel.no_sync
    DistributedDataParallel.no_sync = lambda wrapper: unshared.append(None) or no_sync(wrapper)
    num_unshared = 0
    for number, cell in enumerate(cells()):
        outcome = fit(new_run, cell, f"rank {rank} cell {number}")
        num_parts = cell.gradient_accumulation_steps
        num_unshared += len(outcome["shown"]) * (num_parts - 1) // num_parts
        safetensors.torch.save_file(outcome.pop("state"), folder / f"{number}-{rank}.safetensors")
        (folder / f"{number}-{rank}.json").write_text(json.dumps(outcome))
    assert not sent  # class statistics would travel in every step
    assert len(unshared) == num_unshared  # gradients travel once a step, not with every micro-batch


@pytest.fixture(scope="module")
def walked(
    fit: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that gives both ranks' outcomes of a cell; the first call of any worker runs all cells."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    folder.mkdir(exist_ok=True)

    def outcomes(number: int, new_run: Callable[..., Any], port: int) -> list[dict[str, Any]]:
        with filelock.FileLock(folder.with_suffix(".lock")):
            if not list(folder.iterdir()):
                on_two_ranks(_walk, fit, new_run, folder, port=port)
        return [
            json.loads((folder / f"{number}-{rank}.json").read_text())
            | {"state": safetensors.torch.load_file(folder / f"{number}-{rank}.safetensors")}
            for rank in (0, 1)
        ]

    return outcomes


@pytest.mark.parametrize(
    ("number", "cell"), list(enumerate(cells())), ids=["-".join(map(str, cell)) for cell in cells()]
)
def test_fit__is_the_same_on_two_ranks(
    walked: Callable[..., list[dict[str, Any]]],
    fit: Callable[..., dict[str, Any]],
    new_run: Callable[..., Any],
    free_port: int,
    number: int,
    cell: Cell,
) -> None:
    first, second = walked(number, new_run, free_port)
    alone = fit(new_run, cell._replace(num_workers=0, gradient_accumulation_steps=1), "alone")
    assert (alone["num_ranks"], first["num_ranks"], second["num_ranks"]) == (1, 2, 2)

    # The same views of the same samples in the same steps, and not one more.
    num_parts = cell.gradient_accumulation_steps
    assert len(first["shown"]) == len(second["shown"]) == num_parts * len(alone["shown"])
    for number_of_step, images in enumerate(alone["shown"]):
        parts = slice(number_of_step * num_parts, (number_of_step + 1) * num_parts)
        shared = list(itertools.chain(*first["shown"][parts], *second["shown"][parts]))
        if cell.views_for == "all":
            assert shared == images
        assert sorted(shared) == sorted(images)
    keys = ("task", "epoch", "step", "images", "groups", "views", "learning_rates")
    assert [[step[key] for key in keys] for step in first["steps"]] == [
        [step[key] for key in keys] for step in alone["steps"]
    ]
    assert second["steps"] == first["steps"]
    for one, two in zip(alone["steps"], first["steps"], strict=True):
        digits = 1e-6 if cell.precision == "float64" else 1e-3  # they are read as float32
        assert two["loss"] == pytest.approx(one["loss"], rel=digits, abs=digits)
        assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=10 * digits, abs=10 * digits)

    assert first["matrix"] == second["matrix"] == json.loads(json.dumps(alone["matrix"]))
    assert first["counts"] == second["counts"] == [list(counts) for counts in alone["counts"]]
    assert first["hashes"] == second["hashes"]
    assert first["reports"] == second["reports"] == alone["reports"]
    bound = {("float64", "sgd"): 1e-10, ("float64", "adam"): 1e-10, ("float32", "sgd"): 1e-5}.get(
        (cell.precision, cell.optimizer), 1e-3
    )
    if cell.on_resnet and cell.learner not in {"er", "icarl", "der_pp"}:
        bound = 1e-9  # batch norm of few images divides by small variances
    assert set(first["state"]) == set(alone["state"])
    for key, tensor in alone["state"].items():
        assert torch.equal(first["state"][key], second["state"][key])
        # Counts are whole numbers.
        assert not tensor.is_floating_point() or tensor.dtype == getattr(torch, cell.precision)
        torch.testing.assert_close(
            first["state"][key], tensor, atol=bound, rtol=1e-10, msg=lambda text, key=key: key + text
        )


def test_cells__hold_every_pair_of_values() -> None:
    every = [
        cell
        for cell in cells()
        if cell.precision == "float64" and not (cell.batchwise_prompt or cell.on_resnet)
    ]
    assert len(cells()) == 2 * len(list_learners()) + 6 + len(ON_RESNET) + 3
    columns = [sorted(set(values), key=str) for values in list(zip(*every, strict=True))[:6]]
    assert columns[0] == sorted(list_learners())
    for left in range(6):
        for right in range(left):
            pairs = {(cell[left], cell[right]) for cell in every}
            is_whole = (left, right) != (3, 0)  # workers know no learner
            assert len(pairs) == len(columns[left]) * len(columns[right]) or not is_whole


def _drift(rank: int, new_run: Callable[..., Any], learner: Learner, data: Benchmark) -> None:
    """Let rank 1 alone write into a weight in the second task."""

    def meddle(module: Learner, inputs: Any) -> None:
        if rank == 1 and module.training and module.task.index == 1:
            with torch.no_grad():
                module.heads.tasks[1].bias[0] += 1e-7

    learner.register_forward_pre_hook(meddle)
    run = new_run(learner, data, name=f"rank {rank}")
    expected = r"after training on task 2 rank 1 differs from rank 0 in 'heads\.tasks\.1\.bias'\."
    with pytest.raises(TrainingError, match=expected):
        run.trainer.fit()
    assert len(run.trainer.records) == 1


def test_fit__stops_where_ranks_hold_different_weights(
    benchmark_of_three: Benchmark,
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    free_port: int,
) -> None:
    on_two_ranks(_drift, new_run, new_learner("linear_probe"), benchmark_of_three, port=free_port)


def _begin_differently(rank: int, new_run: Callable[..., Any], learner: Learner, data: Benchmark) -> None:
    """Take another weights file on rank 1."""
    if rank == 1:
        with torch.no_grad():
            learner.backbone.vit.cls_token.add_(1e-3)
    run = new_run(learner, data, name=f"rank {rank}")
    expected = r"at the beginning of task 1 rank 1 differs from rank 0 in 'backbone\.vit\.cls_token'"
    with pytest.raises(TrainingError, match=expected):
        run.trainer.fit()


def test_fit__refuses_ranks_with_different_frozen_weights(
    benchmark_of_three: Benchmark,
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    free_port: int,
) -> None:
    on_two_ranks(_begin_differently, new_run, new_learner("linear_probe"), benchmark_of_three, port=free_port)


def _draw(rank: int, new_run: Callable[..., Any], learner: Learner, data: Benchmark) -> None:
    """Draw in every forward, as dropout does."""
    drawn: list[float] = []
    learner.register_forward_pre_hook(lambda *_: drawn.append(torch.rand(1).item()))
    new_run(learner, data, name=f"rank {rank}", max_steps_per_task=2, seed=4).trainer.fit()
    expected = []
    for task, step in itertools.product(range(3), range(2)):
        with seeded(seed_for("step", seed=4, task=task, sample=step, rank=rank)):
            expected.append(torch.rand(1).item())
    assert drawn == expected


def test_fit__ranks_draw_numbers_of_their_own(
    benchmark_of_three: Benchmark,
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    free_port: int,
) -> None:
    on_two_ranks(_draw, new_run, new_learner("linear_probe"), benchmark_of_three, port=free_port)


def _draw_in_two_parts(rank: int, new_run: Callable[..., Any], learner: Learner, data: Benchmark) -> None:
    """Draw from every generator in every forward; the second run is stopped in a task, and goes on."""

    def run_to(name: str, *, stop_at: int | None = None, goes_on: bool = False) -> list[tuple[float, ...]]:
        drawn: list[tuple[float, ...]] = []
        own = copy.deepcopy(learner)

        def draw(module: Learner, _: Any) -> None:
            if module.training:
                drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
                if len(drawn) == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)

        own.register_forward_pre_hook(draw)
        options = {"epochs": 2, "batch_size": 4, "gradient_accumulation_steps": 2, "every": "1 step"}
        run = new_run(own, data, name=f"{name} {rank}", goes_on=goes_on, **options)
        with run.stop.listening(), pytest.raises(TrainingInterrupted) if stop_at else nullcontext():
            run.trainer.fit()
        return drawn

    whole = run_to("whole")
    assert len(set(whole)) == len(whole)  # the parts of a step differ, too
    first = run_to("parts", stop_at=9)
    assert 9 <= len(first) < len(whole)
    assert first + run_to("parts", goes_on=True) == whole
    everything: list[Any] = [None, None]
    torch.distributed.all_gather_object(everything, whole)
    assert not set(everything[0]) & set(everything[1])


def test_fit__ranks_draw_the_same_again_after_a_stop(
    benchmark_of_three: Benchmark,
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    free_port: int,
) -> None:
    on_two_ranks(_draw_in_two_parts, new_run, new_learner("linear_probe"), benchmark_of_three, port=free_port)


def _spoil_the_end(rank: int, new_run: Callable[..., Any], learner: Learner, data: Benchmark) -> None:
    """Write into statistics in ``end_task``, on one rank alone; both say the same, by rank 0's tensors."""

    def fit(guilty: int, shift: float, of_task: int) -> dict[str, Tensor]:
        own = copy.deepcopy(learner)
        end_task = own.end_task

        def end(task: Task, features: Any) -> None:
            end_task(task, features)
            if rank == guilty and task.index == 1:
                next(own.statistics[str(of_task)].buffers()).add_(shift)

        own.end_task = end  # type: ignore[method-assign]
        run = new_run(own, data, name=f"{guilty} {shift} {of_task} {rank}")
        run.trainer.fit()
        return {name: tensor.clone() for name, tensor in own.state_dict().items()}

    with pytest.raises(FloatingPointError, match="after the end of task 2"):
        fit(0, float("nan"), of_task=1)
    with pytest.raises(TrainingError, match="what earlier tasks left behind"):
        fit(0, 0.1, of_task=0)
    right = fit(0, 0.0, of_task=1)
    for shift, of_task in ((float("nan"), 1), (0.1, 0)):
        for name, tensor in fit(1, shift, of_task=of_task).items():
            assert torch.equal(tensor, right[name]), name


def test_fit__the_end_of_a_task_is_judged_alike_by_all_ranks(
    benchmark_of_three: Benchmark,
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    free_port: int,
) -> None:
    on_two_ranks(_spoil_the_end, new_run, new_learner("nearest_mean"), benchmark_of_three, port=free_port)


def _lose_a_logit(rank: int, new_run: Callable[..., Any], learner: Learner, data: Benchmark) -> None:
    """Return a logit that is not finite on rank 1 alone; no rank may wait for one that has left."""
    learner.register_forward_hook(
        lambda _module, _inputs, output: output._replace(logits=output.logits / (1 - rank))
    )
    with pytest.raises(FloatingPointError, match="first forward of task 1"):
        new_run(learner, data, name=f"rank {rank}").trainer.fit()


def test_fit__all_ranks_refuse_what_one_of_them_finds(
    benchmark_of_three: Benchmark,
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    free_port: int,
) -> None:
    on_two_ranks(_lose_a_logit, new_run, new_learner("linear_probe"), benchmark_of_three, port=free_port)


def _look_at_rows(rank: int, learner: Learner, data: Benchmark, expected: dict[int, Any]) -> None:
    vbm_ptm.engine.features._MESSAGE_BYTES = 500  # two rows at a time
    accelerator = build_accelerator(device="cpu")
    loaders = loaders_for(accelerator, data, LoaderConfig(evaluation_batch_size=2))
    features = TaskFeatures(learner, data.scenario.tasks[0], accelerator=accelerator, loaders=loaders)
    for count, (values, labels, sample_ids) in expected.items():
        found = features(sample_ids.tolist())
        torch.testing.assert_close(found[0], values, atol=1e-5, rtol=0)
        assert torch.equal(found[1], labels), count
        assert torch.equal(found[2], sample_ids), count


def test_features__come_together_in_order_from_ranks_with_unequal_parts(
    benchmark_of_three: Benchmark, new_learner: Callable[..., Learner], free_port: int
) -> None:
    learner = new_learner("nearest_mean")
    learner.begin_task(benchmark_of_three.scenario.tasks[0])
    accelerator = build_accelerator(device="cpu")
    alone = TaskFeatures(
        *(learner, benchmark_of_three.scenario.tasks[0]),
        accelerator=accelerator,
        loaders=loaders_for(accelerator, benchmark_of_three, LoaderConfig()),
    )
    order = np.random.default_rng(0).permutation(30)
    expected = {count: alone(order[:count].tolist()) for count in (0, 1, 2, 3, 7, 30)}
    on_two_ranks(_look_at_rows, learner, benchmark_of_three, expected, port=free_port)


def _judge(rank: int, learner: Learner, data: Benchmark, expected: Evaluation) -> None:
    accelerator = build_accelerator(device="cpu")
    loaders = loaders_for(accelerator, data, LoaderConfig(evaluation_batch_size=2))
    tasks = data.scenario.tasks
    judged = Evaluator(accelerator, loaders).judge(learner, tasks)
    rows = np.concatenate([data.test_rows(task) for task in tasks]).tolist()
    assert len(rows) == len(set(rows)) == len(judged.predictions)
    assert judged.cells == expected.cells
    for name in ("labels", "predictions"):
        assert getattr(judged, name).tolist() == getattr(expected, name).tolist()
    for name in ("scores", "probabilities"):
        np.testing.assert_allclose(getattr(judged, name), getattr(expected, name), atol=1e-6)
    images = Measurement.of(judged, AccuracyMatrix(), benchmark=data, tasks=tasks).images
    assert [image.row for image in images] == rows


def test_judge__says_the_same_of_every_image_once(
    new_benchmark: Callable[..., Benchmark], new_learner: Callable[..., Learner], free_port: int
) -> None:
    data = new_benchmark(
        [2] * 4, test_sizes=[4, 3, 1, 0], num_tasks=2
    )  # neither task divides by two ranks' batches
    learner = new_learner("finetune", num_tasks=2)
    for task in data.scenario.tasks:
        learner.begin_task(task)
    accelerator = build_accelerator(device="cpu")
    alone = Evaluator(accelerator, loaders_for(accelerator, data, LoaderConfig(evaluation_batch_size=2)))
    expected = alone.judge(learner, data.scenario.tasks)
    assert (len(expected.predictions), expected.probabilities.min() > 0.2) == (8, True)
    on_two_ranks(_judge, learner, data, expected, port=free_port)


def _stop(rank: int, new_run: Callable[..., Any], learner: Learner, data: Benchmark) -> None:
    """Ask rank 1 alone to stop, in its second step."""
    steps = []

    def count(module: Learner, inputs: Any) -> None:
        steps.append(module.training)
        if rank == 1 and steps.count(True) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    learner.register_forward_pre_hook(count)
    run = new_run(learner, data, name=f"rank {rank}", epochs=2, batch_size=2, log_every=4)
    with run.stop.listening(), pytest.raises(TrainingInterrupted) as caught:
        run.trainer.fit()
    assert caught.value.exit_code == 143
    assert steps.count(True) == 4


def test_fit__ranks_stop_at_the_same_step_and_one_goes_on(
    benchmark_of_three: Benchmark,
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    free_port: int,
) -> None:
    on_two_ranks(_stop, new_run, new_learner("finetune"), benchmark_of_three, port=free_port)
    settings = {"epochs": 2, "batch_size": 2, "log_every": 4}
    alone = new_run(new_learner("finetune"), benchmark_of_three, name="rank 0", goes_on=True, **settings)
    assert alone.trainer.progress.describe() == "0 of 3 tasks are finished, task 1 after 4 of 10 steps"
    whole = new_run(new_learner("finetune"), benchmark_of_three, name="whole", **settings)
    for run_ in (alone, whole):
        run_.trainer.fit()
    names = ("task", "epoch", "step", "images", "groups")
    steps = [[[step[name] for name in names] for step in run_.events("step")] for run_ in (alone, whole)]
    assert steps[0] == steps[1]
    for key, tensor in whole.trainer.learner.state_dict().items():
        torch.testing.assert_close(alone.trainer.learner.state_dict()[key], tensor, atol=1e-4, rtol=1e-3)


def _run(rank: int, tree: dict[str, Any], folder: Path) -> None:
    """Two runs: one whose ranks were started differently, and one into a folder that no rank finds."""
    expected = (
        "rank 1 differs from rank 0 in 'dataset.transforms.crop_scale', 'backbone.image_size', "
        "'optimization.learning_rate', 'seed'. Start the same command on every machine"
    )
    different = {
        **tree,
        "seed": 5 + rank,
        "dataset": {**tree["dataset"], "transforms": {"crop_scale": [0.5, 1 - rank / 4]}},
        "backbone": {**tree["backbone"], "image_size": 32 + 16 * rank},
        "optimization": {**tree["optimization"], "learning_rate": 0.01 * (rank + 1)},
    }
    with pytest.raises(UsageError, match=expected):
        run(different, output=folder / "different")
    images = folder / f"images of rank {rank}"  # places and names may differ
    images.symlink_to(tree["dataset"]["path"])
    tree = {**tree, "dataset": {**tree["dataset"], "path": str(images), "name": images.name}}
    result = run(tree, output=folder / "several" / "levels" / "deep")
    assert result["num_ranks"] == 2
    (folder / f"{rank}.json").write_text(json.dumps(result["task_records"]))


def test_run__starts_only_where_ranks_agree(
    toy_tree: Callable[..., dict[str, Any]], tmp_path: Path, free_port: int
) -> None:
    tree = toy_tree("linear_probe") | {"trainer": {"max_steps_per_task": 1}, "device": "cpu"}
    on_two_ranks(_run, tree, tmp_path, port=free_port)
    assert not (tmp_path / "different").exists()
    assert (tmp_path / "0.json").read_text() == (tmp_path / "1.json").read_text()
    lines = (tmp_path / "several" / "levels" / "deep" / "log.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["task_index"] for event in events if event["event"] == "task"] == [0, 1, 2]
