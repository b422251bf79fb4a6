"""Resuming: which checkpoint a run continues from, and whether data and weights are still those it was made with."""

from __future__ import annotations

import logging

from vbm_ptm.building import Setup
from vbm_ptm.config.run_config import RunConfig
from vbm_ptm.config.tree import change_lines, changes, is_within
from vbm_ptm.errors import UsageError
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.storage.checkpoint import (
    Checkpoint,
    CheckpointStore,
    read_checkpoint,
    restore,
)
from vbm_ptm.storage.checkpoint_state import RunState

logger = logging.getLogger(__name__)


def is_damaged(directory: RunDirectory) -> bool:
    """Return whether the learner of a finished run is lost, so that its last task has to be trained again."""
    try:
        directory.checkpoint().verify()
    except UsageError:
        return True
    return False


def earlier_state(
    config: RunConfig, directory: RunDirectory | None = None, *, skip_damaged: bool = False
) -> RunState | None:
    """Return a state with what an extension starts from; None for a run that extends no other.

    Args:
        config: The configuration.
        directory: That of the extension, whose own checkpoints come first: the run that is extended may be gone.
        skip_damaged: Pass over checkpoints that cannot be read.

    Raises:
        UsageError: The newest checkpoint cannot be read, or as for ``extended_checkpoint``.
    """
    if config.scenario.extends is None:
        return None
    for path in CheckpointStore(directory.path / "checkpoints").newest_first() if directory else ():
        try:
            return read_checkpoint(path).state
        except UsageError:
            if not skip_damaged:
                raise
    return extended_checkpoint(config).state


def extended_checkpoint(config: RunConfig) -> Checkpoint:
    """Return the checkpoint that an extension starts from, in the directory of the run that is extended.

    Raises:
        UsageError: It does not exist, or the configuration does not fit it.
    """
    scenario = config.scenario
    assert scenario.extends is not None
    if scenario.num_earlier_tasks is None:
        raise UsageError("scenario.extends needs scenario.num_earlier_tasks.", advice="extend")
    directory = RunDirectory(scenario.extends)
    stored, given = (each.model_dump(mode="json") for each in (directory.config(), config))
    kept = ("learner", "backbone.name", "backbone.image_size", "dataset.transforms", "scenario.kind")
    changed = {key: values for key, values in changes(stored, given).items() if is_within(key, kept)}
    if changed:
        lines = "; ".join(change_lines(changed))
        raise UsageError(f"an extension keeps what {directory.path} was made with: {lines}.")
    return directory.checkpoint(scenario.num_earlier_tasks - 1)


def newest_checkpoint(
    store: CheckpointStore, setup: Setup, directory: RunDirectory, *, skip_damaged: bool
) -> Checkpoint | None:
    """Return the newest checkpoint of the run, verified; None if it has none.

    Raises:
        UsageError: It is damaged or belongs to another run, or all do.
    """
    paths = store.newest_first()
    for path in paths:
        try:
            checkpoint = read_checkpoint(path)
            checkpoint.verify()
            is_own = (
                checkpoint.task_index >= setup.benchmark.first_task
            )  # not one of the run that is extended
            if is_own:
                directory.check_same_run(checkpoint.state.config, setup.config, what=str(path))
            return checkpoint
        except UsageError as error:
            if not skip_damaged:
                raise
            logger.warning("left out: %s", error)
    if paths:
        raise UsageError(
            f"no checkpoint in {store.directory} can be used; start a new run in another folder."
        )
    return None


def restore_checked(setup: Setup, checkpoint: Checkpoint, *, is_resumed: bool = False) -> None:
    """Restore a learner for resuming or measuring, after making sure that data and weights are the same.

    Args:
        setup: Holds the fresh learner, and the data as they are now.
        checkpoint: What to restore.
        is_resumed: Refuse any change of the images; for measuring, other test images are allowed, with a warning.

    Raises:
        UsageError: The classes, the images or the pre-trained weights are not those of the checkpoint.
    """
    if checkpoint.task_index < setup.benchmark.first_task:
        # It is from the run that is extended, whose images are not needed.
        restore(setup.learner, checkpoint)
        return
    names = setup.benchmark.scenario.class_names
    if checkpoint.state.class_names != names:
        raise UsageError(
            f"the data set's classes are not those that {checkpoint.path} was trained on, or are in another order: "
            f"{list(names)} against {list(checkpoint.state.class_names)}."
        )
    datasets, state = setup.benchmark.datasets, checkpoint.state
    if datasets.split_sha256 != state.split_sha256:
        change = (
            f"the images or their split are not those that {checkpoint.path} was made with: "
            f"{len(datasets.train)} for training, {len(datasets.test)} for testing, split SHA-256 "
            f"{datasets.split_sha256[:12]} against {state.split_sha256[:12]}"
        )
        if is_resumed:
            raise UsageError(f"{change}. Provide the same images, or start a new run in another folder.")
        if datasets.record.held_out != state.held_out:
            # The learner may have been trained on images that are held out now.
            raise UsageError(
                f"{change}. Held out of the training images: {datasets.record.held_out or 'nothing'} now, "
                f"{state.held_out or 'nothing'} then. Provide the same test images."
            )
        logger.warning("%s", change)
    restore(setup.learner, checkpoint)
