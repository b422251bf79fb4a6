"""What can be known before training: everything that is wrong, and what a run will cost."""

from __future__ import annotations

from typing import Any

import numpy as np

from vbm_ptm.config import ComposedConfig
from vbm_ptm.config_tree import leaves
from vbm_ptm.data.view_batch import ViewBatchSampler
from vbm_ptm.engine.trainer import parameter_counts
from vbm_ptm.engine.workload import training_workload
from vbm_ptm.errors import UsageError, unknown_name
from vbm_ptm.experiment import Setup, build


def survey(composed: ComposedConfig) -> dict[str, Any]:
    """Build everything that a run needs, without training; return facts and costs by name.

    Args:
        composed: What ``vbm_ptm.config.compose`` returned.

    Raises:
        UsageError: What a run would stumble over.
    """
    config = composed.validate()
    setup = build(config)
    scenario, train = setup.benchmark.scenario, setup.benchmark.datasets.train
    first_task = setup.benchmark.first_task  # an extension has the earlier ones behind it
    tasks = scenario.tasks[first_task:]
    samples = [len(setup.benchmark.training_rows(task)) for task in tasks]
    for task in scenario.tasks[: first_task + 1]:
        setup.learner.begin_task(task)
    parameters = parameter_counts(setup.learner)
    is_trained = any(count for name, count in parameters.items() if name != "frozen")
    batch_size, num_views = config.optimization.batch_size, config.view_batch.num_views
    workloads = [
        training_workload(
            ViewBatchSampler(count, batch_size, num_views, config.seed, index),
            epochs=config.optimization.epochs,
            max_steps=config.trainer.max_steps_per_task,
        )
        for index, count in enumerate(samples, start=first_task)
    ]
    weights = setup.learner.backbone.weights
    return {
        "data set": config.dataset.name,
        "training images": len(train),
        "test images": len(setup.benchmark.datasets.test),
        "split SHA-256": setup.benchmark.datasets.split_sha256,
        "classes": len(scenario.class_names),
        "tasks": ", ".join(str(len(task.classes)) for task in tasks) + " classes",
        "training images per task": ", ".join(map(str, samples)),
        "learner": f"{config.learner.name}, preset {config.preset}",
        "backbone": f"{weights.name}, SHA-256 {weights.sha256}" if weights else "given by the caller",
        "parameters": ", ".join(f"{name} {count:,}" for name, count in parameters.items()),
        "a step": f"{batch_size} images = {batch_size // num_views} groups x {num_views} views",
        "steps": sum(workload.num_steps for workload in workloads) if is_trained else 0,
        "images to train on": sum(workload.num_images for workload in workloads) if is_trained else 0,
        "memory for weights, gradients and optimizer": _size(_training_bytes(setup, parameters)),
        "disk for checkpoints": _size(_checkpoint_bytes(setup)),
    }


def explain_setting(key: str, composed: ComposedConfig) -> dict[str, str]:
    """Return value and source of a setting, or of every setting below it.

    Args:
        key: Dotted path such as ``optimization.learning_rate`` or ``optimization``.
        composed: What ``vbm_ptm.config.compose`` returned.

    Raises:
        UsageError: There is no such setting, or the configuration is wrong.
    """
    known = dict(leaves(composed.validate().model_dump(mode="json")))
    chosen = {path: value for path, value in known.items() if path == key or path.startswith(f"{key}.")}
    if not chosen:
        raise UsageError(unknown_name("setting", key, known))
    return {
        path: f"{value}  (from {composed.origin(path) or 'the default'})" for path, value in chosen.items()
    }


def _training_bytes(setup: Setup, parameters: dict[str, int]) -> int:
    """Weights, and for what is trained a gradient and the optimizer's averages, all in fp32."""
    averages = 1 if setup.config.optimization.optimizer == "sgd" else 2
    trained = sum(count for name, count in parameters.items() if name != "frozen")
    return 4 * (sum(parameters.values()) + trained * (1 + averages))


def _checkpoint_bytes(setup: Setup) -> int:
    """All checkpoints that will stay, class statistics included."""
    learner, scenario, keep = setup.learner, setup.benchmark.scenario, setup.config.checkpoint.keep
    stored: int = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in learner.state_dict().items()
        if not (learner.backbone_is_frozen and name.startswith("backbone."))
    )
    keeps_all = keep == "all" or (keep == "auto" and learner.backbone_is_frozen)
    num_kept = len(scenario.tasks) if keeps_all else min(2, len(scenario.tasks))
    sizes = np.bincount(setup.benchmark.class_indices(setup.benchmark.datasets.train))
    statistics = learner.statistics_size(sizes.tolist())
    return stored * num_kept + 4 * statistics


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
