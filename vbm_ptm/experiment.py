"""One run from beginning to end: train and evaluate, on ranks that agree; leave a result, or nothing to begin anew."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from vbm_ptm.backbones.compiling import compile_backbones
from vbm_ptm.building import Setup, build, build_recipe
from vbm_ptm.config.run_config import RunConfig, compose
from vbm_ptm.config.tree import leaves
from vbm_ptm.engine.acceleration import (
    Accelerator,
    build_accelerator,
    finish_trackers,
    loaders_for,
    precision_of,
    start_trackers,
    wait_for_ranks,
)
from vbm_ptm.engine.interruption import StopRequest
from vbm_ptm.engine.tracking import RunLog, silenced
from vbm_ptm.engine.trainer import Trainer
from vbm_ptm.errors import TrainingInterrupted
from vbm_ptm.runs.agreement import check_ranks_agree
from vbm_ptm.runs.banner import announce
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.runs.result import run_result
from vbm_ptm.runs.resuming import earlier_state, is_damaged, newest_checkpoint, restore_checked
from vbm_ptm.storage.checkpoint import CheckpointStore
from vbm_ptm.storage.durable_files import write_json
from vbm_ptm.storage.run_result import Status
from vbm_ptm.storage.save_schedule import SaveSchedule

logger = logging.getLogger(__name__)


def run(
    config: RunConfig | Mapping[str, Any],
    *,
    output: Path | str,
    resume: bool = False,
    skip_damaged: bool = False,
    stop_after_task: int | None = None,
    is_quiet: bool = False,
) -> dict[str, Any]:
    """Train and evaluate a learner; return what ``result.json`` holds, as JSON values.

    ``vbm_ptm.storage.run_result.RunResult.model_validate`` gives the same with attributes.

    Args:
        config: A configuration, or its tree (``compose`` fills in what the data set's and learner's files say).
        output: The run directory; it must not exist unless ``resume``.
        resume: Go on from the newest checkpoint, or return the result of a finished run.
        skip_damaged: Go on from the newest whole checkpoint of this run; what comes after it is removed.
        stop_after_task: Stop, saved, once this many tasks are finished.
        is_quiet: Show no progress, as a notebook or a program may want; warnings go to ``logging`` in any case.

    Raises:
        UsageError: Wrong configuration, data or directory.
        TrainingInterrupted: The run was stopped and can be resumed.
    """
    if not isinstance(config, RunConfig):
        config = compose(tree=config).validate()
    directory = RunDirectory(Path(output))
    directory.check(config, resume=resume)
    finished = directory.result()
    if finished and finished.is_finished and not (skip_damaged and is_damaged(directory)):
        logger.info("%s is finished: nothing is read or trained", directory.path)
        return finished.to_json()
    config = directory.kept(config)
    accelerator = build_accelerator(
        device=config.device,
        mixed_precision=config.trainer.mixed_precision,
        trackers=config.trainer.trackers,
        directory=directory.path,
        rank_timeout=timedelta(minutes=config.trainer.rank_timeout_minutes),
    )
    config = config.with_precision(precision_of(accelerator))
    setup = build(config, earlier=earlier_state(config, directory, skip_damaged=skip_damaged))
    if config.trainer.compile:
        compile_backbones(setup.learner, accelerator.device.type)
    # Bad data or weights have been reported by now, before the directory is made; and no rank still has to look
    # whether it may be made when rank 0 makes it.
    wait_for_ranks(accelerator)
    check_ranks_agree(setup, accelerator)
    with directory.claimed(config, resume=resume) if accelerator.is_main_process else nullcontext():
        if accelerator.is_main_process and config.scenario.extends is not None:
            directory.carry_over(RunDirectory(config.scenario.extends))
        wait_for_ranks(accelerator)
        stop = StopRequest(stop_after_task, signals=config.trainer.stop_signals)
        with silenced(is_quiet):
            return _train(setup, directory, accelerator, stop, skip_damaged=skip_damaged)


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
    store = CheckpointStore(
        directory.path / "checkpoints", keep=config.checkpoint.keep, config=tree, fresh=setup.learner
    )
    checkpoint = newest_checkpoint(store, setup, directory, skip_damaged=skip_damaged)
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
    position = checkpoint.state.log_position if checkpoint else 0
    log = RunLog(directory.path / "log.jsonl" if is_main else None, position=position)
    trainer = Trainer(
        setup.learner,
        recipe=build_recipe(config),
        loaders=loaders_for(accelerator, setup.benchmark, config.data, seed=config.seed, on_wait=stop.check),
        config=config.trainer,
        accelerator=accelerator,
        log=log,
        store=store if is_main else None,
        schedule=SaveSchedule(config.checkpoint.every),
        stop=stop,
    )
    if checkpoint:
        trainer.progress.load_state(checkpoint.state, optimizer)
        logger.info("continuing: %s", trainer.progress.describe())
    announce(setup, trainer.recipe, accelerator)
    start_trackers(accelerator, dict(leaves(tree)))
    status: Status = "failed"
    with stop.listening():  # also while the result is written: a launcher ends a rank whose fellow has failed
        try:
            trainer.fit()
            status = "finished"
        except TrainingInterrupted as interruption:
            status = "interrupted"
            saved = f"{trainer.progress.describe()}, saved in {directory.path}"
            raise TrainingInterrupted(interruption.exit_code, f"{interruption}; {saved}") from None
        finally:
            log.close()
            finish_trackers(accelerator)
            result = run_result(setup, trainer, status=status, seconds=time.monotonic() - started)
            if is_main:
                write_json(directory.path / "result.json", result.to_json())
    return result.to_json()
