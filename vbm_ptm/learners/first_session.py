"""The first session: an adaptation of the backbone that the first task trains and that is frozen from then on.

RanPAC (McDonnell et al., NeurIPS 2023) and APER (Zhou et al., IJCV 2024) close the gap between pre-training and the
data at hand in this way: a small part is trained with a cosine head on the classes of the first task, then frozen for
good, and the head is discarded.
Shapes: N images, D width, K classes of the first task.
"""

from __future__ import annotations

import copy
from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from vbm_ptm.backbones import Backbone, PromptableViT
from vbm_ptm.backbones.adaptations import Adapters, DeepTokens, ScalesAndShifts, ShallowTokens
from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.heads import CosineHead
from vbm_ptm.learners.base import ParameterGroup
from vbm_ptm.settings import Settings


class FirstSessionConfig(Settings):
    """What the first task trains.

    Attributes:
        kind: "adapter" (a bottleneck beside every MLP), "ssf" (scales and shifts after every layer), "vpt_deep" (fresh
            tokens for every block), "vpt_shallow" (tokens that pass through all blocks), "finetune" (a copy of the
            whole backbone), or "none".
        adapter_width: Width of an adapter's bottleneck.
        adapter_dropout: Dropout inside adapters. Its masks come from each rank's own generator: above 0 a step on
            several ranks is not exactly that on one.
        num_tokens: Tokens, per block or in total.
    """

    kind: Literal["none", "adapter", "ssf", "vpt_deep", "vpt_shallow", "finetune"] = "none"
    adapter_width: int = Field(default=64, ge=1)
    adapter_dropout: float = Field(default=0.0, ge=0, lt=1)
    num_tokens: int = Field(default=5, ge=1)


class FirstSession(nn.Module):
    """What the first task trains, and the cosine head that it is trained with.

    Args:
        backbone: The backbone, which stays frozen and with the learner.
        config: What to train.

    Raises:
        UsageError: The backbone takes no such part.
    """

    def __init__(self, backbone: Backbone, config: FirstSessionConfig) -> None:
        super().__init__()
        self.tuned = copy.deepcopy(backbone).requires_grad_(True) if config.kind == "finetune" else None
        self.adaptation = _adaptation(backbone, config)
        self.head: CosineHead | None = None
        self._kind, self._width = config.kind, backbone.width

    def begin(self, task: Task) -> None:
        """Make everything trainable for the first task, and nothing for others."""
        is_first = task.index == 0 and self._kind != "none"
        self.head = CosineHead(self._width, len(task.classes)) if is_first else None
        self.requires_grad_(is_first)

    def finish(self) -> None:
        """Freeze what the first task has trained, and drop its head."""
        self.head = None
        self.requires_grad_(False)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return what the current task trains: in the first one the adaptation and the head, then nothing."""
        if self.head is None:
            return []
        trained = self.tuned or self.adaptation
        assert trained is not None
        return [
            ParameterGroup("adaptation", list(trained.parameters())),
            ParameterGroup("heads", list(self.head.parameters())),
        ]

    def encode(self, backbone: Backbone, images: Tensor) -> Tensor:
        """Return the adapted features (N,D) of images (N,C,H,W), with gradient."""
        if self.adaptation is None:
            return (self.tuned or backbone).features(images)
        assert isinstance(backbone, PromptableViT)
        return backbone.encode(images, adaptation=self.adaptation())[:, 0]


def _adaptation(backbone: Backbone, config: FirstSessionConfig) -> nn.Module | None:
    if config.kind in ("none", "finetune"):
        return None
    if not isinstance(backbone, PromptableViT):
        raise UsageError(
            f"learner.first_session.kind is '{config.kind}', but a {type(backbone).__name__} takes no such parts: take "
            "'finetune' or 'none', or a vision transformer."
        )
    depth, width = backbone.depth, backbone.width
    if config.kind == "adapter":
        return Adapters(depth, width, config.adapter_width, dropout=config.adapter_dropout)
    if config.kind == "ssf":
        return ScalesAndShifts(backbone)
    if config.kind == "vpt_deep":
        return DeepTokens(depth, config.num_tokens, width)
    return ShallowTokens(config.num_tokens, width)
