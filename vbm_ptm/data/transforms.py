"""From the settings of a data set and of weights to the transforms of a run."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator
from torchvision.transforms import v2

from vbm_ptm.data.record import TransformsRecord
from vbm_ptm.data.view_transforms import Normalization, Rgb, ViewTransforms
from vbm_ptm.settings import Settings

NORMALIZATIONS: dict[str, tuple[Rgb, Rgb]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "tiny_imagenet": ((0.4802, 0.4480, 0.3975), (0.2770, 0.2691, 0.2821)),
    "none": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
_INTERPOLATIONS = {
    "bicubic": v2.InterpolationMode.BICUBIC,
    "bilinear": v2.InterpolationMode.BILINEAR,
}
_POLICIES = {
    "autoaugment_imagenet": v2.AutoAugmentPolicy.IMAGENET,
    "autoaugment_cifar10": v2.AutoAugmentPolicy.CIFAR10,
}


class TransformsConfig(Settings):
    """How views are drawn from an image; sizes, mean and std follow the pre-trained weights.

    Attributes:
        crop: Weak view: a random resized crop; "resize_then_random": the image squeezed to a square of 300/224 of the
            size, then a random crop (as SLCA does for birds, cars and sketches); "padded": the image squeezed to the
            size, a black margin of an eighth of the size on each side, then a random crop (small images, from scratch).
        crop_scale: Fraction of the area that a random resized crop keeps.
        interpolation: For every resize; None: as the weights were trained.
        horizontal_flip: Probability of a horizontal flip.
        brightness: Largest relative change of brightness; 0 disables it.
        strong: What a strong view adds to the weak one: an AutoAugment policy, RandAugment, a mild affine map for
            images that are not photographs, or nothing (every view is a weak one).
        strong_on: Where strong views are made: by the processes that load images, or from weak views on the device of
            training, which spares the CPU what they add. Both draw from the same distribution, but not the same views,
            and pixels are interpolated a little differently.
        randaugment_operations: Number of operations that RandAugment draws for each view.
        randaugment_magnitude: Strength of each of them, from 0 to 30.
        affine_degrees: Largest rotation to either side.
        affine_translate: Largest shift, as a fraction of the size.
        affine_scale: Smallest and largest scale.
        normalization: Mean and std: those of the weights or of a data set, or none (values stay in 0..1).
        test_resize: Evaluation resizes the shorter side to this multiple of the size and crops the centre;
            None: the weights' crop fraction.
        draft_decoding: Decode JPEGs at half, a quarter or an eighth of their size if both sides remain at least as
            long as the evaluation needs. Large photographs load several times faster; small crops lose detail, and
            pixel values, and with them results, differ a little from those of a full decoding.
    """

    crop: Literal["random_resized", "resize_then_random", "padded"] = "random_resized"
    crop_scale: tuple[float, float] = (0.08, 1.0)
    interpolation: Literal["bicubic", "bilinear"] | None = None
    horizontal_flip: float = Field(default=0.5, ge=0, le=1)
    brightness: float = Field(default=0.0, ge=0)
    strong: Literal["autoaugment_imagenet", "autoaugment_cifar10", "randaugment", "affine", "none"] = (
        "autoaugment_imagenet"
    )
    strong_on: Literal["loaders", "device"] = "loaders"
    randaugment_operations: int = Field(default=1, ge=1)
    randaugment_magnitude: int = Field(default=9, ge=0, le=30)
    affine_degrees: float = Field(default=15.0, ge=0, le=180)
    affine_translate: float = Field(default=0.1, ge=0, le=1)
    affine_scale: tuple[float, float] = (0.9, 1.1)
    normalization: Literal["weights", "cifar10", "cifar100", "imagenet", "tiny_imagenet", "none"] = "weights"
    test_resize: float | None = Field(default=None, ge=1)
    draft_decoding: bool = False

    def idle(self) -> dict[str, str]:
        """Return the settings that belong to crops and strong views other than the chosen ones."""
        found = {} if self.crop == "random_resized" else {"crop_scale": "crop 'random_resized'"}
        for strong in {"affine", "randaugment"} - {self.strong}:
            own = [name for name in type(self).model_fields if name.startswith(f"{strong}_")]
            found |= dict.fromkeys(own, f"strong '{strong}'")
        return found

    @field_validator("crop_scale", "affine_scale")
    @classmethod
    def _check_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1]:
            raise ValueError("a range is given as (smallest, largest), both above 0")
        return value

    @field_validator("crop_scale")
    @classmethod
    def _check_part(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[1] > 1:
            raise ValueError("a crop keeps at most 1.0 of the area")
        return value


def build_transforms(
    config: TransformsConfig,
    *,
    image_size: int,
    mean: Rgb,
    std: Rgb,
    interpolation: Literal["bicubic", "bilinear"],
    crop_fraction: float,
) -> ViewTransforms:
    """Build the transforms of a run.

    Args:
        config: The data set's settings.
        image_size: Side of the square that the backbone takes.
        mean: The weights' mean.
        std: The weights' std.
        interpolation: The weights' interpolation.
        crop_fraction: Fraction of the resized shorter side that the weights' evaluation keeps.
    """
    resize_mode = config.interpolation or interpolation
    mode = _INTERPOLATIONS[resize_mode]
    if config.normalization != "weights":
        mean, std = NORMALIZATIONS[config.normalization]
    weak: list[v2.Transform]
    if config.crop == "random_resized":
        weak = [v2.RandomResizedCrop(image_size, scale=config.crop_scale, interpolation=mode)]
    elif config.crop == "padded":
        weak = [
            v2.Resize((image_size, image_size), interpolation=mode),
            v2.RandomCrop(image_size, padding=image_size // 8),
        ]
    else:
        side = _squeezed(image_size)
        weak = [v2.Resize((side, side), interpolation=mode), v2.RandomCrop(image_size)]
    if config.horizontal_flip:
        weak.append(v2.RandomHorizontalFlip(config.horizontal_flip))
    if config.brightness:
        weak.append(v2.ColorJitter(brightness=config.brightness))
    strong = _strong_operation(config)
    # Without test_resize, the shorter side is rounded down, as timm does.
    shorter_side = (
        int(image_size / crop_fraction)
        if config.test_resize is None
        else round(image_size * config.test_resize)
    )
    draft_size = None
    if config.draft_decoding:
        draft_size = max(shorter_side, _squeezed(image_size) if config.crop == "resize_then_random" else 0)
    unusual: dict[str, Any] = {"draft_size": draft_size} if draft_size else {}  # results tell of these alone
    if config.strong_on != "loaders":
        unusual["strong_on"] = config.strong_on
    evaluation = [v2.Resize(shorter_side, interpolation=mode), v2.CenterCrop(image_size)]
    return ViewTransforms(
        weak_operation=v2.Compose(weak),
        strong_operation=strong,
        evaluation_operation=v2.Compose(evaluation),
        normalization=Normalization(mean, std),
        record=TransformsRecord(
            image_size=image_size,
            weak=tuple(repr(operation) for operation in weak),
            strong=repr(strong) if config.strong in ("affine", "randaugment") else config.strong,
            evaluate=tuple(repr(operation) for operation in evaluation),
            interpolation=resize_mode,
            normalization=config.normalization,
            mean=mean,
            std=std,
            **unusual,
        ),
        draft_size=draft_size,
        strong_on_device=config.strong_on == "device",
    )


def _squeezed(image_size: int) -> int:
    """Return the side of the square that ``resize_then_random`` crops from."""
    return round(image_size * 300 / 224)


def _strong_operation(config: TransformsConfig) -> v2.Transform:
    if config.strong == "affine":
        return v2.RandomAffine(
            config.affine_degrees,
            translate=(config.affine_translate, config.affine_translate),
            scale=config.affine_scale,
            interpolation=v2.InterpolationMode.BILINEAR,
        )
    if config.strong == "randaugment":
        return v2.RandAugment(config.randaugment_operations, config.randaugment_magnitude)
    if config.strong == "none":
        return v2.Identity()
    return v2.AutoAugment(_POLICIES[config.strong])
