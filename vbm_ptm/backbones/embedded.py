"""The embedded backbone: a small ViT whose weights ship with the package, registered with timm.

After ``import vbm_ptm.backbones``, ``timm.create_model(EMBEDDED_NAME, pretrained=True)`` works offline.
The file holds half-precision weights, with the 200-class head that they were trained with; the model is float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn

__all__ = ["EMBEDDED_NAME"]

EMBEDDED_NAME = "vit_tiny_d6_patch8_64.tiny_imagenet"
EMBEDDED_FILE = Path(__file__).parents[1] / "assets" / f"{EMBEDDED_NAME}.safetensors"

# timm's register_model reads this name from the module of the entry point.
default_cfgs = generate_default_cfgs(
    {
        EMBEDDED_NAME: {
            "file": str(EMBEDDED_FILE),
            "num_classes": 200,
            "input_size": (3, 64, 64),
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 1.0,
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "first_conv": "patch_embed.proj",
            "classifier": "head",
            "license": "research use only: trained on Tiny-ImageNet, under ImageNet's terms of access",
            "description": "trained from scratch on Tiny-ImageNet (200 ImageNet classes, 64 px)",
        }
    }
)


@register_model
def vit_tiny_d6_patch8_64(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """Build the embedded architecture: patch 8, width 192, 6 blocks, 3 heads, 64 px.

    The signature, including the open keywords, is what ``timm.create_model`` expects.
    """
    architecture = {"patch_size": 8, "embed_dim": 192, "depth": 6, "num_heads": 3}
    return build_model_with_cfg(
        VisionTransformer,
        "vit_tiny_d6_patch8_64",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        **(architecture | kwargs),
    )
