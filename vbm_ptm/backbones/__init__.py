"""Pre-trained vision transformers that take prompts and adaptations: the only door to timm.

Importing this package registers the embedded model with timm.
"""

from __future__ import annotations

from vbm_ptm.backbones.adaptations import Adaptation, AdaptationConfig, build_adaptation
from vbm_ptm.backbones.embedded import EMBEDDED_NAME
from vbm_ptm.backbones.loading import BackboneConfig, build_vit, hub_facts, list_backbones, load_vit
from vbm_ptm.backbones.vit import Preprocessing, PromptableViT, WeightsRecord, evaluating

__all__ = [
    "EMBEDDED_NAME",
    "Adaptation",
    "AdaptationConfig",
    "BackboneConfig",
    "Preprocessing",
    "PromptableViT",
    "WeightsRecord",
    "build_adaptation",
    "build_vit",
    "evaluating",
    "hub_facts",
    "list_backbones",
    "load_vit",
]
