"""ResNet-18 for small images: the published sizes, shapes and initialisations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vbm_ptm.backbones.resnet import ResNet18
from vbm_ptm.randomness import seeded


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("channels", "total"), [(64, 11_173_962), (20, 1_094_750)])
def test_resnet18__has_the_published_number_of_parameters_with_ten_classes(channels: int, total: int) -> None:
    resnet = ResNet18(channels=channels)
    assert num_parameters(resnet) + num_parameters(nn.Linear(resnet.num_features, 10)) == total


@pytest.mark.parametrize("size", [32, 64])
def test_resnet18__keeps_the_size_of_the_image_up_to_the_second_stage(size: int) -> None:
    resnet = ResNet18(channels=4).eval()
    images = torch.randn(2, 3, size, size)
    assert resnet.forward_features(images).shape == (2, 32, size // 8, size // 8)
    torch.testing.assert_close(resnet(images), resnet.forward_features(images).mean((2, 3)))


def test_resnet18__zero_residual_starts_with_blocks_that_add_nothing() -> None:
    with seeded(0):
        resnet = ResNet18(channels=16, initialization="zero_residual")
    values = torch.randn(2, 16, 8, 8).relu()
    torch.testing.assert_close(resnet.stages[0](values), values)
    stem = resnet.stem.weight.detach()
    assert float(stem.std()) == pytest.approx((2 / (16 * 9)) ** 0.5, rel=0.1)  # Kaiming's, by fan-out
    with seeded(0):
        plain = ResNet18(channels=16)
    assert bool(plain.stages[0][0].norm2.weight.eq(1).all())
