"""From a configuration to a backbone: a ViT that takes prompts, a ResNet-18 for small images, or any timm network."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
from pydantic import Field
from timm.models import PretrainedCfg
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vbm_ptm.backbones.embedded import EMBEDDED_NAME
from vbm_ptm.backbones.feature_network import FeatureNetwork
from vbm_ptm.backbones.loading import (
    build_vit,
    check_image_size,
    load_vit,
    local_file,
    own_file,
    resolve_name,
    without_memory,
)
from vbm_ptm.backbones.resnet import RESNET18_CIFAR, Initialization, ResNet18
from vbm_ptm.backbones.support import Backbone, Preprocessing, WeightsRecord, as_interpolation, as_rgb
from vbm_ptm.backbones.vit import PromptableViT, unsupported_attributes
from vbm_ptm.backbones.weights_file import check_finite, check_match, file_sha256, read_state_dict
from vbm_ptm.errors import UsageError, first_line
from vbm_ptm.randomness import seed_for, seeded
from vbm_ptm.settings import AbsolutePath, Settings

logger = logging.getLogger(__name__)

FROM_SCRATCH = "from scratch"
_CIFAR_PREPROCESSING = Preprocessing(32, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "bilinear", 1.0)


class BackboneConfig(Settings):
    """Which backbone to use.

    Attributes:
        name: Full timm tag, e.g. ``vit_base_patch16_224.augreg_in21k``, or ``resnet18_cifar``, which starts from random
            weights unless a checkpoint is given.
        checkpoint: Local weights file (.safetensors, .pth, .pt, .bin or Google's .npz); the network is then
            never used. None takes the tag's own weights from the Hub or its cache.
        image_size: Input size in pixels; None takes the size that the weights were trained at (``resnet18_cifar``: 32).
        gradient_checkpointing: Recompute the activations inside the blocks of a ViT in the backward pass instead of
            keeping them: much less memory for about a third more time. Results stay the same.
        from_scratch: Draw the weights of a timm model with the run's seed instead of loading any.
        channels: For ``resnet18_cifar``: channels of its first stage; the features have eight times as many.
        initialization: How ``resnet18_cifar`` is initialised: "torch", by torch's defaults, as for ER, DER++ and iCaRL
            in the literature; "zero_residual", with blocks that start as the identity, as for ``expandable`` and TCIL.
    """

    name: str = EMBEDDED_NAME
    checkpoint: AbsolutePath | None = None
    image_size: int | None = Field(default=None, gt=0)
    gradient_checkpointing: bool = False
    from_scratch: bool = False
    channels: int | None = Field(default=None, ge=1)
    initialization: Initialization = "torch"


def load_backbone(
    config: BackboneConfig, *, kind: type[Backbone] = Backbone, needed_by: str = "the learner", seed: int
) -> Backbone:
    """Build a backbone with its weights.

    Args:
        config: Which backbone.
        kind: The class that is needed: ``PromptableViT``, or any ``Backbone``.
        needed_by: What needs it, for messages.
        seed: Training seed, for random weights.

    Raises:
        UsageError: Unknown name, weights that are missing or do not match, settings that do not apply, or a
            network of another kind.
    """
    if config.name == RESNET18_CIFAR:
        if kind is PromptableViT:
            raise UsageError(_no_vit(f"backbone '{config.name}'", needed_by), advice="backbone")
        _refuse_settings(config, "gradient_checkpointing", "from_scratch")
        return _resnet(config, seed=seed)
    _refuse_settings(config, "channels", "initialization")
    if config.from_scratch and config.checkpoint is not None:
        raise UsageError(
            "backbone.from_scratch and backbone.checkpoint exclude each other: leave one of them out."
        )
    name, notes = resolve_name(config.name)
    probe = without_memory(name)
    is_promptable = not unsupported_attributes(probe)
    if is_promptable or (kind is PromptableViT and isinstance(probe, VisionTransformer)):
        if not config.from_scratch:
            return load_vit(
                config.name,
                config.checkpoint,
                image_size=config.image_size,
                gradient_checkpointing=config.gradient_checkpointing,
            )
    elif kind is PromptableViT:
        raise UsageError(
            _no_vit(f"backbone '{config.name}' (timm's {type(probe).__name__})", needed_by), advice="backbone"
        )
    else:
        _refuse_settings(config, "gradient_checkpointing")
    for note in notes:
        logger.warning("%s", note)
    return _timm_network(config, name, notes, seed=seed)


def _no_vit(what: str, needed_by: str) -> str:
    return (
        f"{what} is not a vision transformer that takes prompts, which {needed_by} needs; take such a backbone, or a "
        "learner for any backbone, such as finetune."
    )


def build_backbone(weights: WeightsRecord, *, preprocessing: Preprocessing) -> Backbone:
    """Build the model of recorded weights without loading them: a strict load of a whole state dict must follow.

    Args:
        weights: What ``load_backbone`` recorded.
        preprocessing: How images were prepared for it.
    """
    if weights.name == RESNET18_CIFAR:
        assert weights.channels is not None
        resnet = ResNet18(channels=weights.channels)
        return FeatureNetwork(resnet, width=resnet.num_features, preprocessing=preprocessing, weights=weights)
    name, _ = resolve_name(weights.name)
    probe = without_memory(name)
    if not unsupported_attributes(probe):
        return build_vit(weights, preprocessing=preprocessing)
    network = timm.create_model(name, num_classes=0)
    width = _width(name, preprocessing.image_size)
    return FeatureNetwork(network, width=width, preprocessing=preprocessing, weights=weights)


def _refuse_settings(config: BackboneConfig, *names: str) -> None:
    """Refuse settings that mean nothing for the backbone, rather than ignoring them."""
    defaults = BackboneConfig()
    for name in names:
        value = getattr(config, name)
        if value != getattr(defaults, name):
            raise UsageError(
                f"backbone.{name}={value} does not apply to backbone '{config.name}': leave it out."
            )


def _resnet(config: BackboneConfig, *, seed: int) -> FeatureNetwork:
    channels = 64 if config.channels is None else config.channels
    with seeded(seed_for("backbone", seed=seed)):
        network = ResNet18(channels=channels, initialization=config.initialization)
    size = config.image_size or _CIFAR_PREPROCESSING.image_size
    if config.checkpoint is None:
        note = f"drawn by seed {seed}, initialization {config.initialization}"
        weights = _drawn(config, config.name, network, seed=seed, notes=(note,), channels=channels)
    else:
        notes = _fill(network, config.checkpoint, config.name)
        weights = WeightsRecord(
            *(config.name, config.name, str(config.checkpoint), file_sha256(config.checkpoint), notes),
            channels=channels,
        )
    preprocessing = Preprocessing(**(asdict(_CIFAR_PREPROCESSING) | {"image_size": size}))
    return FeatureNetwork(network, width=8 * channels, preprocessing=preprocessing, weights=weights)


def _timm_network(config: BackboneConfig, name: str, notes: list[str], *, seed: int) -> Backbone:
    """Build a timm model with its own weights, with those of a file, or with random ones."""
    facts = timm.models.get_pretrained_cfg(name) or PretrainedCfg()
    probe = without_memory(name)
    is_vit = not unsupported_attributes(probe)
    size = config.image_size or facts.input_size[-1]
    if is_vit:
        check_image_size(size, probe, name)
    with seeded(seed_for("backbone", seed=seed)):
        options: dict[str, Any] = {"img_size": size} if is_vit else {}
        network: nn.Module = timm.create_model(name, num_classes=0, **options)
    if config.from_scratch:
        weights = _drawn(config, name, network, seed=seed, notes=(*notes, f"drawn by seed {seed}"))
    else:
        file = own_file(name, facts) if config.checkpoint is None else local_file(config.checkpoint)
        found = _fill(network, file.path, name, classifier=facts.classifier)
        weights = WeightsRecord(config.name, name, file.recorded, file_sha256(file.path), (*notes, *found))
    preprocessing = Preprocessing(
        image_size=size,
        mean=as_rgb(facts.mean),
        std=as_rgb(facts.std),
        interpolation=as_interpolation(facts.interpolation),
        crop_fraction=float(facts.crop_pct),
    )
    if is_vit:
        return PromptableViT(
            network,
            preprocessing=preprocessing,
            weights=weights,
            gradient_checkpointing=config.gradient_checkpointing,
        )
    return FeatureNetwork(network, width=_width(name, size), preprocessing=preprocessing, weights=weights)


def _width(name: str, image_size: int) -> int:
    """Return D, the width of a timm model's features, found on the meta device.

    Raises:
        UsageError: It does not turn an image of this size into one vector.
    """
    try:
        with torch.device("meta"), torch.no_grad():
            network = timm.create_model(name, num_classes=0).eval()
            shape = network(torch.zeros(2, 3, image_size, image_size)).shape
    except (RuntimeError, AssertionError, ValueError) as error:
        reason = first_line(error)
        raise UsageError(f"backbone '{name}' cannot take images of {image_size} pixels: {reason}.") from error
    if len(shape) != 2:
        raise UsageError(f"backbone '{name}' turns an image into {tuple(shape[1:])}; needed: one vector.")
    return int(shape[1])


def _fill(
    network: nn.Module, path: Path, name: str, *, classifier: str | tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """Load a file's tensors, all of which must match except a classifier; return what was changed."""
    state, facts = read_state_dict(local_file(path).path)
    heads = (classifier,) if isinstance(classifier, str) else classifier or ()
    dropped = sorted(key for key in state if key.startswith(tuple(f"{head}." for head in heads)))
    own = network.state_dict()
    dropped = [key for key in dropped if key not in own]
    state = {key: tensor for key, tensor in state.items() if key not in dropped}
    check_match(state, own, path=path, name=name)
    network.load_state_dict(state)
    check_finite(network, path)
    return (*facts, *([f"classifier head dropped: {', '.join(dropped)}"] if dropped else []))


def _drawn(
    config: BackboneConfig,
    name: str,
    network: nn.Module,
    *,
    seed: int,
    notes: tuple[str, ...],
    channels: int | None = None,
) -> WeightsRecord:
    """Return the record of random weights: the seed they were drawn with, and the hash of the result."""
    digest = hashlib.sha256()
    for key, tensor in network.state_dict().items():
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().numpy().data)
    return WeightsRecord(
        *(config.name, name, FROM_SCRATCH, digest.hexdigest(), notes), seed=seed, channels=channels
    )
