"""The composition root: from a configuration to objects, to a trained learner, to a run directory."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vbm_ptm
from vbm_ptm.backbones import load_vit
from vbm_ptm.config.run_config import RunConfig, compose
from vbm_ptm.config.tree import differences, leaves
from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.reading.datasets import ImageDatasets, load_image_dataset
from vbm_ptm.data.scenario import Scenario, build_scenario, extend_scenario
from vbm_ptm.data.transforms import build_transforms
from vbm_ptm.engine.acceleration import (
    Accelerator,
    build_accelerator,
    describe_ranks,
    finish_trackers,
    start_trackers,
    wait_for_ranks,
)
from vbm_ptm.storage.checkpoint import Checkpoint, CheckpointStore, read_checkpoint, restore, task_from
from vbm_ptm.storage.durable_files import write_json
from vbm_ptm.engine.fingerprint import difference_between_ranks
from vbm_ptm.engine.interruption import StopRequest
from vbm_ptm.engine.objective import ViewBatchObjective
from vbm_ptm.storage.save_schedule import SaveSchedule
from vbm_ptm.engine.tracking import RunLog
from vbm_ptm.engine.trainer import Trainer
from vbm_ptm.errors import TrainingInterrupted, UsageError
from vbm_ptm.launch import launch_problems
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.registry import learner_class
from vbm_ptm.randomness import seed_for, seeded
from vbm_ptm.runs.directory import RunDirectory

logger = logging.getLogger(__name__)

RESULT_VERSION = 1


@dataclass(frozen=True)
class Setup:
    """All that a configuration stands for, built."""

    config: RunConfig
    benchmark: Benchmark
    learner: Learner


def build(
    config: RunConfig, *, earlier: Mapping[str, Any] | None = None, datasets: ImageDatasets | None = None
) -> Setup:
    """Build the data, the tasks, the transforms and the learner of a configuration.

    Args:
        config: The configuration.
        earlier: State of a checkpoint of the run that is extended, or of the extension itself; None looks into the
            run that is extended, if there is one.
        datasets: The images, if they have been loaded already.
    """
    if config.scenario.extends is not None and earlier is None:
        earlier = extended_checkpoint(config).state
    datasets = datasets or load_image_dataset(config.dataset)
    if earlier is not None and config.scenario.extends is not None:
        datasets, scenario = _extended(config, datasets, earlier)
        first_task, num_planned = len(scenario.tasks) - 1, earlier["num_planned_tasks"]
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
    transforms = build_transforms(config.dataset.transforms, **asdict(learner.backbone.preprocessing))
    return Setup(config, Benchmark(datasets, scenario, transforms, first_task), learner)


def extended_checkpoint(config: RunConfig) -> Checkpoint:
    """Return the checkpoint that an extension starts from, in the directory of the run that is extended.

    Raises:
        UsageError: It is not there, or the configuration does not fit to it.
    """
    scenario = config.scenario
    assert scenario.extends is not None
    if scenario.num_earlier_tasks is None:
        raise UsageError("scenario.extends needs scenario.num_earlier_tasks; 'vbm-ptm extend' sets both.")
    directory = RunDirectory(scenario.extends)
    stored, given = (each.model_dump(mode="json") for each in (directory.config(), config))
    kept = ("learner.", "backbone.name", "backbone.image_size", "dataset.transforms.", "scenario.kind")
    lines = [line for line in differences(stored, given) if line.startswith(kept)]
    if lines:
        raise UsageError(f"an extension keeps what {directory.path} was made with: {'; '.join(lines)}.")
    return directory.checkpoint(scenario.num_earlier_tasks - 1)


def _extended(
    config: RunConfig, datasets: ImageDatasets, earlier: Mapping[str, Any]
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
    tasks = [task_from(values) for values in earlier["tasks"][: config.scenario.num_earlier_tasks]]
    scenario = extend_scenario(
        config.scenario,
        earlier=tasks,
        known_names=earlier["class_names"][: tasks[-1].num_seen_classes],
        class_names=datasets.class_names,
        labels=datasets.train.labels,
        domain=domain,
    )
    return datasets, scenario


def build_learner(config: RunConfig, *, num_tasks: int) -> Learner:
    """Load the backbone and build an untrained learner on it."""
    backbone = load_vit(
        config.backbone.name,
        config.backbone.checkpoint,
        image_size=config.backbone.image_size,
        gradient_checkpointing=config.backbone.gradient_checkpointing,
    )
    with seeded(seed_for("learner", seed=config.seed)):
        return learner_class(config.learner.name)(backbone, config.learner, num_tasks=num_tasks)


def run(
    config: RunConfig | Mapping[str, Any],
    *,
    output: Path | str,
    resume: bool = False,
    skip_damaged: bool = False,
    stop_after_task: int | None = None,
) -> dict[str, Any]:
    """Train and evaluate a learner; return what ``result.json`` holds.

    Args:
        config: A configuration, or its tree (``compose`` fills in what the data set's and learner's files say).
        output: The run directory; it must not exist unless ``resume``.
        resume: Go on from the newest checkpoint, or return the result of a finished run.
        skip_damaged: Go on from the newest whole checkpoint of this run; what comes after it is removed.
        stop_after_task: Stop, saved, once so many tasks are finished.

    Raises:
        UsageError: Wrong configuration, data or directory.
        TrainingInterrupted: The run was stopped and can be resumed.
    """
    if not isinstance(config, RunConfig):
        config = compose(tree=config).validate()
    directory = RunDirectory(Path(output))
    directory.check(config, resume=resume)
    finished = directory.result()
    if finished and finished["status"] == "finished" and not (skip_damaged and is_damaged(directory)):
        logger.info("%s is finished: nothing is read or trained", directory.path)
        return finished
    accelerator = build_accelerator(
        device=config.device,
        mixed_precision=config.trainer.mixed_precision,
        trackers=config.trainer.trackers,
        directory=directory.path,
        rank_timeout=timedelta(minutes=config.trainer.rank_timeout_minutes),
    )
    is_extension = config.scenario.extends is not None
    own = CheckpointStore(directory.path / "checkpoints").read() if is_extension else None
    setup = build(config, earlier=own.state if own else None)
    # Bad data or weights have been reported by now, before the directory is made; and no rank still has to look
    # whether it may be made when rank 0 makes it.
    wait_for_ranks(accelerator)
    _check_ranks_agree(setup, accelerator)
    with directory.claimed(config, resume=resume) if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process and config.scenario.extends is not None:
            directory.carry_over(RunDirectory(config.scenario.extends))
        wait_for_ranks(accelerator)
        return _train(setup, directory, accelerator, StopRequest(stop_after_task), skip_damaged=skip_damaged)


def _train(
    setup: Setup,
    directory: RunDirectory,
    accelerator: Accelerator,
    stop: StopRequest,
    *,
    skip_damaged: bool,
) -> dict[str, Any]:
    """Train from the newest checkpoint on, if there is one; write and return the result, whatever happens."""
    config, is_main, started = setup.config, accelerator.is_main_process, time.monotonic()
    tree = config.model_dump(mode="json")
    store = CheckpointStore(directory.path / "checkpoints", keep=config.checkpoint.keep, config=tree)
    checkpoint = _newest_checkpoint(store, setup, directory, skip_damaged=skip_damaged)
    optimizer = checkpoint.optimizer_tensors() if checkpoint else {}
    if not checkpoint and (directory.path / "log.jsonl").exists():
        logger.warning("%s has no checkpoint yet: training starts from the beginning", directory.path)
    if checkpoint:
        # Before the log is cut: what is refused changes nothing.
        restore_checked(setup, checkpoint, is_resumed=True)
    wait_for_ranks(accelerator)  # all have read what rank 0 may now remove
    if is_main:
        store.go_on_from(checkpoint)
        directory.write_config(config)  # where its files lie now
    position = checkpoint.state["log_position"] if checkpoint else 0
    log = RunLog(directory.path / "log.jsonl" if is_main else None, position=position)
    trainer = Trainer(
        setup.learner,
        benchmark=setup.benchmark,
        objective=ViewBatchObjective(config.objective),
        optimization=config.optimization,
        view_batch=config.view_batch,
        loading=config.data.for_device(accelerator.device.type),
        config=config.trainer,
        accelerator=accelerator,
        seed=config.seed,
        log=log,
        store=store if is_main else None,
        schedule=SaveSchedule(config.checkpoint.every),
        stop=stop,
    )
    if checkpoint:
        trainer.load_state(checkpoint.state, optimizer)
        logger.info("going on: %s", trainer.progress())
    for line in banner(setup, accelerator):
        logger.info(line)
    for problem in launch_problems(
        num_ranks=accelerator.num_processes, mixed_precision=config.trainer.mixed_precision
    ):
        logger.warning(problem)
    num_views, epochs = config.view_batch.num_views, config.optimization.epochs
    if epochs % num_views:
        logger.warning(
            "%d epochs are no whole number of cycles of %d views: samples will differ by one visit",
            epochs,
            num_views,
        )
    start_trackers(accelerator, dict(leaves(tree)))
    status = "failed"
    try:
        with stop.listening():
            trainer.fit()
        status = "finished"
    except TrainingInterrupted as interruption:
        status = "interrupted"
        saved = f"{trainer.progress()}, saved in {directory.path}"
        raise TrainingInterrupted(interruption.exit_code, f"{interruption}; {saved}") from None
    finally:
        log.close()
        finish_trackers(accelerator)
        result = _result(setup, trainer, status=status, seconds=time.monotonic() - started)
        if is_main:
            write_json(directory.path / "result.json", result)
    return result


def is_damaged(directory: RunDirectory) -> bool:
    """Return whether the learner of a finished run is lost, so that its last task has to be trained again."""
    try:
        directory.checkpoint().verify()
    except UsageError:
        return True
    return False


def _newest_checkpoint(
    store: CheckpointStore, setup: Setup, directory: RunDirectory, *, skip_damaged: bool
) -> Checkpoint | None:
    """Return the newest checkpoint of the run, verified; None if it has none.

    Raises:
        UsageError: It is damaged or that of another run, or all are.
    """
    paths = store.newest_first()
    for path in paths:
        try:
            checkpoint = read_checkpoint(path)
            checkpoint.verify()
            is_own = checkpoint.task_index >= setup.benchmark.first_task  # not of the run that is extended
            if is_own:
                directory.check_same_run(checkpoint.state["config"], setup.config, what=str(path))
            return checkpoint
        except UsageError as error:
            if not skip_damaged:
                raise
            logger.warning("left out: %s", error)
    if paths:
        raise UsageError(f"no checkpoint in {store.directory} can be used; start anew with another --output.")
    return None


def restore_checked(setup: Setup, checkpoint: Checkpoint, *, is_resumed: bool = False) -> None:
    """Restore a learner for going on or measuring, after making sure that data and weights are the same.

    Args:
        setup: Holds the fresh learner, and the data as they are now.
        checkpoint: What to restore.
        is_resumed: Refuse every change of the images; for measuring, other test images are legal and announced.

    Raises:
        UsageError: The classes, the images or the pre-trained weights are not those of the checkpoint.
    """
    if checkpoint.task_index < setup.benchmark.first_task:
        # From the run that is extended: its images are not needed.
        restore(setup.learner, checkpoint)
        return
    names = list(setup.benchmark.scenario.class_names)
    if checkpoint.state["class_names"] != names:
        raise UsageError(
            f"the data set's classes are not those that {checkpoint.path} was trained on, or stand in another order: "
            f"{names} against {checkpoint.state['class_names']}."
        )
    datasets, state = setup.benchmark.datasets, checkpoint.state
    if datasets.split_sha256 != state["split_sha256"]:
        change = (
            f"the images or their split are not those that {checkpoint.path} was made with: "
            f"{len(datasets.train)} for training, {len(datasets.test)} for testing, split SHA-256 "
            f"{datasets.split_sha256[:12]} against {state['split_sha256'][:12]}"
        )
        if is_resumed:
            raise UsageError(f"{change}. Bring the same images back, or start anew with another --output.")
        if datasets.record["held_out"] != state["held_out"]:
            # The learner may have been trained on what is held out now.
            raise UsageError(
                f"{change}. Held out of the training images: {datasets.record['held_out'] or 'nothing'} now, "
                f"{state['held_out'] or 'nothing'} then. Bring the same test images back."
            )
        logger.warning("%s", change)
    restore(setup.learner, checkpoint)


def _check_ranks_agree(setup: Setup, accelerator: Accelerator) -> None:
    """Refuse ranks that were started with other settings, images or weights; files may lie in different places."""
    config, weights = setup.config, setup.learner.backbone.weights
    settings = config.model_dump(mode="json", exclude={"dataset", "backbone", "data", "device"})
    facts = {
        **settings,
        "the images or their split": setup.benchmark.datasets.split_sha256,
        "the backbone's weights": weights.sha256 if weights else "",
    }
    prints = {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        for name, value in facts.items()
    }
    difference = difference_between_ranks(prints, accelerator)
    if difference:
        raise UsageError(f"{difference}. Start the same command on every machine, with the same data.")


def banner(setup: Setup, accelerator: Accelerator) -> list[str]:
    """Say in a few lines what is about to happen."""
    config, scenario = setup.config, setup.benchmark.scenario
    num_views, batch_size = config.view_batch.num_views, config.optimization.batch_size
    sizes = [len(task.classes) for task in scenario.tasks]
    weights = setup.learner.backbone.weights
    hint = " (baseline: --set view_batch.num_views=1)" if num_views > 1 else " (the plain baseline)"
    return [
        f"learner {config.learner.name}, preset {config.preset}, seed {config.seed}",
        f"backbone {weights.name if weights else 'given by the caller'}, "
        f"weights SHA-256 {weights.sha256[:12] if weights else 'n/a'}",
        f"data {config.dataset.name}: {len(setup.benchmark.datasets.train)} training and "
        f"{len(setup.benchmark.datasets.test)} test images, {len(scenario.class_names)} classes in "
        f"{len(sizes)} tasks of {_sizes(sizes)}",
        f"view batch: {num_views} view{'s' if num_views > 1 else ''}{hint}; "
        f"a step has {batch_size} images = {batch_size // num_views} groups x {num_views} views",
        _on_ranks(batch_size // num_views, num_views, accelerator),
    ]


def _on_ranks(num_groups: int, num_views: int, accelerator: Accelerator) -> str:
    """Say who computes, and which part of a full step."""
    line, num_ranks = describe_ranks(accelerator), accelerator.num_processes
    if num_ranks == 1:
        return line
    fewest, most = num_groups // num_ranks, -(-num_groups // num_ranks)
    groups = str(most) if most == fewest else f"{fewest} or {most}"
    images = str(most * num_views) if most == fewest else f"{fewest * num_views} or {most * num_views}"
    return f"{line}; of a step each rank has {images} images = {groups} groups x {num_views} views"


def _sizes(sizes: list[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else ", ".join(map(str, sizes))


def _result(setup: Setup, trainer: Trainer, *, status: str, seconds: float) -> dict[str, Any]:
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
    return {"vbm_ptm": vbm_ptm.__version__, "python": platform.python_version(), **libraries}
