"""What a run will take, from the labels of its data set alone: no image is decoded and no backbone is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vbm_ptm.building import build_recipe
from vbm_ptm.config.run_config import RunConfig
from vbm_ptm.data.names import form
from vbm_ptm.data.reading.datasets import DatasetSpec, load_image_dataset
from vbm_ptm.data.task_division import build_scenario
from vbm_ptm.learners.config import TRAINING_PASSES, TaskSizes
from vbm_ptm.learners.registry import learner_class
from vbm_ptm.replay import Rehearsal, cells_of, kept_sizes, records_per_draw, trained_classes


@dataclass(frozen=True)
class SplitLabels:
    """Label ids (N,) of a split and, if the data set has them, names of domains (N,)."""

    labels: NDArray[np.int64]
    domains: NDArray[np.str_] | None = None


@dataclass(frozen=True)
class DataOutline:
    """What the length of a run depends on.

    Attributes:
        class_names: By label id.
        train: Training images.
        test: Test images.
        has_names: Whether the names are those of the data set; else no class stands out, and their order is any.
    """

    class_names: tuple[str, ...]
    train: SplitLabels
    test: SplitLabels
    has_names: bool = True


class Estimate(NamedTuple):
    """What a run takes, over all tasks and ranks.

    Attributes:
        num_tasks: Tasks that are trained.
        num_steps: Optimizer steps.
        num_images: Images in them.
        num_viewed: Images that are only looked at: tests after each task, and what the method does before and after
            training.
        num_replayed: Past images in the draws beside the steps.
        num_passes: Forward passes of the backbone for all of these, a backward pass counted as two.
    """

    num_tasks: int
    num_steps: int
    num_images: int
    num_viewed: int
    num_replayed: int
    num_passes: int

    def hours(self, images_per_second: float) -> float:
        """Return the time at a rate of training images that take a forward and a backward pass each."""
        return self.num_passes / TRAINING_PASSES / images_per_second / 3600


def read_outline(spec: DatasetSpec) -> DataOutline:
    """Read the labels of a data set.

    Raises:
        UsageError: It is not there or cannot be read as configured.
    """
    data = load_image_dataset(spec.model_copy(update={"verify": "none"}))
    train, test = (SplitLabels(split.labels, split.domains) for split in (data.train, data.test))
    return DataOutline(data.class_names, train, test)


def even_outline(
    *,
    num_classes: int,
    num_train: int,
    num_test: int,
    domains: Mapping[str, tuple[int, int]] | None = None,
    spec: DatasetSpec | None = None,
) -> DataOutline:
    """Return the outline of a data set of which only totals are known: as many images of each class.

    Args:
        num_classes: Classes, in every domain.
        num_train: Training images.
        num_test: Test images.
        domains: Training and test images of each domain, if it has domains.
        spec: Settings that leave out or hold out a part of these images.
    """

    def left(train: int, test: int) -> tuple[int, int]:
        """Return how many images the settings leave, for training and for testing."""
        if spec is None:
            return train, test
        sizes = np.bincount(np.arange(train) % num_classes)
        for fraction in (0 if spec.test_split else spec.test_fraction, spec.validation_fraction):
            if fraction:
                held_out = np.minimum(np.maximum(1, (sizes * fraction + 0.5).astype(int)), sizes - 1)
                sizes, test = sizes - held_out, int(held_out.sum())
        return int(np.minimum(sizes, spec.train_images_per_class or train).sum()), test

    if domains:
        wanted = {form(name) for name in (spec and spec.domains) or domains}
        domains = {name: left(*counts) for name, counts in domains.items() if form(name) in wanted}
    num_train, num_test = left(num_train, num_test)

    def split(total: int, parts: Sequence[int]) -> SplitLabels:
        if not domains:
            return SplitLabels(np.arange(total) % num_classes)
        labels = np.concatenate([np.arange(part) % num_classes for part in parts])
        return SplitLabels(labels, np.repeat(list(domains), parts))

    train, test = (
        split(total, [each[index] for each in (domains or {}).values()])
        for index, total in enumerate((num_train, num_test))
    )
    return DataOutline(tuple(f"class {index}" for index in range(num_classes)), train, test, has_names=False)


def estimate_all(
    configs: Iterable[RunConfig], *, outline_of: Callable[[DatasetSpec], DataOutline] = read_outline
) -> list[Estimate]:
    """Return what each run takes; every data set is looked at once.

    Args:
        configs: The runs.
        outline_of: Returns what is known of a data set.
    """
    outlines: dict[str, DataOutline] = {}
    estimates = []
    for config in configs:
        key = config.dataset.model_dump_json(exclude={"transforms"})
        if key not in outlines:
            outlines[key] = outline_of(config.dataset)
        estimates.append(estimate(config, outlines[key]))
    return estimates


def estimate(config: RunConfig, outline: DataOutline) -> Estimate:
    """Return what a run takes.

    Args:
        config: The run.
        outline: Its data.
    """
    train, test = outline.train, outline.test
    order = {} if outline.has_names else {"class_order": "natural"}
    scenario = build_scenario(
        config.scenario.model_copy(update=order),
        class_names=outline.class_names,
        labels=train.labels,
        domains=train.domains,
    )
    recipe = build_recipe(config)
    tested = {
        task.index: len(scenario.rows_of(task, test.labels, test.domains))
        for task in scenario.evaluation_tasks
    }
    num_steps = num_images = num_viewed = num_replayed = num_passes = 0
    learner, num_views = config.learner, config.view_batch.views_per_replay
    # Tasks of classes of their own are also tested by their experts.
    has_experts = learner_class(learner.name).has_task_experts
    asks_experts = has_experts and scenario.kind == "class_incremental"
    cells: list[tuple[int, int]] = []
    for task in scenario.tasks:
        rows = scenario.rows_of(task, train.labels, train.domains)
        own = train.labels[rows]
        sizes = TaskSizes(task.index, [size for _, size in cells_of(own)], [size for _, size in cells])
        viewed = learner.viewed_images(sizes)
        shown = 0
        if learner.trains(task.index):
            trained = trained_classes(learner.rehearsal, own, cells)
            workload = recipe.workload(recipe.sampler(*trained, task_index=task.index))
            num_steps += workload.num_steps
            num_images += workload.num_images
            drawn = _drawn(learner.rehearsal, sizes, num_steps=workload.num_steps, num_views=num_views)
            num_replayed += drawn
            shown = workload.num_images + drawn
        passes = learner.passes(task.index)
        num_passes += shown * passes.training + viewed * passes.viewing
        num_viewed += viewed
        for seen in scenario.seen_after(task.index):
            each = passes.of_test(is_first=seen.index >= task.index) + asks_experts
            num_passes += tested[seen.index] * each
            num_viewed += tested[seen.index]
        cells += cells_of(own)
    return Estimate(len(scenario.tasks), num_steps, num_images, num_viewed, num_replayed, num_passes)


def _drawn(rehearsal: Rehearsal | None, sizes: TaskSizes, *, num_steps: int, num_views: int) -> int:
    """Return the images that are drawn beside the steps of a task; a reservoir is as good as full after one step."""
    if rehearsal is None or not rehearsal.draws:
        return 0
    if rehearsal.filled_by == "steps":
        held, num_steps = rehearsal.capacity, num_steps - (not sizes.task_index)
    else:
        held = sum(kept_sizes(rehearsal.capacity, sizes.earlier, num_cells=len(sizes.earlier)))
    return num_steps * rehearsal.draws * min(records_per_draw(rehearsal, num_views), held) * num_views
