"""A learner as a folder that needs nothing else: neither the run, nor the data, nor the file of pre-trained weights.

model.safetensors   the whole state dict, including the backbone
config.json         what rebuilds the learner and prepares its images, class names, the hash of the file above
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError, model_validator
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from vbm_ptm.backbones import Preprocessing, WeightsRecord, build_backbone
from vbm_ptm.data.record import Record
from vbm_ptm.data.scenario import Task
from vbm_ptm.data.transforms import TransformsConfig
from vbm_ptm.errors import UsageError
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.registry import learner_class
from vbm_ptm.randomness import seeded
from vbm_ptm.settings import PrecisionSetting, Settings
from vbm_ptm.storage.checkpoint import grow
from vbm_ptm.storage.durable_files import write_directory

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


class TrainingRecord(Record):
    """What training recorded, for people to read, without paths of the machine.

    Attributes:
        learner: Name of the method.
        preset: Preset of its settings.
        views: V.
        scenario: Its kind, and how many of its tasks are finished.
        earlier_tasks: For an extended run: what its data set and settings do not cover.
        dataset: Name of the data set.
        dataset_revision: Its revision on the Hub.
        training_images: Training images of all tasks.
        images_seen: Views shown in training.
        split_sha256: Hash of which image is in which split and class.
        seed: Training seed.
        class_order_seed: Seed of the class order.
        pre_trained_weights: Their name, file and hash.
        learner_settings: Settings of the method.
        objective: Settings of the loss.
        optimization: Settings of the optimizer.
        versions: Versions of the libraries.
        metrics: Every number of the accuracy matrix.
    """

    learner: str
    preset: str | None = None
    views: int | None = None
    scenario: str | None = None
    earlier_tasks: str | None = None
    dataset: str | None = None
    dataset_revision: str | None = None
    training_images: int | None = None
    images_seen: int | None = None
    split_sha256: str | None = None
    seed: int | None = None
    class_order_seed: int | None = None
    pre_trained_weights: str | None = None
    learner_settings: dict[str, Any] | None = None
    objective: dict[str, Any] | None = None
    optimization: dict[str, Any] | None = None
    versions: dict[str, str] | None = None
    metrics: dict[str, Any] | None = None


class PortableConfig(Settings):
    """Everything that the folder says about a learner, except its weights.

    Attributes:
        library_name: What reads the folder.
        format_version: Version of the folder's layout.
        learner: The method's settings, including its name.
        num_tasks: Tasks that the learner was planned for.
        tasks: The tasks that it has finished.
        class_names: Names of all seen classes, by class index.
        backbone: The pre-trained weights that training began with.
        preprocessing: How images are prepared for them.
        transforms: The data set's settings for the transforms.
        mixed_precision: What the forward pass computes in.
        evaluation_batch_size: Number of images classified at once.
        precision: Precision that the weights are stored in; they are always loaded in single precision.
        sha256: Hash of the file of weights.
        record: What training recorded, for people to read.
    """

    library_name: Literal["vbm_ptm"] = "vbm_ptm"
    format_version: Literal[1, 2] = 2
    learner: dict[str, Any]
    num_tasks: int
    tasks: tuple[Task, ...]
    class_names: tuple[str, ...]
    backbone: WeightsRecord
    preprocessing: Preprocessing
    transforms: TransformsConfig
    mixed_precision: PrecisionSetting
    evaluation_batch_size: int
    precision: Literal["single", "half"]
    sha256: str
    record: TrainingRecord

    @model_validator(mode="before")
    @classmethod
    def _read_version_1(cls, values: Any) -> Any:
        if isinstance(values, dict):  # version 1 also listed shapes, which the file of weights holds anyway
            return {name: value for name, value in values.items() if name != "finished_shapes"}
        return values


def is_portable(folder: Path) -> bool:
    """Return whether a folder looks like what ``write_portable`` made."""
    return (folder / CONFIG_FILE).is_file()


def write_portable(
    folder: Path,
    learner: Learner,
    *,
    class_names: tuple[str, ...],
    transforms: TransformsConfig,
    mixed_precision: PrecisionSetting,
    evaluation_batch_size: int,
    is_half: bool,
    record: TrainingRecord,
    more_files: Mapping[str, str],
) -> PortableConfig:
    """Write a learner and all that it needs; the folder is written as a whole or not at all.

    Args:
        folder: Must not exist.
        learner: After the end of a task.
        class_names: Names by class index.
        transforms: The data set's settings.
        mixed_precision: What the forward pass computes in.
        evaluation_batch_size: Images to classify at once.
        is_half: Store in half precision; predictions then differ in their last digits.
        record: What training recorded.
        more_files: Name -> text of further files in the folder.

    Raises:
        UsageError: The folder exists, or half precision cannot hold the weights.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists already; give a folder that does not exist yet.")
    assert learner.backbone.weights is not None
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in learner.state_dict().items()}
    if is_half:
        tensors = {name: _halved(name, tensor) for name, tensor in tensors.items()}
    content = tensors_to_bytes(tensors, {"format": "pt"})
    config = PortableConfig(
        learner=learner.config.model_dump(mode="json"),
        num_tasks=learner.num_tasks,
        tasks=tuple(learner.tasks),
        class_names=class_names[: learner.num_seen_classes],
        backbone=learner.backbone.weights,
        preprocessing=learner.backbone.preprocessing,
        transforms=transforms,
        mixed_precision=mixed_precision,
        evaluation_batch_size=evaluation_batch_size,
        precision="half" if is_half else "single",
        sha256=hashlib.sha256(content).hexdigest(),
        record=record,
    )
    files = {name: text.encode() for name, text in more_files.items()}
    described = config.model_dump_json(indent=1).encode() + b"\n"
    write_directory(folder, {WEIGHTS_FILE: content, CONFIG_FILE: described, **files})
    return config


def read_portable(folder: Path) -> tuple[Learner, PortableConfig]:
    """Read and verify a learner; it is on the CPU and in eval mode.

    The code of a learner from outside this package does not come with the folder. It is never imported because a folder
    says so, as that may come from a stranger: the caller imports it first.

    Raises:
        UsageError: Something is missing or damaged, was written by another version, or needs code of its own.
    """
    file = folder / CONFIG_FILE
    try:
        config = PortableConfig.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "as a whole"
        raise UsageError(
            f"{file} is not from an exported learner, or from another version of vbm_ptm: {where}: {first['msg']}."
        ) from error
    content = (folder / WEIGHTS_FILE).read_bytes() if (folder / WEIGHTS_FILE).is_file() else b""
    if hashlib.sha256(content).hexdigest() != config.sha256:
        raise UsageError(
            f"{folder / WEIGHTS_FILE} is {'damaged' if content else 'missing or empty'}: its SHA-256 is not the one "
            f"in {CONFIG_FILE}. Export the run again, or fetch the file again."
        )
    name = str(config.learner.get("name"))
    module, _, own_class = name.partition(":")
    if own_class and module not in sys.modules:
        raise UsageError(
            f"{folder} holds the learner '{name}', whose code does not come with it. If you trust that code, "
            f"`import {module}` in Python before vbm_ptm.runs.stored_learner.predict."
        )
    found = learner_class(name)
    backbone = build_backbone(config.backbone, preprocessing=config.preprocessing)
    with seeded(0):  # drawn, and overwritten
        learner = found(
            backbone, found.config_class.model_validate(config.learner), num_tasks=config.num_tasks
        )
        tensors = tensors_from_bytes(content)
        grow(learner, config.tasks, tensors)
    learner.load_state_dict(tensors)  # into single precision, whatever is stored
    return learner.eval(), config


def _halved(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    halved = tensor.half()
    if not torch.equal(halved.isfinite(), tensor.isfinite()):
        raise UsageError(
            f"'{name}' has numbers that half precision cannot represent: export it in single precision."
        )
    return halved
