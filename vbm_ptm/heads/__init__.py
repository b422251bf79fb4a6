"""Classifiers on features."""

from vbm_ptm.heads.cosine import CosineHead, CosineTaskHead, GrowingCosineHead
from vbm_ptm.heads.shared import SharedHead
from vbm_ptm.heads.task_heads import TaskHead, TaskHeads

__all__ = ["CosineHead", "CosineTaskHead", "GrowingCosineHead", "SharedHead", "TaskHead", "TaskHeads"]
