"""What is said about a run before it begins."""

from __future__ import annotations

import logging

from vbm_ptm.building import Setup
from vbm_ptm.config.run_config import RunConfig
from vbm_ptm.engine.acceleration import Accelerator, describe_ranks
from vbm_ptm.engine.recipe import Recipe
from vbm_ptm.launch import launch_problems

logger = logging.getLogger(__name__)


def announce(setup: Setup, recipe: Recipe, accelerator: Accelerator) -> None:
    """Log what is about to happen, and warn about what may not be intended."""
    for line in banner(setup, accelerator):
        logger.info(line)
    precision = setup.config.trainer.mixed_precision
    problems = launch_problems(num_ranks=accelerator.num_processes, mixed_precision=precision)
    for warning in (*problems, *setup.config.notes, *recipe.notes()):
        logger.warning(warning)


def banner(setup: Setup, accelerator: Accelerator) -> list[str]:
    """Say in a few lines what is about to happen."""
    config, scenario = setup.config, setup.benchmark.scenario
    num_views, batch_size = config.view_batch.views_per_group, config.optimization.batch_size
    sizes = [len(task.classes) for task in scenario.tasks]
    weights = setup.learner.backbone.weights
    return [
        f"learner {config.learner.name}, preset {config.preset}, seed {config.seed}",
        f"backbone {weights.name if weights else 'given by the caller'}, "
        f"weights SHA-256 {weights.sha256[:12] if weights else 'n/a'}",
        f"data {config.dataset.name} (settings of {config.dataset_settings}): "
        f"{setup.benchmark.datasets.record.place}",
        f"{len(setup.benchmark.datasets.train)} training and "
        f"{len(setup.benchmark.datasets.test)} test images, {len(scenario.class_names)} classes in "
        f"{len(sizes)} tasks of {_sizes(sizes)}",
        f"view batch: {describe_view_batch(config)}; a step has {describe_step(config)}",
        describe_ranks(accelerator)
        if _is_mixed(config)
        else _on_ranks(batch_size // num_views, num_views, accelerator),
    ]


def _on_ranks(num_groups: int, num_views: int, accelerator: Accelerator) -> str:
    """Say which ranks compute, and which part of a full step."""
    line, num_ranks = describe_ranks(accelerator), accelerator.num_processes
    if num_ranks == 1:
        return line
    fewest, most = num_groups // num_ranks, -(-num_groups // num_ranks)
    groups = str(most) if most == fewest else f"{fewest} or {most}"
    images = str(most * num_views) if most == fewest else f"{fewest * num_views} or {most * num_views}"
    if num_views == 1:
        return f"{line}; of a step each rank has {images} images"
    return f"{line}; of a step each rank has {images} images = {groups} groups x {num_views} views"


def _sizes(sizes: list[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else ", ".join(map(str, sizes))


def describe_view_batch(config: RunConfig) -> str:
    """Say what a view batch is in this run, and what decided it."""
    view_batch = config.view_batch
    if view_batch.order == "class":
        text = f"1/{view_batch.num_views} of a task's classes in an epoch, {view_batch.num_views} times"
    elif view_batch.num_views > 1:
        text = f"{view_batch.num_views} views (baseline: view_batch.num_views=1)"
    else:
        text = "1 view (the plain baseline)" if view_batch.is_baseline else "1 view"
    if view_batch.views_for != "all":
        text += f", for {view_batch.views_for} samples only"
    if view_batch.strong_share:
        text += f", strong for {view_batch.strong_share:.0%} of the images"
    return f"{text}, from {config.origin('view_batch.num_views')}"


def describe_step(config: RunConfig) -> str:
    """Say what a step holds."""
    batch_size, num_views = config.optimization.batch_size, config.view_batch.views_per_group
    if _is_mixed(config):
        return f"{batch_size} images, of current samples and exemplars in proportion to their numbers"
    if num_views == 1:
        return f"{batch_size} images"
    return f"{batch_size} images = {batch_size // num_views} groups x {num_views} views"


def _is_mixed(config: RunConfig) -> bool:
    """Return whether the exemplars of a step have another number of views than its current samples."""
    rehearsal, view_batch = config.learner.rehearsal, config.view_batch
    is_merged = rehearsal is not None and rehearsal.mode == "merged"
    return is_merged and view_batch.views_per_group != view_batch.views_per_replay
