"""The tiny ViT of the golden fixtures, and the fixtures themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from vbm_ptm.backbones import PromptableViT

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="session")
def backbone() -> PromptableViT:
    """A frozen ViT of width 48 with 6 blocks of 4 heads for images of 32 px, in float64 and eval mode."""
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=6, num_heads=4, num_classes=0)
    vit.double().load_state_dict(load_file(GOLDEN / "tiny_vit.safetensors"))
    return PromptableViT(vit.eval()).requires_grad_(False)


@pytest.fixture(scope="session")
def images() -> Tensor:
    """Eight images (8,3,32,32) in float64."""
    return load_file(GOLDEN / "plain_vit.safetensors")["images"]


@pytest.fixture
def golden() -> Callable[[str], dict[str, Tensor]]:
    """Return a function that reads a fixture by name."""
    return lambda name: load_file(GOLDEN / f"{name}.safetensors")


@pytest.fixture
def class_token(backbone: PromptableViT, images: Tensor) -> Callable[[Mapping[int, Tensor]], Tensor]:
    """Return a function that encodes the images with prefixes and returns their class tokens (8,48)."""
    return lambda prefixes: backbone.encode(images, prefixes=prefixes)[:, 0]


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    """Parameters that a module draws are as exact as the fixtures."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
