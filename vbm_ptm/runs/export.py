"""A finished run as a self-contained folder, to keep, to share or to upload to the Hugging Face Hub.

The folder holds the whole learner (see ``vbm_ptm.storage.portable``) and a model card. ``stored_learner.predict``
accepts it in place of the run directory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import huggingface_hub

from vbm_ptm.backbones import PromptableViT, WeightsRecord, hub_facts
from vbm_ptm.config.run_config import RunConfig, stored_config
from vbm_ptm.errors import UsageError, first_line
from vbm_ptm.learners.base import Learner
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.report.model_card import model_card
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.runs.stored_learner import restore_run
from vbm_ptm.storage.checkpoint import Checkpoint
from vbm_ptm.storage.durable_files import check_writable
from vbm_ptm.storage.portable import TrainingRecord, is_portable, write_portable
from vbm_ptm.storage.run_result import RunResult
from vbm_ptm.storage.summary import summary
from vbm_ptm.version import __version__

logger = logging.getLogger(__name__)


def export(
    run_directory: Path | str,
    *,
    output: Path | str | None = None,
    task: int | None = None,
    is_half: bool = False,
    overrides: Sequence[str] = (),
) -> Path:
    """Write a learner with all that it needs to be used elsewhere; return the folder.

    Nothing in it names a path on this machine. Weights stay as they are, so that predictions are bit for bit those of
    the run, unless ``is_half``.

    Args:
        run_directory: What ``run`` wrote.
        output: Must not exist; None for ``exported`` in the run directory (``exported_task_N`` for a given task).
        task: Index of the task after which the learner is taken; None for the last finished one.
        is_half: Store weights in half precision.
        overrides: Items ``path.to.setting=value`` for what has moved since, such as ``backbone.checkpoint``.

    Raises:
        UsageError: No learner is stored there, or the output exists.
    """
    directory = RunDirectory(Path(run_directory))
    name = "exported" if task is None else f"exported_task_{task + 1}"
    folder = directory.path / name if output is None else Path(output)
    if folder.exists():  # checked before the weights are read
        raise UsageError(f"{folder} exists already; give a folder that does not exist yet.")
    check_writable(folder)
    config = directory.config(overrides)
    learner, checkpoint = restore_run(directory, task=task, overrides=overrides)
    weights = learner.backbone.weights
    assert weights is not None
    if config.backbone.checkpoint is not None:
        weights = replace(weights, file=config.backbone.checkpoint.name)
        learner.backbone.weights = weights
    names = checkpoint.state.class_names
    matrix = AccuracyMatrix(checkpoint.state.accuracies.rows[: checkpoint.task_index + 1])
    # Those of the run that was extended, if the task is one of its tasks.
    made_with = stored_config(checkpoint.state.config, str(checkpoint.path)).validate()
    facts = _facts(made_with, learner, checkpoint, directory.result(), weights)
    dataset = made_with.dataset
    is_from_hub = dataset.path is None and not str(dataset.source).startswith("builtin:")
    base_model, base_license = (None, None) if weights.is_drawn else hub_facts(weights.name)
    is_vit = isinstance(learner.backbone, PromptableViT)
    card = model_card(
        facts.to_json(),
        title=f"{dataset.name} by {config.learner.name}",
        matrix=matrix,
        tasks=[[names[index] for index in task.new_classes] for task in learner.tasks],
        architecture="vision-transformer" if is_vit else weights.name.partition(".")[0],
        is_pretrained=not weights.is_drawn,
        base_model=base_model,
        base_license=base_license,
        hub_dataset=dataset.source if is_from_hub else None,
    )
    write_portable(
        folder,
        learner,
        class_names=names,
        transforms=config.dataset.transforms,
        mixed_precision=config.trainer.mixed_precision,
        evaluation_batch_size=config.data.evaluation_batch_size,
        is_half=is_half,
        record=facts.model_copy(update={"metrics": summary(matrix)}),
        more_files={"README.md": card},
    )
    return folder


def push(folder: Path | str, repository: str) -> str:
    """Upload an exported folder to the Hugging Face Hub; return its URL.

    A repository that does not exist is created as a private one.

    Args:
        folder: What ``export`` wrote; its README.md may have been edited.
        repository: ``name`` or ``organisation/name``.

    Raises:
        UsageError: The folder is not an exported learner, or the Hub does not accept it.
    """
    folder = Path(folder)
    if not is_portable(folder):
        raise UsageError(f"{folder} is not an exported learner: it has no config.json.")
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UsageError(
            f"HF_HUB_OFFLINE forbids uploading; {folder} is ready to be pushed once that is unset."
        )
    if huggingface_hub.get_token() is None:
        raise UsageError(
            f"no token for {huggingface_hub.constants.ENDPOINT}: run `hf auth login` or set HF_TOKEN to one that may "
            f"write; {folder} is ready to be pushed."
        )
    hub = huggingface_hub.HfApi(library_name="vbm_ptm")
    try:
        made = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="A learner of vbm_ptm")
    except Exception as error:  # the client's errors have no common base
        raise UsageError(
            f"{repository}: {first_line(error)}. {folder} is ready to be pushed again."
        ) from error
    return str(made)


def _facts(
    config: RunConfig,
    learner: Learner,
    checkpoint: Checkpoint,
    result: RunResult | None,
    weights: WeightsRecord,
) -> TrainingRecord:
    """Return what a reader should know about the training, without paths of this machine."""
    dataset, records = config.dataset, checkpoint.state.records[: checkpoint.task_index + 1]
    return TrainingRecord(
        learner=config.learner.name,
        preset=config.preset,
        views=config.view_batch.num_views,
        scenario=f"{config.scenario.kind.replace('_', '-')}, {len(learner.tasks)} of "
        f"{len(checkpoint.state.tasks)} tasks",
        earlier_tasks=_earlier_tasks(config),
        dataset=dataset.name,
        dataset_revision=dataset.revision,
        training_images=sum(record.num_samples for record in records),
        images_seen=sum(record.num_images for record in records),
        split_sha256=checkpoint.state.split_sha256,
        seed=config.seed,
        class_order_seed=config.scenario.class_order_seed,
        pre_trained_weights=_describe(weights),
        learner_settings=config.learner.model_dump(mode="json", exclude={"name"}),
        objective=config.objective.model_dump(mode="json"),
        optimization=config.optimization.model_dump(mode="json"),
        versions=result.versions if result else {"vbm_ptm": __version__},
    )


def _describe(weights: WeightsRecord) -> str:
    if weights.is_drawn:
        return f"none, {weights.name} from scratch ({'; '.join(weights.notes)}), SHA-256 {weights.sha256}"
    return f"{weights.name}, file {weights.file}, SHA-256 {weights.sha256}"


def _earlier_tasks(config: RunConfig) -> str | None:
    """Say what the data set and settings of an extended run do not cover."""
    if config.scenario.extends is None:
        return None
    return (
        f"the first {config.scenario.num_earlier_tasks} were learned by the run that was extended; data set, split "
        "and settings named here are those of the last one"
    )
