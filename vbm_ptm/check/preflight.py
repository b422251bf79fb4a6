"""What can be known before training: everything that is wrong, and what a run will cost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch.nn import Parameter

from vbm_ptm.backbones import load_backbone
from vbm_ptm.building import Setup, build, build_recipe
from vbm_ptm.check.estimates import DataOutline, SplitLabels, estimate
from vbm_ptm.config.reference import settings_of
from vbm_ptm.config.run_config import ComposedConfig, RunConfig
from vbm_ptm.config.tree import leaves
from vbm_ptm.data.image_split import ImageDatasets
from vbm_ptm.data.reading.datasets import DatasetSpec, load_image_dataset
from vbm_ptm.data.reading.integrity import shared_images
from vbm_ptm.data.reading.table_copies import copies_bytes
from vbm_ptm.data.record import SplitRecord
from vbm_ptm.engine.contract import check_parameters
from vbm_ptm.engine.parameters import parameter_counts
from vbm_ptm.errors import UsageError, did_you_mean, some_names
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.config import TaskSizes
from vbm_ptm.replay import cells_of, trained_classes
from vbm_ptm.runs.banner import describe_step, describe_view_batch
from vbm_ptm.runs.resuming import earlier_state

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class Survey:
    """What was found out without training.

    Attributes:
        facts: What a run will work on and what it will cost, as people read it.
        warnings: Problems that would not stop a run.
        faults: What a run would stumble over, or what is most likely not meant.
        data: All that is known of the images, as it will stand in a result.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

    def attempt(self, build: Callable[[], T]) -> T | None:
        """Return what a function builds, or None and remember what is wrong."""
        try:
            return build()
        except UsageError as error:
            self.faults += [problem for problem in error.problems if problem not in self.faults]
            return None


def survey(composed: ComposedConfig) -> Survey:
    """Build everything that a run needs, without training; what is wrong with one part hides no fault of another.

    Args:
        composed: What ``vbm_ptm.config.run_config.compose`` returned.
    """
    found = Survey()
    config = found.attempt(composed.validate)
    spec = found.attempt(composed.validate_dataset) if config is None else config.dataset
    datasets = None if spec is None else found.attempt(lambda: load_image_dataset(spec))
    setup: Setup | None = None
    if config is not None:
        notes = [*config.notes, *build_recipe(config).notes()]
        found.warnings += notes
        for note in notes:
            logger.warning(note)
    if config is not None and datasets is not None:
        setup = found.attempt(lambda: build(config, earlier=earlier_state(config), datasets=datasets))
    if spec is not None and datasets is not None:
        _survey_data(found, spec, datasets, settings=composed.dataset_settings)
    if setup is None and config is not None:
        found.attempt(lambda: _load_weights(config))
    if setup is not None:
        _survey_tasks(found, setup)
        found.attempt(partial(_survey_cost, found, setup))
    return found


@dataclass(frozen=True)
class ExplainedSetting:
    """A setting of a configuration.

    Attributes:
        value: As it will be used.
        source: The file, preset or option that set it.
        meaning: What it decides.
    """

    value: Any
    source: str
    meaning: str


def explain_setting(key: str, composed: ComposedConfig) -> dict[str, ExplainedSetting]:
    """Return value, source and meaning of a setting, or of every setting below it, by dotted path.

    Args:
        key: Dotted path such as ``optimization.learning_rate`` or ``optimization``.
        composed: What ``vbm_ptm.config.run_config.compose`` returned.

    Raises:
        UsageError: There is no such setting, or the configuration is wrong.
    """
    config = composed.validate()
    known = dict(leaves(config.model_dump(mode="json")))
    chosen = {path: value for path, value in known.items() if path == key or path.startswith(f"{key}.")}
    if not chosen:
        sections = {path.partition(".")[0] for path in known}
        inside = [path for path in known if path.startswith(key.partition(".")[0] + ".")]
        raise UsageError(
            f"unknown setting '{key}'.{did_you_mean(key, (*sections, *known))} "
            f"Allowed: {', '.join(sorted(inside or sections))}."
        )
    meanings = {setting.path: setting.meaning for setting in settings_of(type(config))}
    return {
        path: ExplainedSetting(value, composed.origin(path) or "the default", meanings.get(path, ""))
        for path, value in chosen.items()
    }


def _load_weights(config: RunConfig) -> None:
    load_backbone(config.backbone, seed=config.seed)


def _survey_data(found: Survey, spec: DatasetSpec, datasets: ImageDatasets, *, settings: str) -> None:
    record, train, test = datasets.record, datasets.train, datasets.test
    expected = record.expected
    found.warnings += record.warnings
    if expected and expected.problem:
        (found.warnings if expected.has_own_split else found.faults).append(
            f"data set '{spec.name}': {expected.problem}"
        )
    shared = [
        (train.source_name(one), test.source_name(other))
        for one, other in shared_images(train.rows, test.rows)
    ]
    if shared:
        pairs = some_names((f"{other} = {one}" for one, other in shared), limit=5)
        found.warnings.append(f"{len(shared)} test images are also training images, byte for byte: {pairs}")
        logger.warning("%s: %s", spec.name, found.warnings[-1])
    found.data = record.to_json() | {"shared_images": [list(pair) for pair in shared]}
    variant = expected and (expected.variant or f"unknown, most like {expected.nearest}")
    splits = {"training": record.train, "test": record.test}
    found.facts |= {
        "data set": spec.name,
        "its settings": settings,
        "its images": record.place,
        **({"variant": variant} if variant else {}),
        "training images": len(train),
        "test images": len(test),
        "held out": record.held_out or "nothing",
        **{f"{what} images per class": split.class_sizes for what, split in splits.items()},
        **{f"{what} images per domain": _listed(split) for what, split in splits.items()},
        "images verified": record.verified,
        "test images that are training images": len(shared),
        "split SHA-256": datasets.split_sha256,
        "disk for copies of parquet files": _size(copies_bytes()) if record.kind == "parquet" else "",
    }
    for key in [key for key, value in found.facts.items() if value == ""]:
        del found.facts[key]


def _listed(split: SplitRecord) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in split.images_per_domain.items())


def _survey_tasks(found: Survey, setup: Setup) -> None:
    config, benchmark = setup.config, setup.benchmark
    tasks = benchmark.scenario.tasks[benchmark.first_task :]  # an extension has the earlier ones behind it
    domains = [task.domain for task in benchmark.scenario.evaluation_tasks if task.domain is not None]
    found.facts |= {
        "classes": len(benchmark.scenario.class_names),
        "tasks": ", ".join(str(len(task.classes)) for task in tasks) + " classes",
        **({"domains in order": ", ".join(domains)} if domains else {}),
        "training images per task": ", ".join(str(len(benchmark.training_rows(task))) for task in tasks),
        "learner": f"{config.learner.name}, preset {config.preset}",
        "view batch": describe_view_batch(config),
        "a step": describe_step(config),
    }


def _survey_cost(found: Survey, setup: Setup) -> None:
    config, benchmark, learner = setup.config, setup.benchmark, setup.learner
    parameters: list[dict[str, int]] = []
    stored: list[int] = []
    for task in benchmark.scenario.tasks:
        learner.begin_task(task)
        check_parameters(learner)
        if task.index >= benchmark.first_task:
            parameters.append(parameter_counts(learner))
            stored.append(_stored_bytes(learner))
    recipe = build_recipe(config)
    workloads, cells = [], list[tuple[int, int]]()
    for task, counts in zip(benchmark.scenario.tasks[benchmark.first_task :], parameters, strict=True):
        own = benchmark.training_classes(task)
        if _num_trained(counts):
            trained = trained_classes(learner.rehearsal, own, cells)
            sampler = recipe.sampler(*trained, task_index=task.index)
            workloads.append(recipe.workload(sampler))
            for note in (*recipe.task_notes(task, sampler), *learner.config.task_notes(task)):
                found.warnings.append(note)
                logger.warning("%s", note)
        cells += cells_of(own)
    weights = learner.backbone.weights
    keep = config.checkpoint.keep
    keeps_all = keep == "all" or (keep == "auto" and learner.backbone_is_frozen)
    statistics, in_training = 0, []
    for task, counts, size in zip(
        benchmark.scenario.tasks[benchmark.first_task :], parameters, stored, strict=True
    ):
        class_sizes = [count for _, count in cells_of(benchmark.training_classes(task))]
        statistics += 4 * learner.statistics_size(class_sizes)
        sizes = TaskSizes(task.index, class_sizes, ())
        held = 4 * learner.config.held_numbers(sizes, width=learner.backbone.width)
        in_training.append(_position_bytes(config, counts, size + held))
    memory = max(_training_bytes(config, counts) for counts in parameters)
    found.facts |= {
        "backbone": f"{weights.name}, SHA-256 {weights.sha256}" if weights else "given by the caller",
        "parameters of the first task": _counts(parameters[0]),
        "parameters of the last task": _counts(parameters[-1]),
        "steps": sum(workload.num_steps for workload in workloads),
        "images to train on": sum(workload.num_images for workload in workloads),
        **_images_beside(setup),
        "memory for weights, gradients and optimizer": _size(memory),
        "disk for checkpoints": _size(sum(stored if keeps_all else stored[-2:]) + statistics),
        "of it for class statistics": _size(statistics),
        "disk in addition while a task is trained": _size(max(in_training)),
    }


def _images_beside(setup: Setup) -> dict[str, int]:
    """Return the images that a run needs beside those of its steps; not known of an extension."""
    if setup.config.scenario.extends is not None:
        return {}
    datasets = setup.benchmark.datasets
    train, test = (SplitLabels(split.labels, split.domains) for split in (datasets.train, datasets.test))
    foretold = estimate(setup.config, DataOutline(datasets.class_names, train, test))
    return {
        **({"past images drawn beside them": foretold.num_replayed} if foretold.num_replayed else {}),
        "images to look at, tests included": foretold.num_viewed,
    }


def _counts(parameters: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in parameters.items())


def _num_trained(parameters: dict[str, int]) -> int:
    return sum(count for name, count in parameters.items() if name != "frozen")


def _training_bytes(config: RunConfig, parameters: dict[str, int]) -> int:
    """Weights, and for what is trained a gradient and the optimizer's averages, all in fp32."""
    averages = 1 if config.optimization.optimizer == "sgd" else 2
    trained = _num_trained(parameters)
    return 4 * (sum(parameters.values()) + trained * (1 + averages))


def _stored_bytes(learner: Learner) -> int:
    """What a checkpoint holds, class statistics apart: of the backbone what is trained, and what it averages."""
    fixed = {
        f"backbone.{name}"
        for name, tensor in learner.backbone.state_dict(keep_vars=True).items()
        if learner.backbone_is_frozen or (isinstance(tensor, Parameter) and not tensor.requires_grad)
    }
    return sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in learner.state_dict().items()
        if name not in fixed
    )


def _position_bytes(config: RunConfig, parameters: dict[str, int], stored: int) -> int:
    """Two checkpoints inside a task and a third that is being written, each with the optimizer's averages."""
    averages = 1 if config.optimization.optimizer == "sgd" else 2
    trained = _num_trained(parameters)
    return 3 * (stored + 4 * averages * trained) if trained else 0


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"
