"""What every backbone offers a learner: features of a known width, and a record of where its weights come from.

Shapes: N images, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vbm_ptm.errors import UsageError

Interpolation = Literal["bicubic", "bilinear"]


@dataclass(frozen=True)
class Preprocessing:
    """How images were prepared for the weights in use.

    Attributes:
        image_size: Height and width of the network's input in pixels.
        mean: Mean of each channel, subtracted from values in [0, 1].
        std: Standard deviation of each channel, by which values are then divided.
        interpolation: Resampling filter, "bicubic" or "bilinear".
        crop_fraction: Fraction of the resized image, around its centre, that evaluation keeps.
    """

    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: Interpolation
    crop_fraction: float


@dataclass(frozen=True)
class WeightsRecord:
    """Which weights are in use, as a run records them.

    Attributes:
        requested: The name that was asked for.
        name: The full timm tag that it resolved to.
        file: The local path, the file on the Hub, the file inside this package, or "from scratch".
        sha256: Hash of the file's bytes; for random weights, hash of the tensors.
        notes: What was changed on loading, e.g. a dropped head, or how weights were drawn.
        seed: The seed of random weights.
        channels: Channels of the first stage of ``resnet18_cifar``.
    """

    requested: str
    name: str
    file: str
    sha256: str
    notes: tuple[str, ...] = ()
    seed: int | None = None
    channels: int | None = None

    @property
    def is_drawn(self) -> bool:
        """Whether they were random when training began, and nobody's pre-trained ones."""
        return self.seed is not None


def as_interpolation(name: str) -> Interpolation:
    """Return a resampling filter that the transforms support.

    Raises:
        UsageError: The weights were trained with another one.
    """
    for known in get_args(Interpolation):
        if name == known:
            return known  # type: ignore[no-any-return]
    known_names = " and ".join(get_args(Interpolation))
    raise UsageError(
        f"the weights were trained with interpolation '{name}', which is not supported; {known_names} are."
    )


def as_rgb(values: Sequence[float]) -> tuple[float, float, float]:
    """Return a statistic of the three colour channels from a timm configuration."""
    red, green, blue = values
    return red, green, blue


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Switch modules to eval mode without gradients inside the block, and then back to their own modes."""
    training = [part for module in modules for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True


class Backbone(nn.Module):
    """A network that turns images into vectors.

    Attributes:
        width: D.
        preprocessing: How images must be prepared.
        weights: Where the weights come from; None if the caller made them.
        compile_backend: What its parts are compiled with; None if they are not. Copies keep it.
    """

    width: int
    preprocessing: Preprocessing
    weights: WeightsRecord | None
    compile_backend: str | None = None

    def features(self, images: Tensor) -> Tensor:
        """Return one vector per image (N,D), with gradient, in the network's current mode."""
        raise NotImplementedError

    def feature_map(self, images: Tensor) -> Tensor:
        """Return one vector per image and position (N,D,h,w), with gradient, in the network's current mode.

        Raises:
            UsageError: The network has no such map.
        """
        raise NotImplementedError

    def compile_parts(self, *, backend: str = "inductor") -> None:
        """From now on, compute what stays the same over the tasks in compiled form; values agree up to rounding.

        Args:
            backend: Backend of ``torch.compile``.
        """
        self.compile_backend = backend

    def query(self, images: Tensor) -> Tensor:
        """Return the features (N,D), without gradient.

        They are computed in eval mode whatever the mode outside, so that dropout, drop path and batch
        statistics never change them.
        """
        with evaluating(self):
            return self.features(images)


def trains_batch_norm(module: nn.Module) -> bool:
    """Return whether a batch norm inside is trained: what an image becomes then depends on the others of its batch."""
    norms = (part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm))
    return any(parameter.requires_grad for norm in norms for parameter in norm.parameters())
