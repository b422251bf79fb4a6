"""From a trained run to what ``result.json`` holds."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from vbm_ptm.building import Setup
from vbm_ptm.engine.trainer import Trainer
from vbm_ptm.storage.run_result import RESULT_VERSION, ExtensionRecord, RunResult, Status, Timings
from vbm_ptm.storage.summary import summary
from vbm_ptm.version import __version__


def run_result(setup: Setup, trainer: Trainer, *, status: Status, seconds: float) -> RunResult:
    """Assemble what ``result.json`` holds."""
    config, benchmark, records = setup.config, setup.benchmark, trainer.records
    scenario = benchmark.scenario
    return RunResult(
        version=RESULT_VERSION,
        status=status,
        learner=config.learner.name,
        dataset=config.dataset.name,
        num_views=config.view_batch.num_views,
        images_per_step=config.optimization.batch_size,
        groups_per_step=config.optimization.batch_size // config.view_batch.views_per_group,
        seed=config.seed,
        class_order_seed=config.scenario.class_order_seed,
        metrics=summary(trainer.matrix),
        accuracy_counts=trainer.matrix.to_dict(),
        class_names=scenario.class_names,
        tasks=tuple(
            tuple(scenario.class_names[index] for index in task.new_classes) for task in scenario.tasks
        ),
        domains=tuple(task.domain for task in scenario.evaluation_tasks if task.domain is not None),
        task_records=tuple(record.facts for record in records),
        num_images=sum(record.num_images for record in records),
        num_steps=sum(record.num_steps for record in records),
        weights=setup.learner.backbone.weights,
        extends=_extension_record(setup),
        dataset_settings=config.dataset_settings,
        split_sha256=benchmark.datasets.split_sha256,
        data=benchmark.datasets.record,
        transforms=benchmark.transforms.record,
        config=config.model_dump(mode="json"),
        versions=_versions(),
        num_ranks=trainer.accelerator.num_processes,
        device=str(trainer.accelerator.device),
        num_threads=torch.get_num_threads(),
        timings=Timings(total_seconds=round(seconds, 3), tasks=tuple(record.timings for record in records)),
    )


def _extension_record(setup: Setup) -> ExtensionRecord | None:
    scenario, num_gaps = setup.config.scenario, setup.benchmark.first_task
    if scenario.extends is None:
        return None
    return ExtensionRecord(
        run=str(scenario.extends),
        num_earlier_tasks=num_gaps,
        not_measured=f"how well the {num_gaps} earlier tasks are remembered after the new one: their test images are "
        "not part of this run. Their rows of the matrix are those of the run that is extended.",
    )


def _versions() -> dict[str, str]:
    names = ("torch", "torchvision", "timm", "accelerate", "datasets", "safetensors", "numpy", "pillow")
    libraries = {name: importlib.metadata.version(name) for name in names}
    return {"vbm_ptm": __version__, "python": platform.python_version(), **libraries}
