"""Which backbone a configuration gets: a ViT, ResNet-18, or any network of timm; from a file, a tag or scratch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch

from vbm_ptm.backbones import (
    Backbone,
    BackboneConfig,
    PromptableViT,
    build_backbone,
    load_backbone,
    trains_batch_norm,
)
from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seeded


def load(name: str, *, kind: type[Backbone] = Backbone, seed: int = 1, **settings: Any) -> Backbone:
    return load_backbone(
        BackboneConfig(name=name, **settings), kind=kind, needed_by="learner 'l2p'", seed=seed
    )


@pytest.fixture(scope="module", name="cnn_file")
def weights_of_a_small_cnn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "test_resnet.safetensors"
    with seeded(0):
        network = timm.create_model("test_resnet", num_classes=7)
    safetensors.torch.save_file(network.state_dict(), file)
    return file


def test_load_backbone__draws_resnet18_by_the_seed_and_says_so() -> None:
    one, same, other = (load("resnet18_cifar", channels=4, seed=seed) for seed in (1, 1, 2))
    assert one.weights is not None
    assert other.weights is not None
    assert (one.weights.file, one.weights.seed, one.weights.channels) == ("from scratch", 1, 4)
    assert one.weights == same.weights
    assert one.weights.sha256 != other.weights.sha256
    assert all(torch.equal(tensor, same.state_dict()[key]) for key, tensor in one.state_dict().items())
    assert (one.width, one.preprocessing.image_size, trains_batch_norm(one)) == (32, 32, True)
    assert one.features(torch.randn(2, 3, 32, 32)).shape == (2, 32)


def test_load_backbone__query_neither_draws_gradients_nor_moves_running_statistics() -> None:
    backbone = load("resnet18_cifar", channels=4).train()
    before = {name: tensor.clone() for name, tensor in backbone.named_buffers()}
    images = torch.randn(3, 3, 32, 32)
    together = backbone.query(images)
    alone = torch.cat([backbone.query(image[None]) for image in images])
    torch.testing.assert_close(together, alone)
    assert not together.requires_grad
    assert all(module.training for module in backbone.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.named_buffers())
    backbone.features(images)
    assert not torch.equal(
        backbone.state_dict()["network.norm.running_mean"], before["network.norm.running_mean"]
    )


def test_load_backbone__takes_any_timm_cnn_from_a_file(cnn_file: Path) -> None:
    backbone = load("test_resnet.r160_in1k", checkpoint=cnn_file, image_size=64)
    assert backbone.weights is not None
    assert backbone.weights.notes == ("classifier head dropped: fc.bias, fc.weight",)
    images = torch.randn(2, 3, 64, 64)
    reference = timm.create_model("test_resnet", num_classes=7)
    reference.load_state_dict(safetensors.torch.load_file(cnn_file))
    expected = reference.eval().forward_head(reference.forward_features(images), pre_logits=True)
    torch.testing.assert_close(backbone.query(images), expected)
    assert backbone.width == expected.shape[1]


def test_load_backbone__takes_timm_models_from_scratch() -> None:
    for name, is_vit in (("test_resnet.r160_in1k", False), ("test_vit.r160_in1k", True)):
        backbone = load(name, from_scratch=True, image_size=32, seed=5)
        assert backbone.weights is not None
        assert (backbone.weights.file, backbone.weights.seed) == ("from scratch", 5)
        assert isinstance(backbone, PromptableViT) == is_vit
        assert backbone.query(torch.randn(1, 3, 32, 32)).shape == (1, backbone.width)


def test_feature_map__has_the_width_of_the_features_and_their_mean() -> None:
    images = torch.randn(2, 3, 32, 32)
    for name, side in (("resnet18_cifar", 4), ("test_resnet.r160_in1k", 1)):
        backbone = load(name, **({} if name == "resnet18_cifar" else {"from_scratch": True}), image_size=32)
        maps = backbone.eval().feature_map(images)
        assert maps.shape == (2, backbone.width, side, side)
        torch.testing.assert_close(maps.mean((2, 3)), backbone.features(images))
    vit = load("test_vit.r160_in1k", from_scratch=True, image_size=32).eval()
    maps = vit.feature_map(images)
    assert maps.shape == (2, vit.width, 2, 2)
    torch.testing.assert_close(maps[:, :, 1, 0], vit.encode(images)[:, 3])
    with pytest.raises(UsageError, match="needed: a map of 1024 channels"):
        load("mobilenetv3_small_050.lamb_in1k", from_scratch=True, image_size=32).eval().feature_map(images)


def test_load_backbone__of_a_classifier_after_pooling_has_its_true_width() -> None:
    backbone = load("mobilenetv3_small_050.lamb_in1k", from_scratch=True, image_size=32)
    assert backbone.query(torch.randn(1, 3, 32, 32)).shape == (1, backbone.width)


@pytest.mark.parametrize(
    ("name", "what"), [("resnet18_cifar", "resnet18_cifar"), ("test_resnet.r160_in1k", "ResNet")]
)
def test_load_backbone__refuses_networks_without_tokens_to_prompt_learners(name: str, what: str) -> None:
    with pytest.raises(UsageError, match=rf"{what}.*not a vision transformer.*learner 'l2p' needs.*finetune"):
        load(name, kind=PromptableViT)


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("resnet18_cifar", {"gradient_checkpointing": True}, "backbone.gradient_checkpointing"),
        ("resnet18_cifar", {"from_scratch": True}, "backbone.from_scratch"),
        ("test_resnet.r160_in1k", {"channels": 8}, "backbone.channels"),
        ("test_vit.r160_in1k", {"initialization": "zero_residual"}, "backbone.initialization"),
        ("test_resnet.r160_in1k", {"gradient_checkpointing": True}, "backbone.gradient_checkpointing"),
        ("test_vit.r160_in1k", {"from_scratch": True, "checkpoint": "a.safetensors"}, "exclude each other"),
    ],
)
def test_load_backbone__refuses_settings_that_would_be_ignored(
    name: str, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(UsageError, match=named):
        load(name, **settings)


@pytest.mark.parametrize("kind", [PromptableViT, Backbone])
def test_load_backbone__refuses_sizes_that_the_patches_of_a_vit_from_scratch_do_not_tile(
    kind: type[Backbone],
) -> None:
    with pytest.raises(UsageError, match=r"image_size 40 is not a multiple of the patch size 16.*32 and 48"):
        load("test_vit.r160_in1k", kind=kind, from_scratch=True, image_size=40)


def test_build_backbone__rebuilds_what_was_recorded(cnn_file: Path) -> None:
    for backbone in (
        load("resnet18_cifar", channels=4),
        load("test_resnet.r160_in1k", checkpoint=cnn_file, image_size=64),
        load("test_vit.r160_in1k", from_scratch=True, image_size=32),
    ):
        assert backbone.weights is not None
        rebuilt = build_backbone(backbone.weights, preprocessing=backbone.preprocessing)
        rebuilt.load_state_dict(backbone.state_dict())
        size = backbone.preprocessing.image_size
        images = torch.randn(1, 3, size, size)
        assert torch.equal(rebuilt.query(images), backbone.query(images))
        assert (type(rebuilt), rebuilt.width) == (type(backbone), backbone.width)
