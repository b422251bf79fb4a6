"""The views of some samples as training draws them, with the same sampler, seeds and transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from vbm_ptm.building import Setup, build, build_recipe
from vbm_ptm.config.run_config import RunConfig
from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.train_loader import TrainLoader
from vbm_ptm.data.view_batch import ViewBatchSampler
from vbm_ptm.data.view_transforms import ViewTransforms
from vbm_ptm.errors import UsageError
from vbm_ptm.report.view_sheet import SampleViews, View, ViewSheet, Visit
from vbm_ptm.runs.banner import describe_step, describe_view_batch
from vbm_ptm.runs.resuming import earlier_state


def draw_views(
    config: RunConfig, *, task: int | None = None, samples_per_class: int = 2, num_classes: int = 10
) -> ViewSheet:
    """Return views, as training draws them, of the samples of each class that it sees first in a task.

    Args:
        config: Configuration of the run.
        task: Index of the task; None for the first one that would be trained.
        samples_per_class: Number of samples of each class.
        num_classes: Number of the task's classes.

    Raises:
        UsageError: There is no such task, it trains nothing, or its training images are only known during training.
    """
    setup = build(config, earlier=earlier_state(config))
    benchmark, recipe = setup.benchmark, build_recipe(config)
    index = benchmark.first_task if task is None else task
    _check_task(setup, index)
    chosen = benchmark.scenario.tasks[index]
    classes = benchmark.training_classes(chosen)
    sampler = recipe.sampler(classes, task_index=index)
    num_steps = recipe.workload(sampler).num_steps
    visits = _visits(sampler, num_steps=num_steps)
    train = benchmark.datasets.train
    rows = benchmark.training_rows(chosen)
    shown = [
        int(position)
        for label in chosen.classes[:num_classes]
        for position in sorted(
            (each for each in np.flatnonzero(classes == label) if visits[each]),
            key=lambda each: visits[each][0].task_step,
        )[:samples_per_class]
    ]
    loading = config.data.model_copy(update={"num_workers": 0})
    loaders = Loaders(benchmark, loading, seed=config.seed)
    loader = loaders.training(chosen, sampler, strong_share=recipe.view_batch.strong_share)
    views = _first_views(
        benchmark.transforms, loader, {int(rows[position]): visits[position][0] for position in shown}
    )
    samples = [
        SampleViews(
            name=train.source_name(int(rows[position])),
            class_name=benchmark.scenario.class_names[int(classes[position])],
            original=train.image(int(rows[position])),
            views=_pictures(setup, views[int(rows[position])]),
            visits=tuple(visits[position]),
        )
        for position in shown
    ]
    if not samples:
        raise UsageError(f"task {index + 1} trains on no image in its {num_steps} steps.")
    starts = tuple(sorted({visit.task_step - visit.step for own in visits for visit in own}))
    return ViewSheet(_facts(setup, index), tuple(samples), epoch_starts=starts, num_steps=num_steps)


def _check_task(setup: Setup, index: int) -> None:
    learner, num_tasks = setup.learner, len(setup.benchmark.scenario.tasks)
    first = setup.benchmark.first_task
    if not first <= index < num_tasks:
        raise UsageError(f"there is no task {index + 1}; allowed: {first + 1} to {num_tasks}.")
    if not learner.config.trains(index):
        raise UsageError(
            f"learner '{learner.config.name}' takes no training step in task {index + 1}: it sees the images as they "
            "are evaluated. Choose another task or learner."
        )
    if index > first and learner.rehearsal is not None and learner.rehearsal.mode == "merged":
        raise UsageError(
            f"learner '{learner.config.name}' mixes images of earlier tasks into task {index + 1}, and chooses them in "
            f"training. Choose task {first + 1}."
        )


def _visits(sampler: ViewBatchSampler, *, num_steps: int) -> list[list[Visit]]:
    """Return the visits to each position, over all training steps."""
    visits: list[list[Visit]] = [[] for _ in range(sampler.num_samples)]
    task_step = epoch = 0
    while task_step < num_steps:
        sampler.set_epoch(epoch)
        for step, positions in enumerate(sampler.steps()[: num_steps - task_step]):
            for position in positions:
                visits[position].append(Visit(epoch, step, task_step))
            task_step += 1
        epoch += 1
    return visits


def _first_views(
    transforms: ViewTransforms, loader: TrainLoader, visits: Mapping[int, Visit]
) -> dict[int, Tensor]:
    """Load the steps of visits as training does, and return the views (V,C,H,W) of each row."""
    found: dict[int, Tensor] = {}
    for epoch, step in sorted({visit[:2] for visit in visits.values()}):
        loader.set_epoch(epoch, start_step=step)
        batch = next(iter(loader))
        views = transforms.strengthen(batch.images, batch.strong_seeds)
        for row, images in zip(batch.sample_ids.tolist(), views, strict=True):
            if row in visits and visits[row][:2] == (epoch, step):
                found[row] = images
    return found


def _pictures(setup: Setup, images: Tensor) -> tuple[View, ...]:
    """Return views (V,C,H,W) uint8 as pictures."""
    pixels = images.permute(0, 2, 3, 1).numpy()
    is_mixed = setup.config.view_batch.strong_share > 0
    kinds = ["weak or strong"] if is_mixed else ["weak", *["strong"] * (len(pixels) - 1)]
    return tuple(View(each, kind) for each, kind in zip(pixels, kinds, strict=True))


def _facts(setup: Setup, index: int) -> dict[str, str]:
    config, record = setup.config, setup.benchmark.transforms.record
    task, scenario = setup.benchmark.scenario.tasks[index], setup.benchmark.scenario
    return {
        "data set": config.dataset.name,
        "learner": f"{config.learner.name}, preset {config.preset}, seed {config.seed}",
        "task": f"{index + 1} of {len(scenario.tasks)}: {len(task.classes)} classes, "
        f"{len(setup.benchmark.training_rows(task))} training images",
        "view batch": f"{describe_view_batch(config)}; a step has {describe_step(config)}",
        "weak view": "; ".join(record.weak),
        "strong view": f"the weak view, then {record.strong}",
        "size, mean, std": f"{record.image_size} px; {_numbers(record.mean)}; {_numbers(record.std)}",
    }


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values)
