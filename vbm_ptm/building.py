"""From a configuration to objects: data, tasks, transforms and learner."""

from __future__ import annotations

from dataclasses import dataclass

from vbm_ptm.backbones import Preprocessing, load_backbone
from vbm_ptm.config.run_config import RunConfig
from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.extension import extended
from vbm_ptm.data.image_split import ImageDatasets
from vbm_ptm.data.reading.datasets import load_image_dataset
from vbm_ptm.data.task_division import build_scenario
from vbm_ptm.data.transforms import TransformsConfig, build_transforms
from vbm_ptm.data.view_transforms import ViewTransforms
from vbm_ptm.engine.contract import check_micro_batches
from vbm_ptm.engine.objective import ViewBatchObjective
from vbm_ptm.engine.recipe import Recipe
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
        datasets, scenario = extended(
            config.scenario,
            datasets,
            name=config.dataset.name,
            tasks=earlier.tasks,
            class_names=earlier.class_names,
        )
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
    for task in scenario.tasks:
        learner.check_task(task)
    if learner.rehearsal is not None:
        num_cells = sum(len(task.classes) for task in scenario.tasks)
        learner.rehearsal.check(num_cells=num_cells, is_extension=first_task > 0)
    transforms = transforms_for(config.dataset.transforms, learner.backbone.preprocessing)
    datasets = datasets.drafted(transforms.draft_size)
    return Setup(config, Benchmark(datasets, scenario, transforms, first_task), learner)


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
    check_micro_batches(learner, config.optimization.gradient_accumulation_steps)
    return learner
