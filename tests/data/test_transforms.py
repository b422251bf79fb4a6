from __future__ import annotations

import pickle
import random
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from images import photograph
from PIL import Image
from pydantic import ValidationError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from vbm_ptm.data.transforms import TransformsConfig, build_transforms
from vbm_ptm.data.view_transforms import ViewTransforms, _without_long_ends
from vbm_ptm.randomness import seed_for, seeded

HALF = (0.5, 0.5, 0.5)
CONFIGS = {
    "default": TransformsConfig(),
    "cifar": TransformsConfig(strong="autoaugment_cifar10", brightness=63 / 255),
    "affine": TransformsConfig(strong="affine", horizontal_flip=0, crop_scale=(0.6, 1)),
    "sketch": TransformsConfig(crop="resize_then_random"),
    "randaugment": TransformsConfig(strong="randaugment", randaugment_operations=2),
    "none": TransformsConfig(strong="none"),
}


def build(config: TransformsConfig, *, image_size: int = 32, crop_fraction: float = 0.9) -> ViewTransforms:
    return build_transforms(
        config,
        image_size=image_size,
        mean=HALF,
        std=HALF,
        interpolation="bicubic",
        crop_fraction=crop_fraction,
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_build_transforms__views_are_of_8_bit_and_normalised_floats_as_input(name: str) -> None:
    transforms = build(CONFIGS[name])
    for view in (transforms.weak, transforms.strong, transforms.evaluate):
        with seeded(0):
            pixels = view(photograph())
        assert type(pixels) is Tensor
        assert pixels.dtype == torch.uint8
        values = transforms.to_input(pixels, torch.device("cpu"))
        assert values.shape == (3, 32, 32)
        assert values.dtype == torch.float32
        assert values.min() >= -1
        assert values.max() <= 1
        assert values.std() > 0.1


@pytest.mark.parametrize("name", CONFIGS)
def test_view_transforms__draw_from_torchs_cpu_generator_alone(name: str) -> None:
    transforms = build(CONFIGS[name])
    image = photograph()
    python_state, numpy_state = random.getstate(), np.random.get_state()[1].copy()
    for seed in range(20):
        with seeded(seed):
            first = transforms.weak(image), transforms.strong(image)
        random.random()
        with seeded(seed):
            again = transforms.weak(image), transforms.strong(image)
        assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    random.setstate(python_state)
    with seeded(0):
        before_python, before_numpy = random.getstate(), np.random.get_state()[1].copy()
        for _ in range(20):
            transforms.strong(image)
        assert random.getstate() == before_python
        assert np.array_equal(np.random.get_state()[1], before_numpy)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


@pytest.mark.parametrize("name", CONFIGS)
def test_view_transforms__weak_view_does_not_depend_on_strong_ones(name: str) -> None:
    transforms = build(CONFIGS[name])
    with seeded(3):
        alone = transforms.weak(photograph())
    with seeded(3):
        weak = transforms.weak(photograph())
        transforms.strong(photograph())
    assert torch.equal(weak, alone)


def test_view_transforms__strong_view_is_the_weak_one_and_more() -> None:
    transforms = build(
        TransformsConfig(strong="affine", affine_degrees=0, affine_translate=0, affine_scale=(1, 1))
    )
    with seeded(5):
        weak = transforms.weak(photograph())
    with seeded(5):
        strong = transforms.strong(photograph())
    assert torch.equal(weak, strong)
    transforms = build(CONFIGS["affine"])
    differing = 0
    for seed in range(20):
        with seeded(seed):
            weak = transforms.weak(photograph())
        with seeded(seed):
            differing += not torch.equal(weak, transforms.strong(photograph()))
    assert differing == 20


def test_view_transforms__without_a_strong_operation_every_view_is_weak() -> None:
    transforms = build(CONFIGS["none"])
    assert transforms.record.strong == "none"
    for seed in range(10):
        with seeded(seed):
            weak = transforms.weak(photograph())
        with seeded(seed):
            assert torch.equal(transforms.strong(photograph()), weak)


def test_view_transforms__randaugment_has_a_strength() -> None:
    changes = []
    for magnitude in (2, 8, 20):
        transforms = build(TransformsConfig(strong="randaugment", randaugment_magnitude=magnitude))
        change = 0.0
        for seed in range(40):
            with seeded(seed):
                weak = transforms.weak(photograph())
            with seeded(seed):
                change += float((transforms.strong(photograph()) - weak.float()).abs().mean())
        changes.append(change)
    assert changes[0] < changes[1] < changes[2]


@pytest.mark.parametrize("name", CONFIGS)
def test_strengthen__draws_on_a_device_what_loaders_draw(name: str) -> None:
    """Of the same draws; pixels differ by rounding and where they are interpolated."""
    transforms = build(CONFIGS[name])
    with seeded(1):
        weak = transforms.weak_operation(photograph())
    views = functional.pil_to_tensor(weak).expand(1, 30, -1, -1, -1)
    seeds = torch.arange(30)[None].clone()
    seeds[0, 7] = -1
    state = torch.get_rng_state()
    strong = transforms.strengthen(views, seeds)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(strong[0, 7], views[0, 7])
    assert transforms.strengthen(views, None) is views
    changed = 0
    for seed in range(30):
        with seeded(seed):
            expected = functional.pil_to_tensor(transforms.strong_operation(weak)).float()
        if seed != 7:
            assert float((strong[0, seed] - expected).abs().mean()) < 6
            changed += not torch.equal(strong[0, seed], views[0, 7])
    assert (changed > 15) is (name != "none")


def test_view_transforms__affine_stays_mild() -> None:
    square = Image.new("RGB", (64, 64))
    square.paste((255, 255, 255), (24, 24, 40, 40))
    transforms = build(
        TransformsConfig(strong="affine", horizontal_flip=0, crop_scale=(1, 1), normalization="none"),
        image_size=64,
    )
    for seed in range(50):
        with seeded(seed):
            shown = transforms.strong(square)[0] / 255
        rows, columns = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
        centre = (rows * shown).sum() / shown.sum(), (columns * shown).sum() / shown.sum()
        assert all(abs(float(place) - 31.5) <= 6.4 + 5.5 for place in centre)  # the crop may squeeze by 4/3
        assert 0.7 * 256 <= shown.sum() <= 1.35 * 256 * 1.21


def test_build_transforms__no_flip_where_digits_are_read() -> None:
    left_half = Image.new("RGB", (32, 32))
    left_half.paste((255, 255, 255), (0, 0, 16, 32))
    fields: dict[str, Any] = {"crop_scale": (1, 1), "normalization": "none"}
    for probability, expected in ((0, {True}), (1, {False}), (0.5, {True, False})):
        transforms = build(TransformsConfig(horizontal_flip=probability, **fields))
        seen = set()
        for seed in range(20):
            with seeded(seed):
                view = transforms.weak(left_half).float()
            seen.add(bool(view[..., :8].mean() > view[..., -8:].mean()))
        assert seen == expected


def test_build_transforms__brightness_changes_the_weak_view() -> None:
    grey = Image.new("RGB", (32, 32), (100, 100, 100))
    transforms = build(TransformsConfig(brightness=0.25, normalization="none"))
    means = []
    for seed in range(50):
        with seeded(seed):
            means.append(float(transforms.weak(grey).float().mean()))
    assert 74.9 < min(means) < 85
    assert 115 < max(means) < 125.1


@pytest.mark.parametrize(
    ("test_resize", "crop_fraction", "image_size", "expected"),
    [(None, 0.9, 224, 248), (None, 1.0, 224, 224), (256 / 224, 0.9, 224, 256), (1.0, 0.5, 32, 32)],
)
def test_build_transforms__evaluation_resizes_the_shorter_side_then_crops_the_centre(
    test_resize: float | None, crop_fraction: float, image_size: int, expected: int
) -> None:
    transforms = build(
        TransformsConfig(test_resize=test_resize, normalization="none"),
        image_size=image_size,
        crop_fraction=crop_fraction,
    )
    image = photograph(height=300, width=200)
    resized = image.resize((expected, int(expected * 300 / 200)), Image.Resampling.BICUBIC)
    left, top = round((resized.width - image_size) / 2), round((resized.height - image_size) / 2)
    reference = resized.crop((left, top, left + image_size, top + image_size))
    shown = transforms.evaluate(image)
    assert torch.equal(shown, torch.from_numpy(np.array(reference)).permute(2, 0, 1))
    assert torch.equal(shown, transforms.evaluate(image))


def test_build_transforms__draft_decoding_leaves_what_is_resized() -> None:
    for settings, expected in (
        ({}, None),
        ({"draft_decoding": True}, 248),
        ({"draft_decoding": True, "test_resize": 1.0}, 224),
        ({"draft_decoding": True, "crop": "resize_then_random"}, 300),
    ):
        transforms = build(TransformsConfig(**settings), image_size=224)
        assert transforms.draft_size == transforms.record.draft_size == expected


def test_build_transforms__squeezes_to_300_of_224_before_a_random_crop() -> None:
    transforms = build(
        TransformsConfig(crop="resize_then_random", horizontal_flip=0, normalization="none"), image_size=224
    )
    image = photograph(height=150, width=600)
    squeezed = np.asarray(image.resize((300, 300), Image.Resampling.BICUBIC))
    with seeded(1):
        view = transforms.weak(image).permute(1, 2, 0).numpy()
    places = [
        (top, left)
        for top in range(77)
        for left in range(77)
        if np.array_equal(squeezed[top : top + 224, left : left + 224], view)
    ]
    assert len(places) == 1


@pytest.mark.parametrize(
    ("normalization", "mean", "std"),
    [
        ("weights", HALF, HALF),
        ("cifar100", (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
        ("imagenet", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ("none", (0, 0, 0), (1, 1, 1)),
    ],
)
def test_build_transforms__normalises_as_told(
    normalization: Any, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    transforms = build(TransformsConfig(normalization=normalization))
    values = transforms.normalization(transforms.evaluate(Image.new("RGB", (40, 40), (51, 102, 204))))
    expected = [(level - m) / s for level, m, s in zip((0.2, 0.4, 0.8), mean, std, strict=True)]
    assert torch.allclose(values.mean(dim=(1, 2)), torch.tensor(expected), atol=1e-5)
    assert transforms.record.mean == mean
    assert transforms.record.normalization == normalization


@pytest.mark.parametrize("name", ["none", "imagenet", "cifar100"])
def test_normalization__of_a_batch_is_bit_for_bit_that_of_each_image_by_torchvision(name: Any) -> None:
    normalization = build(TransformsConfig(normalization=name)).normalization
    views = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(2, 3, 1, 1)
    views[1] = views[1].flip(-1)
    plain = v2.Compose(
        [
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(normalization.mean), list(normalization.std)),
        ]
    )
    values = normalization(views)
    assert values.dtype == torch.float32
    assert torch.equal(values, torch.stack([plain(view) for view in views]))
    with torch.inference_mode():
        assert torch.equal(normalization(views), values)


def test_build_transforms__interpolation_follows_the_weights_unless_set() -> None:
    assert build(TransformsConfig()).record.interpolation == "bicubic"
    assert build(TransformsConfig(interpolation="bilinear")).record.interpolation == "bilinear"
    bicubic, bilinear = (build(TransformsConfig(interpolation=mode)) for mode in ("bicubic", "bilinear"))
    assert not torch.equal(bicubic.evaluate(photograph()), bilinear.evaluate(photograph()))
    for transforms, mode in ((bicubic, "bicubic"), (bilinear, "bilinear")):
        assert mode in str(transforms.record.weak).lower()
        assert mode in str(transforms.record.evaluate).lower()


def test_view_transforms__smooth_when_shrinking() -> None:
    stripes = np.zeros((320, 320, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    values = build(TransformsConfig(test_resize=1)).evaluate(Image.fromarray(stripes))
    assert (values / 255 - 0.5).abs().max() < 0.05


@pytest.mark.parametrize(
    "image",
    [
        torch.rand(3, 32, 32) * 255,
        torch.zeros(3, 32, 32, dtype=torch.uint8),
        np.zeros((32, 32, 3), dtype=np.uint8),
        *(Image.new(mode, (32, 32)) for mode in ("L", "P", "RGBA", "CMYK", "LA", "1", "I;16", "F")),
    ],
)
def test_view_transforms__refuse_everything_but_rgb_images(image: Any) -> None:
    transforms = build(TransformsConfig())
    for view in (transforms.weak, transforms.strong, transforms.evaluate):
        with pytest.raises(TypeError, match="RGB"):
            view(image)


@pytest.mark.parametrize(
    "wrong",
    [
        {"crop_scale": (0, 1)},
        {"crop_scale": (0.5, 0.1)},
        {"crop_scale": (0.5, 1.5)},
        {"affine_scale": (1.1, 0.9)},
        {"horizontal_flip": 1.5},
        {"strong": "autoaugment"},
        {"normalization": "cifar"},
        {"test_resize": 0.5},
        {"flip": 0.5},
    ],
)
def test_transforms_config__refuses_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TransformsConfig(**wrong)


def test_transforms_config__reads_text() -> None:
    config = TransformsConfig.model_validate(
        {"crop_scale": ["0.6", "1"], "horizontal_flip": "0", "test_resize": "1.142857", "brightness": "1e-1"}
    )
    assert config.crop_scale == (0.6, 1.0)
    assert config.brightness == 0.1


class SeededViews(Dataset[Tensor]):
    """The weak and the strong view of one image, seeded by epoch, task and position."""

    def __init__(self, transforms: ViewTransforms, *, task: int, epoch: int) -> None:
        self.transforms = transforms
        self.task = task
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        with seeded(seed_for("views", seed=1, task=self.task, epoch=self.epoch, sample=index)):
            return torch.stack([self.transforms.weak(photograph()), self.transforms.strong(photograph())])


def views(*, task: int, epoch: int, num_workers: int) -> Iterator[Tensor]:
    context = "spawn" if num_workers else None
    data = SeededViews(build(TransformsConfig()), task=task, epoch=epoch)
    return iter(DataLoader(data, batch_size=None, num_workers=num_workers, multiprocessing_context=context))


def test_view_transforms__differ_over_epochs_and_tasks_and_repeat() -> None:
    runs = [
        torch.stack(list(views(task=task, epoch=epoch, num_workers=0)))
        for _ in range(2)
        for task in range(2)
        for epoch in range(3)
    ]
    first, again = torch.stack(runs[:6]), torch.stack(runs[6:])
    assert torch.equal(first, again)
    crops = first[:, :, 0].flatten(0, 1)
    assert len({crop.numpy().tobytes() for crop in crops}) == 24


@pytest.mark.slow
def test_view_transforms__are_the_same_in_spawned_workers() -> None:
    here = torch.stack(list(views(task=0, epoch=1, num_workers=0)))
    there = torch.stack(list(views(task=0, epoch=1, num_workers=2)))
    assert torch.equal(here, there)


@pytest.mark.parametrize("name", CONFIGS)
def test_view_transforms__pickle(name: str) -> None:
    transforms = build(CONFIGS[name])
    copy = pickle.loads(pickle.dumps(transforms))
    with seeded(1):
        expected = transforms.strong(photograph())
    with seeded(1):
        assert torch.equal(copy.strong(photograph()), expected)
    assert copy.record == transforms.record


@pytest.mark.parametrize("size", [(20000, 1), (1, 20000), (20001, 2)])
def test_evaluate__of_a_very_long_image_takes_its_middle_and_little_memory(size: tuple[int, int]) -> None:
    transforms = build_transforms(
        TransformsConfig(),
        image_size=224,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        interpolation="bicubic",
        crop_fraction=0.875,
    )
    values = np.zeros((size[1], size[0], 3), np.uint8)
    values[size[1] * 3 // 8 : size[1] * 5 // 8 + 1, size[0] * 3 // 8 : size[0] * 5 // 8 + 1] = 200
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    view = transforms.normalization(transforms.evaluate(Image.fromarray(values)))
    assert view.shape == (3, 224, 224)
    assert torch.allclose(view, torch.full_like(view, 200 / 255 * 2 - 1), atol=0.02)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # KiB


def test_evaluate__of_any_usual_image_is_not_cropped_before() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (10, 320, 3), dtype=np.uint8))
    assert _without_long_ends(image) is image
