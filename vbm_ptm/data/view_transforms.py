"""From an upright RGB image to an 8-bit view (weak, strong or for evaluation), and on to the network's input.

Views are moved to the device as bytes, a quarter of the size of floats, and are normalised there.
Shapes: C channels (3), H = W = the backbone's image size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from vbm_ptm.data.record import TransformsRecord
from vbm_ptm.randomness import seeded

Rgb = tuple[float, float, float]

# Of an image, in multiples of its shorter side; evaluation looks only at the square in the middle.
_LONGEST = 32


@dataclass(frozen=True)
class Normalization:
    """From views to the input of a network: values like those that its weights were trained on.

    Attributes:
        mean: Per channel, of values in 0..1.
        std: Per channel.
    """

    mean: Rgb
    std: Rgb

    def __call__(self, views: Tensor) -> Tensor:
        """Return views (...,C,H,W) uint8 as float32, on their device; every device computes the same values."""
        values: Tensor = functional.to_dtype(views, torch.float32, scale=True)
        return values.sub_(_channels(self.mean, views.device)).div_(_channels(self.std, views.device))


@cache
def _channels(values: Rgb, device: torch.device) -> Tensor:
    """Return one value per channel (C,1,1), copied to the device only once: each copy would wait for the device."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


@dataclass(frozen=True)
class ViewTransforms:
    """The three transforms of a run; all draws come from torch's default CPU generator.

    A strong view starts with the draws of the weak one, so under one seed both show the same crop.

    Attributes:
        weak_operation: RGB image -> RGB image, the baseline's own training transform.
        strong_operation: RGB image -> RGB image, or (C,H,W) uint8 -> the same, what a strong view adds to a weak one.
        evaluation_operation: RGB image -> RGB image, without randomness.
        normalization: Views -> input of the network.
        record: What the transforms do, for the result of a run.
        draft_size: As for ``decode_image``, for the images that they take.
        strong_on_device: Whether batches of weak views come to the device, where some of them are made strong.
    """

    weak_operation: v2.Transform
    strong_operation: v2.Transform
    evaluation_operation: v2.Transform
    normalization: Normalization
    record: TransformsRecord
    draft_size: int | None = None
    strong_on_device: bool = False

    def weak(self, image: Image.Image) -> Tensor:
        """Draw a weak view, (C,H,W) uint8."""
        return _to_tensor(self.weak_operation(_rgb_image(image)))

    def strong(self, image: Image.Image) -> Tensor:
        """Draw a strong view, (C,H,W) uint8."""
        return _to_tensor(self.strong_operation(self.weak_operation(_rgb_image(image))))

    def evaluate(self, image: Image.Image) -> Tensor:
        """Return the one view that features and predictions are made from, (C,H,W) uint8."""
        return _to_tensor(self.evaluation_operation(_without_long_ends(_rgb_image(image))))

    def strengthen(self, views: Tensor, seeds: Tensor | None) -> Tensor:
        """Return views with those made strong that a loader has left weak, on their device.

        Args:
            views: (G,V,C,H,W) uint8.
            seeds: (G,V) int64 on the CPU, of what is drawn for each; -1 for views that stay, None if all do.
        """
        if seeds is None:
            return views
        strong = views.clone()
        for group, view in (seeds >= 0).nonzero().tolist():
            with seeded(int(seeds[group, view])):
                strong[group, view] = self.strong_operation(views[group, view])
        return strong

    def to_input(self, views: Tensor, device: torch.device) -> Tensor:
        """Move views (...,C,H,W) uint8 to a device, and return them normalised, float32."""
        return self.normalization(views.to(device, non_blocking=True))


def _to_tensor(image: Image.Image) -> Tensor:
    values: Tensor = functional.pil_to_tensor(image)
    return values


def _without_long_ends(image: Image.Image) -> Image.Image:
    """Return the middle of a very long image for the centre crop: enlarged as a whole it would fill memory."""
    shorter, longer = sorted(image.size)
    excess = (longer - _LONGEST * shorter) // 2
    if excess <= 0:
        return image
    left, top = (excess, 0) if image.width == longer else (0, excess)
    return image.crop((left, top, image.width - left, image.height - top))


def _rgb_image(image: Image.Image) -> Image.Image:
    """Refuse what would be augmented wrongly and silently: tensors, floats, other modes."""
    if not isinstance(image, Image.Image):
        raise TypeError(f"transforms take a PIL image of mode RGB, not a {type(image).__name__}.")
    if image.mode != "RGB":
        raise TypeError(f"transforms take a PIL image of mode RGB, not {image.mode}; use decode_image.")
    return image
