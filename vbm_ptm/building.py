"""From a configuration to objects: data, tasks, transforms and learner."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from vbm_ptm.backbones import Preprocessing, load_backbone
from vbm_ptm.config.run_config import RunConfig
from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.image_split import ImageDatasets
from vbm_ptm.data.reading.datasets import load_image_dataset
from vbm_ptm.data.scenario import Scenario
from vbm_ptm.data.task_division import build_scenario, extend_scenario
from vbm_ptm.data.transforms import TransformsConfig, ViewTransforms, build_transforms
from vbm_ptm.engine.objective import ViewBatchObjective
from vbm_ptm.engine.recipe import Recipe
from vbm_ptm.errors import UsageError
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.registry import learner_class
from vbm_ptm.randomness import seed_for, seeded
from vbm_ptm.storage.checkpoint_state import RunState


@dataclass(frozen=True)
class Setup:
    """All that a configuration stands for, built."""

    config: RunConfig
    benchmark: Benchmark
    learner: Learner


def build(
    config: RunConfig, *, earlier: RunState | None = None, datasets: ImageDatasets | None = None
) -> Setup:
    """Build the data, the tasks, the transforms and the learner of a configuration.

    Args:
        config: The configuration.
        earlier: Of an extension: state of a checkpoint of the run that is extended, or of the extension itself
            (``vbm_ptm.runs.resuming.earlier_state``).
        datasets: The images, if they have been loaded already.
    """
    datasets = datasets or load_image_dataset(config.dataset)
    if earlier is not None and config.scenario.extends is not None:
        datasets, scenario = _extended(config, datasets, earlier)
        first_task, num_planned = len(scenario.tasks) - 1, earlier.num_planned_tasks
    else:
        scenario = build_scenario(
            config.scenario,
            class_names=datasets.class_names,
            labels=datasets.train.labels,
            domains=datasets.train.domains,
        )
        first_task, num_planned = 0, len(scenario.tasks)
    learner = build_learner(config, num_tasks=num_planned)
    learner.check_room(len(scenario.tasks))
    _check_rehearsal(learner, scenario, is_extended=first_task > 0)
    transforms = transforms_for(config.dataset.transforms, learner.backbone.preprocessing)
    datasets = datasets.drafted(transforms.draft_size)
    return Setup(config, Benchmark(datasets, scenario, transforms, first_task), learner)


def _check_rehearsal(learner: Learner, scenario: Scenario, *, is_extended: bool) -> None:
    """Refuse a buffer that would be empty, or whose images are not here."""
    if learner.rehearsal is None:
        return
    if is_extended:
        raise UsageError(
            f"learner '{learner.config.name}' trains on images of earlier tasks again, which are not part of an "
            "extension: train all tasks in one run."
        )
    capacity, num_cells = learner.rehearsal.capacity, sum(len(task.classes) for task in scenario.tasks)
    is_divided = learner.rehearsal.mode == "merged" or learner.rehearsal.filled_by == "tasks"
    if is_divided and 0 < capacity < num_cells:
        raise UsageError(
            f"learner.capacity is {capacity}, but the last task would have {num_cells} classes (counted once in every "
            f"task) to share it: take at least {num_cells}, or 0 for no buffer."
        )


def transforms_for(config: TransformsConfig, preprocessing: Preprocessing) -> ViewTransforms:
    """Build the transforms of a data set's images for a backbone."""
    return build_transforms(
        config,
        image_size=preprocessing.image_size,
        mean=preprocessing.mean,
        std=preprocessing.std,
        interpolation=preprocessing.interpolation,
        crop_fraction=preprocessing.crop_fraction,
    )


def build_recipe(config: RunConfig) -> Recipe:
    """Return how each task is trained."""
    return Recipe(
        ViewBatchObjective(config.objective),
        config.optimization,
        view_batch=config.view_batch,
        seed=config.seed,
        max_steps=config.trainer.max_steps_per_task,
    )


def describe_view_batch(config: RunConfig) -> str:
    """Say what a view batch is in this run, and what decided it."""
    view_batch = config.view_batch
    if view_batch.order == "class":
        text = f"1/{view_batch.num_views} of a task's classes in an epoch, {view_batch.num_views} times"
    elif view_batch.num_views > 1:
        text = f"{view_batch.num_views} views (baseline: --set view_batch.num_views=1)"
    else:
        text = "1 view (the plain baseline)" if view_batch.is_baseline else "1 view"
    if view_batch.views_for != "all":
        text += f", for {view_batch.views_for} samples alone"
    if view_batch.strong_share:
        text += f", strong for {view_batch.strong_share:.0%} of the images"
    return f"{text}, from {config.origin('view_batch.num_views')}"


def describe_step(config: RunConfig) -> str:
    """Say what a step holds."""
    batch_size, num_views = config.optimization.batch_size, config.view_batch.views_per_group
    return f"{batch_size} images = {batch_size // num_views} groups x {num_views} views"


def _extended(
    config: RunConfig, datasets: ImageDatasets, earlier: RunState
) -> tuple[ImageDatasets, Scenario]:
    """Return the data of the new task, and the tasks of the run that is extended with the new one."""
    domain, train, test = config.dataset.name, datasets.train, datasets.test
    if config.scenario.kind == "domain_incremental" and train.domains is None:
        # Images that name no domain are all of one, called as the data set.
        train = replace(train, domains=np.full(len(train), domain))
        test = replace(test, domains=np.full(len(test), domain))
        datasets = replace(datasets, train=train, test=test)
    if config.scenario.kind == "domain_incremental" and train.domains is not None:
        names = sorted(set(train.domains.tolist()))
        if len(names) > 1:
            raise UsageError(
                f"an extension adds one task, but the data set has {len(names)} domains: {', '.join(names)}. "
                "Extend by one after the other."
            )
        (domain,) = names
    tasks = earlier.tasks[: config.scenario.num_earlier_tasks]
    scenario = extend_scenario(
        config.scenario,
        earlier=tasks,
        known_names=earlier.class_names[: tasks[-1].num_seen_classes],
        class_names=datasets.class_names,
        labels=datasets.train.labels,
        domain=domain,
    )
    return datasets, scenario


def build_learner(config: RunConfig, *, num_tasks: int) -> Learner:
    """Load the backbone and build an untrained learner on it."""
    method = learner_class(config.learner.name)
    backbone = load_backbone(
        config.backbone,
        kind=method.backbone_class,
        needed_by=f"learner '{config.learner.name}'",
        seed=config.seed,
    )
    with seeded(seed_for("learner", seed=config.seed)):
        learner = method(backbone, config.learner, num_tasks=num_tasks)
    num_parts = config.optimization.gradient_accumulation_steps
    if num_parts > 1 and backbone.has_batch_norm and not learner.backbone_is_frozen:
        raise UsageError(
            f"optimization.gradient_accumulation_steps is {num_parts}, but backbone '{config.backbone.name}' has batch "
            "norms, which normalise a step as a whole: take 1, or more ranks."
        )
    return learner
