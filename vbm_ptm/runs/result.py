"""What result.json holds."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict
from typing import Any

import torch

from vbm_ptm.building import Setup
from vbm_ptm.engine.trainer import Trainer
from vbm_ptm.version import __version__

RESULT_VERSION = 1


def run_result(setup: Setup, trainer: Trainer, *, status: str, seconds: float) -> dict[str, Any]:
    """Put together what ``result.json`` holds."""
    config, benchmark = setup.config, setup.benchmark
    weights, records = setup.learner.backbone.weights, trainer.records
    timings = ("training_seconds", "end_task_seconds", "evaluation_seconds")
    return {
        "version": RESULT_VERSION,
        "status": status,
        "learner": config.learner.name,
        "dataset": config.dataset.name,
        "num_views": config.view_batch.num_views,
        "images_per_step": config.optimization.batch_size,
        "groups_per_step": config.optimization.batch_size // config.view_batch.num_views,
        "seed": config.seed,
        "class_order_seed": config.scenario.class_order_seed,
        "metrics": trainer.matrix.summary(),
        "accuracy_counts": trainer.matrix.to_dict(),
        "class_names": list(benchmark.scenario.class_names),
        "tasks": [
            [benchmark.scenario.class_names[index] for index in task.new_classes]
            for task in benchmark.scenario.tasks
        ],
        "domains": [task.domain for task in benchmark.scenario.evaluation_tasks if task.domain is not None],
        "task_records": [
            {name: value for name, value in asdict(record).items() if name not in timings}
            for record in records
        ],
        "num_images": sum(record.num_images for record in records),
        "num_steps": sum(record.num_steps for record in records),
        "weights": asdict(weights) if weights else None,
        "extends": _extension_record(setup),
        "split_sha256": benchmark.datasets.split_sha256,
        "data": benchmark.datasets.record,
        "transforms": benchmark.transforms.record,
        "config": config.model_dump(mode="json"),
        "versions": _versions(),
        "num_ranks": trainer.accelerator.num_processes,
        "device": str(trainer.accelerator.device),
        "num_threads": torch.get_num_threads(),
        "timings": {
            "total_seconds": round(seconds, 3),
            "tasks": [{name: getattr(record, name) for name in timings} for record in records],
        },
    }


def _extension_record(setup: Setup) -> dict[str, Any] | None:
    scenario, num_gaps = setup.config.scenario, setup.benchmark.first_task
    if scenario.extends is None:
        return None
    return {
        "run": str(scenario.extends),
        "num_earlier_tasks": num_gaps,
        "not_measured": f"how well the {num_gaps} earlier tasks are remembered after the new one: their test images "
        "are not part of this run. Their rows of the matrix are those of the run that is extended.",
    }


def _versions() -> dict[str, str]:
    names = ("torch", "torchvision", "timm", "accelerate", "datasets", "safetensors", "numpy", "pillow")
    libraries = {name: importlib.metadata.version(name) for name in names}
    return {"vbm_ptm": __version__, "python": platform.python_version(), **libraries}
