"""Weights for backbones: from the Hub by full timm tag, or from a local file; never a silent random start."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub
import timm
import torch
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from timm.models import PretrainedCfg
from timm.models.vision_transformer import VisionTransformer

from vbm_ptm.backbones.embedded import EMBEDDED_FILE, EMBEDDED_NAME
from vbm_ptm.backbones.resnet import RESNET18_CIFAR
from vbm_ptm.backbones.support import Preprocessing, WeightsRecord
from vbm_ptm.backbones.vit import PromptableViT, unsupported_attributes
from vbm_ptm.backbones.weights_file import (
    GOOGLE_PATCHES,
    GOOGLE_POSITIONS,
    check_finite,
    check_match,
    check_weights_file,
    file_sha256,
    read_google_shapes,
    read_state_dict,
    some_keys,
    strip_prefix,
)
from vbm_ptm.errors import UsageError, did_you_mean

logger = logging.getLogger(__name__)

_HEAD = re.compile(r"(?:head|pre_logits)[./]")
_HUB_TIMEOUT_SECONDS = 5

# Names in Google's checkpoints.
_GOOGLE_BLOCK = re.compile(r"Transformer/encoderblock_(\d+)/")
_GOOGLE_OUTSIDE = re.compile(r"cls$|embedding/|Transformer/(posembed_input|encoder_norm)/")


@dataclass(frozen=True)
class WeightsFile:
    """A weights file on this machine, and the name by which a run records it."""

    path: Path
    recorded: str


def load_vit(
    name: str,
    checkpoint: Path | str | None = None,
    *,
    image_size: int | None = None,
    gradient_checkpointing: bool = False,
) -> PromptableViT:
    """Build a ViT with pre-trained weights, all of which must match, without their classifier head.

    Args:
        name: Full timm tag. A bare or deprecated name is resolved, with a warning.
        checkpoint: Local weights file, .safetensors, .pth, .pt, .bin or Google's .npz; the tag then names the
            architecture and the preprocessing. None takes the tag's own weights.
        image_size: Input size in pixels. None takes the weights' own; at another size timm resamples the
            position embedding.
        gradient_checkpointing: Recompute the activations inside blocks in the backward pass.

    Raises:
        UsageError: Unknown or unsupported name, or weights that are missing, cannot be read or do not match.
    """
    resolved, notes = resolve_name(name)
    for note in notes:
        logger.warning("%s", note)
    config = timm.models.get_pretrained_cfg(resolved) or PretrainedCfg()
    probe = _probe(name, resolved)
    if image_size is not None:
        check_image_size(image_size, probe, resolved)
    file = local_file(Path(checkpoint)) if checkpoint is not None else own_file(resolved, config)
    if file.path.suffix == ".npz":
        vit, facts = _load_google(file.path, resolved, probe)
    else:
        vit, facts = _load_state_dict(file.path, resolved, probe)
    check_finite(vit, file.path)
    weights_size: int = vit.patch_embed.img_size[0]
    if weights_size != probe.patch_embed.img_size[0]:
        facts.append(f"made for {weights_size} px ('{resolved}': {probe.patch_embed.img_size[0]} px)")
    if image_size is not None and image_size != weights_size:
        vit.set_input_size(img_size=(image_size, image_size))
        facts.append(f"position embedding resampled from {weights_size} px to {image_size} px")
    for fact in facts:
        logger.info("%s: %s", file.recorded, fact)
    record = WeightsRecord(
        requested=name,
        name=resolved,
        file=file.recorded,
        sha256=file_sha256(file.path),
        notes=(*notes, *facts),
    )
    return PromptableViT(vit, weights=record, gradient_checkpointing=gradient_checkpointing)


def check_image_size(image_size: int, vit: Any, name: str) -> None:
    """Refuse a size in pixels that the patches of a ViT do not tile.

    Args:
        image_size: The size.
        vit: A model of this kind.
        name: Its timm tag.
    """
    patch_size: int = vit.patch_embed.patch_size[0]
    if image_size <= 0 or image_size % patch_size:
        below = max(image_size // patch_size, 1) * patch_size
        raise UsageError(
            f"image_size {image_size} is not a multiple of the patch size {patch_size} of '{name}'; "
            f"nearest: {below} and {below + patch_size}."
        )


def build_vit(weights: WeightsRecord, *, preprocessing: Preprocessing) -> PromptableViT:
    """Build the model of recorded weights without loading them: a strict load of a whole state dict must follow.

    Args:
        weights: What ``load_vit`` recorded.
        preprocessing: How images were prepared for it; its image size is the model's.
    """
    name, _ = resolve_name(weights.name)
    _probe(weights.requested, name)
    vit = timm.create_model(name, num_classes=0, img_size=preprocessing.image_size)
    return PromptableViT(vit, preprocessing=preprocessing, weights=weights)


def hub_facts(name: str) -> tuple[str | None, str | None]:
    """Return where the weights of a tag are on the Hub, and their license, as far as timm knows."""
    config = timm.models.get_pretrained_cfg(name) or PretrainedCfg()
    return config.hf_hub_id, config.license


def list_backbones() -> list[str]:
    """Return the embedded model, ResNet-18 for small images, then the full tags of the timm ViTs that take prompts.

    Other timm networks are accepted as well. Only configurations are read, no weights.
    """
    accepted: dict[str, bool] = {}
    tags = timm.list_models(module=["vision_transformer", "deit"], pretrained=True)
    with torch.device("meta"):
        for tag in tags:
            architecture = timm.models.get_arch_name(tag)
            if architecture not in accepted:
                # One block stands for all of them, and saves the time to build the others.
                probe = timm.create_model(architecture, depth=1, num_classes=0)
                accepted[architecture] = not unsupported_attributes(probe)
    return [EMBEDDED_NAME, RESNET18_CIFAR, *(tag for tag in tags if accepted[timm.models.get_arch_name(tag)])]


def _probe(name: str, resolved: str) -> VisionTransformer:
    """Return a model without memory for its weights, only to be inspected, to see early whether it can be used."""
    probe = without_memory(resolved)
    problems = unsupported_attributes(probe)
    if problems:
        raise UsageError(
            *(f"backbone '{name}' cannot take prompts: {problem}" for problem in problems),
            "Take a backbone that can.",
            advice="backbone",
        )
    assert isinstance(probe, VisionTransformer)
    return probe


@cache
def without_memory(name: str) -> torch.nn.Module:
    """Return timm's model of a name, without a head or memory for its weights, only to be inspected."""
    with torch.device("meta"):
        model: torch.nn.Module = timm.create_model(name, num_classes=0)
    return model


def resolve_name(name: str) -> tuple[str, list[str]]:
    """Return the full tag and, if the name was not a full tag, a note that says so."""
    deprecated = timm.models.get_deprecated_models()
    if name in deprecated:
        current = deprecated[name]
        if current is None:
            raise UsageError(f"backbone '{name}' was removed from timm without a replacement.")
        full_name = _with_tag(current)
        return full_name, [f"backbone '{name}' is a deprecated name for '{full_name}': use that."]
    architecture, tag = timm.models.split_model_name_tag(name)
    if not timm.models.is_model(architecture):
        raise UsageError(_unknown_backbone(name, timm.list_models(include_tags=bool(tag))), advice="backbone")
    allowed = list(timm.models.get_arch_pretrained_cfgs(architecture))
    if tag:
        if name not in allowed:
            known = ", ".join(allowed) or "(none)"
            raise UsageError(
                f"{_unknown_backbone(name, allowed)} Tags of {architecture}: {known}.", advice="backbone"
            )
        return name, []
    full_name = _with_tag(name)
    if full_name == name:
        return name, []
    note = (
        f"backbone '{name}' is a bare name: timm {timm.__version__} takes it for '{full_name}', another "
        "version may take other weights. Write the full tag."
    )
    return full_name, [note]


def _with_tag(name: str) -> str:
    """Return the name with timm's default tag, if it has no tag and there is one."""
    config = timm.models.get_pretrained_cfg(name)
    return f"{timm.models.get_arch_name(name)}.{config.tag}" if config is not None and config.tag else name


def _unknown_backbone(name: str, allowed: list[str]) -> str:
    return f"unknown backbone '{name}'.{did_you_mean(name, allowed)}"


def local_file(path: Path) -> WeightsFile:
    """Return a weights file named by the user, which must exist."""
    check_weights_file(path)
    return WeightsFile(path, str(path))


def own_file(name: str, config: PretrainedCfg) -> WeightsFile:
    """Find the weights of a tag: inside a package, in the Hub's cache, or on the Hub."""
    if config.file:
        path = Path(config.file)
        is_embedded = path == EMBEDDED_FILE
        return WeightsFile(path, f"vbm_ptm/assets/{path.name}" if is_embedded else str(path))
    if not config.hf_hub_id:
        place = f"timm's source is {config.url}" if config.url else "timm knows no weights for it"
        raise UsageError(f"backbone '{name}': {place}; give a file as backbone.checkpoint.")
    repository = config.hf_hub_id
    # Safetensors first, as timm does: the other file is a pickle.
    file_names = ["model.safetensors", "pytorch_model.bin"]
    if config.hf_hub_filename:
        file_names = [config.hf_hub_filename]
    for file_name in file_names:
        try:
            cached = huggingface_hub.hf_hub_download(repository, file_name, local_files_only=True)
        except LocalEntryNotFoundError:
            continue
        return WeightsFile(Path(cached), f"{repository}/{file_name}")
    return _download(name, repository, file_names)


def _download(name: str, repository: str, file_names: list[str]) -> WeightsFile:
    url = huggingface_hub.hf_hub_url(repository, file_names[0])
    absent = f"the weights of '{name}' are not on this machine"
    what_to_do = (
        f"Fetch {url} (hub repository {repository}, file {file_names[0]}) and give it as "
        "backbone.checkpoint; or take the small ViT of this package: preset=embedded."
    )
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UsageError(f"{absent}, and HF_HUB_OFFLINE forbids access to the hub. {what_to_do}")
    try:
        # A failing download is repeated for most of a minute; this asks once.
        huggingface_hub.get_hf_file_metadata(url, timeout=_HUB_TIMEOUT_SECONDS)
    except HfHubHTTPError:
        pass  # the Hub answers: let its client say what is wrong with the file
    except Exception as error:  # what the HTTP library raises depends on its version
        raise UsageError(f"{absent}, and the hub does not answer ({error}). {what_to_do}") from error
    for file_name in file_names:
        logger.info("fetching %s/%s from the hub", repository, file_name)
        try:
            path = huggingface_hub.hf_hub_download(repository, file_name, etag_timeout=_HUB_TIMEOUT_SECONDS)
        except EntryNotFoundError:
            continue
        except Exception as error:  # the client's errors have no common base
            raise UsageError(f"{absent} and could not be fetched ({error}). {what_to_do}") from error
        return WeightsFile(Path(path), f"{repository}/{file_name}")
    raise UsageError(f"the hub repository {repository} has none of {', '.join(file_names)}. {what_to_do}")


def _load_state_dict(path: Path, name: str, probe: VisionTransformer) -> tuple[VisionTransformer, list[str]]:
    """Build the model at the image size of a file with named tensors, and load them."""
    state, facts = read_state_dict(path)
    state, prefix_facts = strip_prefix(state)
    head = sorted(key for key in state if _HEAD.match(key))
    if head:
        facts = [*facts, *prefix_facts, f"classifier head dropped: {', '.join(head)}"]
        state = {key: tensor for key, tensor in state.items() if key not in head}
    else:
        facts = [*facts, *prefix_facts]
    positions = state.get("pos_embed")
    num_positions = positions.shape[1] if positions is not None and positions.ndim == 3 else None
    vit = _build(name, probe, num_positions=num_positions)
    check_match(state, vit.state_dict(), path=path, name=name)
    vit.load_state_dict(state)
    return vit, facts


def _load_google(path: Path, name: str, probe: VisionTransformer) -> tuple[VisionTransformer, list[str]]:
    """Build the model at the image size of a Google checkpoint, and let timm's own reader load it."""
    shapes = read_google_shapes(path)
    vit = _build(name, probe, num_positions=shapes[GOOGLE_POSITIONS][1])
    # timm's reader resamples patches, and skips what the model has no place for: both are checked here.
    problems = []
    patch_size = tuple(probe.patch_embed.patch_size)
    if shapes[GOOGLE_PATCHES][:2] != patch_size:
        problems.append(f"patch size {shapes[GOOGLE_PATCHES][:2]} instead of {patch_size}")
    blocks = {int(match[1]) for key in shapes if (match := _GOOGLE_BLOCK.match(key))}
    if blocks != set(range(len(vit.blocks))):
        problems.append(f"{len(blocks)} blocks instead of {len(vit.blocks)}")
    unexpected = sorted(
        key
        for key in shapes
        if not any(place.match(key) for place in (_GOOGLE_BLOCK, _GOOGLE_OUTSIDE, _HEAD))
    )
    if unexpected:
        problems.append(f"unknown to the model: {some_keys(unexpected)}")
    if not problems:
        try:
            timm.models.load_checkpoint(vit, str(path))
        except KeyError as error:
            problems.append(f"missing in the file: {error.args[0]}")
        except (RuntimeError, ValueError) as error:
            problems.append(str(error))
    if problems:
        raise UsageError(f"weights file '{path}' does not match '{name}'; nothing was loaded.", *problems)
    head = sorted(key for key in shapes if _HEAD.match(key))
    return vit, [f"classifier head dropped: {', '.join(head)}"] if head else []


def _build(name: str, probe: VisionTransformer, *, num_positions: int | None) -> VisionTransformer:
    """Build the model, without a head, at the image size of a position embedding."""
    num_patches = probe.patch_embed.num_patches
    if num_positions is not None:
        num_patches = num_positions - (0 if probe.no_embed_class else 1)
    side = round(max(num_patches, 1) ** 0.5)
    vit = timm.create_model(name, num_classes=0, img_size=side * probe.patch_embed.patch_size[0])
    assert isinstance(vit, VisionTransformer)
    return vit
