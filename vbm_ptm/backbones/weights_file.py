"""Reading a weights file: its named tensors, what they are wrapped in, and why a file cannot be used."""

from __future__ import annotations

import argparse
import hashlib
import re
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from vbm_ptm.errors import UsageError
from vbm_ptm.stand_ins import STAND_IN_BYTES, describe_stand_in

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".npz")

# The keys under which training scripts store state dicts, in order of preference: averaged weights win, as in timm.
_AVERAGES = ("state_dict_ema", "model_ema")
_WRAPPINGS = (*_AVERAGES, "state_dict", "model")
_PREFIXES = re.compile(r"(?:(?:module|model|backbone|_orig_mod|encoder|vit|network)\.)+")

# Where torch's message begins to say how to load the file by running its code.
_ADVICE_OF_TORCH = re.compile(r"\n|\. In PyTorch 2\.6|\. This file can still be loaded")

# Names in Google's checkpoints.
GOOGLE_PATCHES = "embedding/kernel"
GOOGLE_POSITIONS = "Transformer/posembed_input/pos_embedding"


def check_weights_file(path: Path) -> None:
    """Make sure that a local weights file exists and is not a pointer to one.

    Raises:
        UsageError: It does not exist, or is a pointer.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"backbone.checkpoint '{path}' must be a file ending in {', '.join(SUFFIXES)}.")
    if not path.is_file():
        raise UsageError(
            f"backbone.checkpoint '{path}' does not exist or is not a file; set it to the path of a weights file."
        )
    with path.open("rb") as file:
        start = file.read(STAND_IN_BYTES)
    if not start:
        raise UsageError(f"backbone.checkpoint '{path}' is empty and cannot be read: fetch the file again.")
    stand_in = describe_stand_in(start)
    if stand_in:
        raise UsageError(f"backbone.checkpoint '{path}' is {stand_in}.")


def read_state_dict(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Read named tensors, and say what they were wrapped in.

    Raises:
        UsageError: The file cannot be read without running code from it, or holds something else.
    """
    if _is_safetensors(path):
        try:
            return safetensors.torch.load_file(path), []
        except (safetensors.SafetensorError, OSError) as error:
            raise UsageError(f"weights file '{path}' is not a readable safetensors file: {error}.") from error
    try:
        # timm's training script stores its arguments beside the weights.
        with torch.serialization.safe_globals([argparse.Namespace]), path.open("rb") as file:  # of any name
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load reports broken files with errors of every kind
        reason = _ADVICE_OF_TORCH.split(str(error), maxsplit=1)[0]
        raise UsageError(
            f"weights file '{path}' cannot be read as tensors only, the one safe way ({reason}). "
            "Save its state dict as .safetensors."
        ) from error
    content, facts = _unwrapped(content)
    if not isinstance(content, dict) or not content:
        raise UsageError(f"weights file '{path}' holds {type(content).__name__}, not a state dict.")
    others = [
        str(key)
        for key, value in content.items()
        if not isinstance(key, str) or not isinstance(value, Tensor)
    ]
    if others:
        raise UsageError(
            f"weights file '{path}' holds no plain state dict: not tensors: {some_keys(others)}. "
            f"Known wrappings: {', '.join(_WRAPPINGS)}."
        )
    return content, facts


def _is_safetensors(path: Path) -> bool:
    """Return whether a file is read as safetensors: by how it begins, or else by its name."""
    with path.open("rb") as file:
        start = file.read(9)
    is_pickled = start.startswith((b"PK", b"\x80"))
    return start[8:] == b"{" or (path.suffix == ".safetensors" and not is_pickled)


def _unwrapped(content: object) -> tuple[object, list[str]]:
    """Take a state dict out of what it is wrapped in, at most twice."""
    facts: list[str] = []
    for _ in range(2):
        there = [name for name in _WRAPPINGS if isinstance(content, dict) and _is_filled(content.get(name))]
        if not there:
            break
        assert isinstance(content, dict)
        chosen, *others = there
        fact = f"unwrapped from '{chosen}'"
        if chosen in _AVERAGES and others:
            fact += f", the averaged weights (EMA), as timm does; '{others[0]}' is left out"
        facts.append(fact)
        content = content[chosen]
    return content, facts


def _is_filled(value: object) -> bool:
    return isinstance(value, dict) and bool(value)


def strip_prefix(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Strip the prefix that a wrapper (DDP, torch.compile, a training framework) put before every key."""
    anchors = [key for key in state if key.endswith("patch_embed.proj.weight")]
    prefix = anchors[0].removesuffix("patch_embed.proj.weight") if len(anchors) == 1 else ""
    if not _PREFIXES.fullmatch(prefix):
        return state, []
    stripped = {key.removeprefix(prefix): tensor for key, tensor in state.items()}
    return stripped, [f"prefix '{prefix}' stripped from the keys"]


def read_google_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array in a Google checkpoint, named without the optimizer's prefix.

    Raises:
        UsageError: The file cannot be read, or has another layout.
    """
    try:
        # np.load leaves a file open if it cannot read it, so the file is opened here.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            shapes = {key: arrays[key].shape for key in arrays.files}
    except (OSError, TypeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"weights file '{path}' is not a readable .npz file: {error}.") from error
    prefix = "opt/target/" if f"opt/target/{GOOGLE_PATCHES}" in shapes else ""
    shapes = {key.removeprefix(prefix): shape for key, shape in shapes.items()}
    if len(shapes.get(GOOGLE_PATCHES, ())) != 4 or len(shapes.get(GOOGLE_POSITIONS, ())) != 3:
        raise UsageError(
            f"weights file '{path}' does not have the layout of Google's ViT checkpoints: it needs "
            f"'{GOOGLE_PATCHES}' and '{GOOGLE_POSITIONS}', and holds {some_keys(sorted(shapes))}."
        )
    return shapes


def check_match(state: Mapping[str, Tensor], own: Mapping[str, Tensor], *, path: Path, name: str) -> None:
    """Make sure that the tensors of a file are exactly those of a model.

    Args:
        state: The file's tensors.
        own: The model's.
        path: The file.
        name: The model.

    Raises:
        UsageError: One is missing, unknown to the model, of another shape, sparse or without values, or
            does not hold real numbers.
    """
    problems = []
    missing, unexpected = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing:
        problems.append(f"missing in the file: {some_keys(missing)}")
    if unexpected:
        problems.append(f"unknown to the model: {some_keys(unexpected)}")
    differing = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(tensor.shape)}"
        for key, tensor in own.items()
        if key in state and state[key].shape != tensor.shape
    ]
    if differing:
        problems.append(f"of another shape: {some_keys(differing)}")
    others = [
        f"{key} ({state[key].dtype})"
        for key, tensor in own.items()
        if key in state and tensor.is_floating_point() and not state[key].is_floating_point()
    ]
    if others:
        problems.append(f"not of real numbers (quantised weights are integers): {some_keys(others)}")
    unfilled = [
        f"{key} ({'without values' if state[key].is_meta else state[key].layout})"
        for key in own
        if key in state and (state[key].is_meta or state[key].layout != torch.strided)
    ]
    if unfilled:
        problems.append(f"not plain tensors with a value for each element: {some_keys(unfilled)}")
    if problems:
        raise UsageError(
            f"weights file '{path}' does not match '{name}'; nothing was loaded.",
            *problems,
            "Give the tag of the architecture that the file was made with, in timm's key names.",
        )


def check_finite(model: nn.Module, path: Path) -> None:
    """Make sure that a model loaded from a file holds finite numbers, and not all the same.

    Raises:
        UsageError: Weights are NaN or infinite, or every matrix holds a single value, such as zero.
    """
    matrices = [tensor for tensor in model.state_dict().values() if tensor.dim() > 1]
    if matrices and all(bool((tensor == tensor.flatten()[0]).all()) for tensor in matrices):
        what = (
            "a single value in every matrix"
            if any(bool(tensor.any()) for tensor in matrices)
            else "only zeros"
        )
        raise UsageError(f"weights file '{path}' holds {what}: it was written before it was filled.")
    broken = [
        f"{name} ({int((~tensor.isfinite()).sum()):,} of {tensor.numel():,})"
        for name, tensor in model.state_dict().items()
        if not bool(tensor.isfinite().all())
    ]
    if broken:
        raise UsageError(
            f"weights file '{path}' holds numbers that are not finite (NaN or infinite): {some_keys(broken)}. The "
            "training that made it has diverged, or the file is damaged: use another one."
        )


def file_sha256(path: Path) -> str:
    """Return the hash of a weights file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def some_keys(names: Sequence[str]) -> str:
    """Return the first names in one line, and how many more there are."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
