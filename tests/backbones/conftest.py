"""The tiny ViT of the golden fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from vbm_ptm.backbones import PromptableViT

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def backbone() -> PromptableViT:
    """A ViT of width 48 with 6 blocks of 4 heads for images of 32 px, in float64 and eval mode."""
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=6, num_heads=4, num_classes=0)
    vit.double().load_state_dict(load_file(GOLDEN / "tiny_vit.safetensors"))
    return PromptableViT(vit.eval())


@pytest.fixture
def images() -> Tensor:
    """Eight images (8,3,32,32) in float64."""
    return load_file(GOLDEN / "plain_vit.safetensors")["images"]
