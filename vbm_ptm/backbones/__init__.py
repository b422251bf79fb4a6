"""Pre-trained vision transformers that take prompts: the only door to timm.

Importing this package registers the embedded model with timm.
"""

from __future__ import annotations

from vbm_ptm.backbones.embedded import EMBEDDED_NAME
from vbm_ptm.backbones.loading import BackboneConfig, build_vit, hub_facts, list_backbones, load_vit
from vbm_ptm.backbones.vit import Preprocessing, PromptableViT, WeightsRecord

__all__ = [
    "EMBEDDED_NAME",
    "BackboneConfig",
    "Preprocessing",
    "PromptableViT",
    "WeightsRecord",
    "build_vit",
    "hub_facts",
    "list_backbones",
    "load_vit",
]
