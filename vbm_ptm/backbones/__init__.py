"""Backbones: pre-trained vision transformers that take prompts and adaptations, and other kinds of networks.

The only place that imports timm. Importing this package registers the embedded model with timm.
"""

from __future__ import annotations

from vbm_ptm.backbones.adaptations import Adaptation
from vbm_ptm.backbones.choosing import BackboneConfig, build_backbone, load_backbone
from vbm_ptm.backbones.embedded import EMBEDDED_NAME
from vbm_ptm.backbones.loading import build_vit, hub_facts, list_backbones, load_vit
from vbm_ptm.backbones.support import Backbone, Preprocessing, WeightsRecord, evaluating, trains_batch_norm
from vbm_ptm.backbones.vit import PromptableViT

__all__ = [
    "EMBEDDED_NAME",
    "Adaptation",
    "Backbone",
    "BackboneConfig",
    "Preprocessing",
    "PromptableViT",
    "WeightsRecord",
    "build_backbone",
    "build_vit",
    "evaluating",
    "hub_facts",
    "list_backbones",
    "load_backbone",
    "load_vit",
    "trains_batch_norm",
]
