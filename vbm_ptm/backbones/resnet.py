"""ResNet-18 for small images, as continual learning from scratch uses it.

A 3x3 stem without max-pooling, four stages of two basic blocks with 1, 2, 4 and 8 times the base channels, global
average pooling (Buzzega et al., "Dark Experience for General Continual Learning", NeurIPS 2020, repository mammoth; the
same topology in Yan, Xie, He, "DER: Dynamically Expandable Representation", CVPR 2021, with ``zero_residual``).
Shapes: N images, C base channels, D = 8 C width.
"""

from __future__ import annotations

import itertools
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones.batch_norm import GlobalBatchNorm2d

Initialization = Literal["torch", "zero_residual"]

RESNET18_CIFAR = "resnet18_cifar"


class ResNet18(nn.Module):
    """The network up to its pooled features.

    Args:
        channels: C, 64 in the literature.
        initialization: "torch" for torch's defaults; "zero_residual" for Kaiming-normal convolutions (fan-out)
            and blocks that start as the identity.
    """

    def __init__(self, *, channels: int = 64, initialization: Initialization = "torch") -> None:
        super().__init__()
        self.num_features = 8 * channels
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = GlobalBatchNorm2d(channels)
        widths = [channels, channels, 2 * channels, 4 * channels, 8 * channels]
        self.stages = nn.ModuleList(
            nn.Sequential(_Block(before, after, stride=1 if stage == 0 else 2), _Block(after, after))
            for stage, (before, after) in enumerate(itertools.pairwise(widths))
        )
        if initialization == "zero_residual":
            self._start_as_identity()

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the last feature map (N,D,H/8,W/8) of images (N,3,H,W)."""
        values = F.relu(self.norm(self.stem(images)))
        for stage in self.stages:
            values = stage(values)
        return values

    def forward(self, images: Tensor) -> Tensor:
        """Return the mean (N,D) of the last feature map."""
        return self.forward_features(images).mean((2, 3))

    def _start_as_identity(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for module in self.modules():
            if isinstance(module, _Block):
                nn.init.zeros_(module.norm2.weight)


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, *, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm1 = GlobalBatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = GlobalBatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), GlobalBatchNorm2d(after)
            )

    def forward(self, values: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(values)))))
        return F.relu(residual + self.shortcut(values))
