from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from vbm_ptm.backbones import (
    EMBEDDED_NAME,
    BackboneConfig,
    PromptableViT,
    list_backbones,
    load_vit,
)
from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seeded

NAME = "test_vit.r160_in1k"
REPOSITORY = Path(__file__).parents[2]
ASSETS = REPOSITORY / "vbm_ptm" / "assets"
EMBEDDED_SHA256 = "362e0d0d8e4ee22ec7549cdd66c5ec68d9dd1a94ccb063645741b0032548c2f2"


@pytest.fixture
def vit() -> VisionTransformer:
    """timm's smallest ViT for images of 32 px, with random weights and a head of 1000 classes."""
    with seeded(1):
        vit = timm.create_model(NAME, img_size=32, num_classes=1000)
        for parameter in vit.parameters():
            parameter.data.normal_(std=0.1)
    return vit


def write_google(path: Path, state: dict[str, Tensor], *, num_heads: int, prefix: str = "") -> None:
    """Write a timm state dict in the layout of Google's checkpoints."""
    arrays = {
        "cls": state["cls_token"],
        "embedding/kernel": state["patch_embed.proj.weight"].permute(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "Transformer/posembed_input/pos_embedding": state["pos_embed"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
        "pre_logits/kernel": torch.zeros(4, 4),
        "pre_logits/bias": torch.zeros(4),
    }
    width = state["cls_token"].shape[-1]
    depth = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks."))
    heads = (num_heads, width // num_heads)
    for index in range(depth):
        there, here = f"Transformer/encoderblock_{index}", f"blocks.{index}"
        for theirs, ours in (("LayerNorm_0", "norm1"), ("LayerNorm_2", "norm2")):
            arrays[f"{there}/{theirs}/scale"] = state[f"{here}.{ours}.weight"]
            arrays[f"{there}/{theirs}/bias"] = state[f"{here}.{ours}.bias"]
        attention = f"{there}/MultiHeadDotProductAttention_1"
        weights, biases = (state[f"{here}.attn.qkv.{part}"].chunk(3) for part in ("weight", "bias"))
        for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            arrays[f"{attention}/{part}/kernel"] = weight.T.reshape(width, *heads)
            arrays[f"{attention}/{part}/bias"] = bias.reshape(heads)
        arrays[f"{attention}/out/kernel"] = state[f"{here}.attn.proj.weight"].T.reshape(*heads, width)
        arrays[f"{attention}/out/bias"] = state[f"{here}.attn.proj.bias"]
        for number in (0, 1):
            dense, linear = f"{there}/MlpBlock_3/Dense_{number}", f"{here}.mlp.fc{number + 1}"
            arrays[f"{dense}/kernel"] = state[f"{linear}.weight"].T
            arrays[f"{dense}/bias"] = state[f"{linear}.bias"]
    np.savez(path, **{prefix + key: value.contiguous().numpy() for key, value in arrays.items()})


def write(path: Path, state: dict[str, Any], *, num_heads: int = 2) -> Path:
    if path.suffix == ".npz":
        write_google(path, state, num_heads=num_heads)
    elif path.suffix == ".safetensors":
        save_file({key: tensor.contiguous() for key, tensor in state.items()}, path)
    else:
        torch.save(state, path)
    return path


def assert_holds(backbone: PromptableViT, state: dict[str, Tensor]) -> None:
    own = backbone.vit.state_dict()
    assert own.keys() == {key for key in state if not key.startswith("head.")}
    for key, tensor in own.items():
        assert torch.equal(tensor, state[key]), key


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network is allowed, and the hub's cache is empty."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)


class TestLocalFile:
    @pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin", ".npz"])
    def test_load_vit__reads_every_format_and_drops_the_head(
        self,
        suffix: str,
        vit: VisionTransformer,
        tmp_path: Path,
        offline: None,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        path = write(tmp_path / f"weights{suffix}", vit.state_dict())
        with caplog.at_level(logging.INFO, logger="vbm_ptm"):
            backbone = load_vit(NAME, path)
        assert_holds(backbone, vit.state_dict())
        images = torch.randn(2, 3, 32, 32)
        torch.testing.assert_close(
            backbone.eval().encode(images), vit.eval().forward_features(images), rtol=0, atol=1e-6
        )
        record = backbone.weights
        assert record is not None
        assert (record.requested, record.name, record.file) == (NAME, NAME, str(path))
        assert record.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert any(note.startswith("classifier head dropped: ") for note in record.notes)
        assert "classifier head dropped: head" in caplog.text
        assert backbone.vit.num_classes == 0
        assert backbone.preprocessing.image_size == 32

    def test_load_vit__reads_google_files_with_the_optimizers_prefix(
        self, vit: VisionTransformer, tmp_path: Path
    ) -> None:
        path = tmp_path / "weights.npz"
        write_google(path, vit.state_dict(), num_heads=2, prefix="opt/target/")
        assert_holds(load_vit(NAME, path), vit.state_dict())

    @pytest.mark.parametrize("suffix", [".pth", ".npz"])
    def test_load_vit__keeps_nothing_of_an_all_zero_head(
        self, suffix: str, vit: VisionTransformer, tmp_path: Path
    ) -> None:
        state = vit.state_dict()
        state["head.weight"] = torch.zeros(21843, 64)
        state["head.bias"] = torch.zeros(21843)
        backbone = load_vit(NAME, write(tmp_path / f"weights{suffix}", state))
        assert not [key for key in backbone.state_dict() if "head" in key]

    def test_load_vit__reads_files_without_a_head(self, vit: VisionTransformer, tmp_path: Path) -> None:
        vit.reset_classifier(0)
        backbone = load_vit(NAME, write(tmp_path / "weights.pth", vit.state_dict()))
        assert_holds(backbone, vit.state_dict())
        assert backbone.weights is not None
        assert not any("head" in note for note in backbone.weights.notes)

    def test_load_vit__turns_half_precision_into_single(self, tmp_path: Path, vit: VisionTransformer) -> None:
        state = {key: tensor.half() for key, tensor in vit.state_dict().items()}
        backbone = load_vit(NAME, write(tmp_path / "weights.safetensors", state))
        assert {parameter.dtype for parameter in backbone.parameters()} == {torch.float32}

    @pytest.mark.parametrize("wrap", [lambda s: {"state_dict": s}, lambda s: {"model": {"state_dict": s}}])
    def test_load_vit__unwraps(
        self, wrap: Callable[[dict[str, Tensor]], Any], vit: VisionTransformer, tmp_path: Path
    ) -> None:
        path = write(tmp_path / "weights.pth", wrap(vit.state_dict()) | {"epoch": 3})
        backbone = load_vit(NAME, path)
        assert_holds(backbone, vit.state_dict())
        assert backbone.weights is not None
        assert "unwrapped from 'state_dict'" in backbone.weights.notes

    @pytest.mark.parametrize("prefix", ["module.", "model.", "backbone.", "_orig_mod.", "module._orig_mod."])
    def test_load_vit__strips_known_prefixes_and_says_so(
        self, prefix: str, vit: VisionTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        state = {prefix + key: tensor for key, tensor in vit.state_dict().items()}
        with caplog.at_level(logging.INFO, logger="vbm_ptm"):
            backbone = load_vit(NAME, write(tmp_path / "weights.pth", state))
        assert_holds(backbone, vit.state_dict())
        assert backbone.weights is not None
        assert f"prefix '{prefix}' stripped from the keys" in backbone.weights.notes
        assert f"prefix '{prefix}' stripped" in caplog.text

    def test_load_vit__finds_a_head_beside_a_prefixed_backbone(
        self, vit: VisionTransformer, tmp_path: Path
    ) -> None:
        state = {
            key if key.startswith("head.") else f"backbone.{key}": tensor
            for key, tensor in vit.state_dict().items()
        }
        assert_holds(load_vit(NAME, write(tmp_path / "weights.pth", state)), vit.state_dict())

    def test_load_vit__resamples_positions_to_another_size(
        self, vit: VisionTransformer, tmp_path: Path
    ) -> None:
        path = write(tmp_path / "weights.pth", vit.state_dict())
        backbone = load_vit(NAME, path, image_size=64)
        expected = timm.create_model(NAME, img_size=32, num_classes=1000)
        expected.load_state_dict(vit.state_dict())
        expected.set_input_size(img_size=(64, 64))
        assert torch.equal(backbone.vit.pos_embed, expected.pos_embed)
        assert backbone.num_patches == 16
        assert backbone.preprocessing.image_size == 64
        assert backbone.encode(torch.zeros(1, 3, 64, 64)).shape == (1, 17, 64)
        assert backbone.weights is not None
        assert "position embedding resampled from 32 px to 64 px" in backbone.weights.notes
        assert "made for 32 px ('test_vit.r160_in1k': 160 px)" in backbone.weights.notes

    def test_load_vit__has_the_same_hash_for_the_same_file(
        self, vit: VisionTransformer, tmp_path: Path
    ) -> None:
        path = write(tmp_path / "weights.pth", vit.state_dict())
        full, bare = load_vit(NAME, path).weights, load_vit("test_vit", path).weights
        assert full is not None
        assert bare is not None
        assert (full.name, full.sha256) == (bare.name, bare.sha256)

    @pytest.mark.slow  # of a small ViT, for want of a tiny one with this tag
    def test_preprocessing__follows_the_tag_with_a_local_file_too(self, tmp_path: Path) -> None:
        """Grey, halfway between 127 and 128: zero for in21k weights, clearly not for DINO's."""
        with seeded(0):
            in21k = timm.create_model("vit_tiny_patch16_224.augreg_in21k", num_classes=0, img_size=32)
            dino = timm.create_model("vit_small_patch16_224.dino", num_classes=0, img_size=32)
        greys = {}
        for name, model in (
            ("vit_tiny_patch16_224.augreg_in21k", in21k),
            ("vit_small_patch16_224.dino", dino),
        ):
            path = write(tmp_path / f"{name}.safetensors", model.state_dict())
            used = load_vit(name, path).preprocessing
            greys[name] = (0.5 - torch.tensor(used.mean)) / torch.tensor(used.std)
        assert greys["vit_tiny_patch16_224.augreg_in21k"].abs().max() == 0
        assert (greys["vit_small_patch16_224.dino"].abs() > 0.05).all()


class TestBrokenFile:
    def refusal(self, path: Path, name: str = NAME, image_size: int | None = None) -> str:
        with pytest.raises(UsageError) as caught:
            load_vit(name, path, image_size=image_size)
        return str(caught.value)

    def test_load_vit__refuses_a_missing_file_and_a_folder(self, tmp_path: Path) -> None:
        assert "does not exist or is not a file" in self.refusal(tmp_path / "weights.pth")
        folder = tmp_path / "folder.pth"
        folder.mkdir()
        assert "does not exist or is not a file" in self.refusal(folder)

    def test_load_vit__refuses_other_suffixes(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.ckpt"
        path.write_bytes(b"")
        assert "must be a file ending in .safetensors, .pth, .pt, .bin, .npz" in self.refusal(path)

    @pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
    @pytest.mark.parametrize("damage", ["empty", "text", "cut"])
    def test_load_vit__refuses_unreadable_files(
        self, suffix: str, damage: str, vit: VisionTransformer, tmp_path: Path
    ) -> None:
        path = write(tmp_path / f"weights{suffix}", vit.state_dict())
        whole = path.read_bytes()
        path.write_bytes({"empty": b"", "text": b"not weights", "cut": whole[: len(whole) // 2]}[damage])
        message = self.refusal(path)
        assert str(path) in message
        assert "readable" in message or "cannot be read" in message

    def test_load_vit__refuses_a_bare_array_named_npz(self, tmp_path: Path) -> None:
        path = tmp_path / "weights.npz"
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
        assert "not a readable .npz file" in self.refusal(path)

    def test_load_vit__never_unpickles_objects(self, vit: VisionTransformer, tmp_path: Path) -> None:
        path = write(tmp_path / "weights.pth", {"state_dict": vit.state_dict(), "args": PurePosixPath("a")})
        assert "cannot be read as tensors only" in self.refusal(path)

    def test_load_vit__refuses_a_whole_training_state(self, vit: VisionTransformer, tmp_path: Path) -> None:
        path = write(tmp_path / "weights.pth", {"network": vit.state_dict(), "epoch": 3})
        assert "not tensors: network, epoch. Known wrappings: state_dict_ema, model_ema" in self.refusal(path)
        path = write(tmp_path / "list.pth", [torch.zeros(1)])
        assert "holds list, not a state dict" in self.refusal(path)

    @pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".npz"])
    def test_load_vit__refuses_weights_that_are_not_finite(
        self, suffix: str, vit: VisionTransformer, tmp_path: Path
    ) -> None:
        state = vit.state_dict()
        state["blocks.1.attn.proj.bias"][5] = float("nan")
        message = self.refusal(write(tmp_path / f"weights{suffix}", state))
        assert "blocks.1.attn.proj.bias (1 of 64)" in message

    def test_load_vit__takes_a_file_whose_dropped_head_is_not_finite(
        self, vit: VisionTransformer, tmp_path: Path
    ) -> None:
        state = vit.state_dict()
        state["head.bias"][5] = float("inf")
        assert_holds(load_vit(NAME, write(tmp_path / "weights.pth", state)), state)

    def test_load_vit__refuses_unknown_prefixes(self, vit: VisionTransformer, tmp_path: Path) -> None:
        state = {f"trunk.{key}": tensor for key, tensor in vit.state_dict().items()}
        message = self.refusal(write(tmp_path / "weights.pth", state))
        assert "missing in the file: blocks.0.attn.proj.bias" in message
        assert "unknown to the model: trunk.blocks.0.attn.proj.bias" in message
        assert "more" in message

    @pytest.mark.parametrize("suffix", [".pth", ".npz"])
    def test_load_vit__refuses_a_file_with_a_block_less_or_more(
        self, suffix: str, vit: VisionTransformer, tmp_path: Path
    ) -> None:
        state = vit.state_dict()
        less = {key: tensor for key, tensor in state.items() if not key.startswith("blocks.5.")}
        more = state | {
            key.replace("blocks.5.", "blocks.6."): tensor
            for key, tensor in state.items()
            if key.startswith("blocks.5.")
        }
        message = self.refusal(write(tmp_path / f"less{suffix}", less))
        assert "missing in the file: blocks.5." in message or "5 blocks instead of 6" in message
        message = self.refusal(write(tmp_path / f"more{suffix}", more))
        assert "unknown to the model: blocks.6." in message or "7 blocks instead of 6" in message

    @pytest.mark.parametrize("suffix", [".pth", ".npz"])
    def test_load_vit__refuses_another_width_and_patch_size(self, suffix: str, tmp_path: Path) -> None:
        settings: dict[str, Any] = {
            "img_size": 32,
            "patch_size": 16,
            "embed_dim": 64,
            "depth": 6,
            "num_heads": 2,
        }
        for changes, reason in (
            ({"embed_dim": 32}, ("(1, 1, 32) instead of (1, 1, 64)", "must match")),
            ({"patch_size": 8}, ("(64, 3, 8, 8) instead of (64, 3, 16, 16)", "patch size (8, 8)")),
        ):
            state = VisionTransformer(**(settings | changes)).state_dict()
            message = self.refusal(write(tmp_path / f"weights{suffix}", state))
            assert "does not match 'test_vit.r160_in1k'; nothing was loaded" in message
            assert any(part in message for part in reason)

    def test_load_vit__refuses_npz_files_of_another_layout(
        self, vit: VisionTransformer, tmp_path: Path
    ) -> None:
        path = tmp_path / "weights.npz"
        np.savez(path, **{key: tensor.numpy() for key, tensor in vit.state_dict().items()})
        assert "does not have the layout of Google's ViT checkpoints" in self.refusal(path)
        write_google(path, vit.state_dict(), num_heads=2)
        with np.load(path) as arrays:
            kept = {key: arrays[key] for key in arrays.files}
        np.savez(path, **kept, extra=np.zeros(1))
        assert "unknown to the model: extra" in self.refusal(path)
        del kept["Transformer/encoderblock_2/LayerNorm_0/scale"]
        np.savez(path, **kept)
        assert "encoderblock_2/LayerNorm_0/scale" in self.refusal(path)

    @pytest.mark.parametrize(("size", "nearest"), [(40, "32 and 48"), (5, "16 and 32"), (-16, "16 and 32")])
    def test_load_vit__refuses_sizes_that_the_patches_do_not_tile(
        self, size: int, nearest: str, vit: VisionTransformer, tmp_path: Path
    ) -> None:
        path = write(tmp_path / "weights.pth", vit.state_dict())
        message = self.refusal(path, image_size=size)
        assert f"image_size {size} is not a multiple of the patch size 16" in message
        assert nearest in message


class TestNames:
    def test_load_vit__warns_of_a_bare_name(
        self, vit: VisionTransformer, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        path = write(tmp_path / "weights.pth", vit.state_dict())
        load_vit(NAME, path)
        assert not caplog.records
        record = load_vit("test_vit", path).weights
        assert record is not None
        assert (record.requested, record.name) == ("test_vit", NAME)
        (warning,) = caplog.records
        assert warning.levelno == logging.WARNING
        assert f"takes it for '{NAME}'" in warning.message
        assert "Write the full tag" in warning.message
        assert warning.message in record.notes

    def test_load_vit__warns_of_deprecated_names(
        self, offline: None, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
    ) -> None:
        with pytest.raises(UsageError, match=r"weights of 'vit_base_patch16_224\.augreg_in21k'"):
            load_vit("vit_base_patch16_224_in21k")
        assert "a deprecated name for 'vit_base_patch16_224.augreg_in21k': use that" in caplog.text
        with pytest.raises(UsageError, match=r"weights of 'vit_base_patch16_224\.augreg2_in21k_ft_in1k'"):
            load_vit("vit_base_patch16_224")

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("vitt_base_patch16_224", "Did you mean 'vit_base_patch16_224'?"),
            ("vit_base_patch16_224.augreg_in21", "Did you mean 'vit_base_patch16_224.augreg_in21k'?"),
            ("vit_base_patch16_224_in21k.augreg", "unknown backbone"),
            ("hf-hub:timm/vit_base_patch16_224", "unknown backbone"),
            ("", "unknown backbone"),
        ],
    )
    def test_load_vit__refuses_unknown_names(self, name: str, hint: str, offline: None) -> None:
        with pytest.raises(UsageError) as caught:
            load_vit(name)
        assert hint in str(caught.value)
        assert caught.value.advice == "backbone"

    @pytest.mark.parametrize(
        ("name", "attribute"),
        [
            ("vit_base_patch14_reg4_dinov2.lvd142m", "num_prefix_tokens=5"),
            ("vit_base_patch16_siglip_224.webli", "global_pool='map'"),
            ("resnet18.a1_in1k", "class is ResNet"),
            ("vit_base_patch16_rope_224.naver_in1k", "class is Eva"),
        ],
    )
    def test_load_vit__refuses_other_models_before_any_weights(
        self, name: str, attribute: str, offline: None
    ) -> None:
        with pytest.raises(UsageError) as caught:
            load_vit(name)
        assert attribute in str(caught.value)
        assert "hub" not in str(caught.value)

    @pytest.mark.slow
    def test_list_backbones__names_what_load_vit_accepts(self) -> None:
        names = list_backbones()
        assert names[:2] == [EMBEDDED_NAME, "resnet18_cifar"]
        assert names.count(EMBEDDED_NAME) == 1
        assert {
            "vit_base_patch16_224.augreg_in21k",
            "vit_base_patch16_224.orig_in21k",
            "vit_base_patch16_224.dino",
            "vit_base_patch16_224.mae",
            "deit3_base_patch16_224.fb_in1k",
            NAME,
        } <= set(names)
        assert not [name for name in names if "reg4" in name or "siglip" in name or "distilled" in name]


class TestHub:
    def test_load_vit__says_what_to_fetch_without_asking_the_network(self, offline: None) -> None:
        with pytest.raises(UsageError) as caught:
            load_vit("vit_base_patch16_224.augreg_in21k")
        message = str(caught.value)
        assert "HF_HUB_OFFLINE" in message
        assert "timm/vit_base_patch16_224.augreg_in21k, file model.safetensors" in message
        assert "backbone.checkpoint" in message

    def test_load_vit__asks_an_unreachable_hub_once(
        self, offline: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked = []

        def unreachable(url: str, *, timeout: float) -> None:
            asked.append((url, timeout))
            raise OSError("no route")

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
        with pytest.raises(UsageError, match=r"the hub does not answer .*no route.*backbone\.checkpoint"):
            load_vit("vit_base_patch16_224.augreg_in21k")
        ((url, timeout),) = asked
        assert url.endswith("/timm/vit_base_patch16_224.augreg_in21k/resolve/main/model.safetensors")
        assert timeout <= 10

    def test_load_vit__prefers_the_cache(
        self, vit: VisionTransformer, tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(tmp_path / "pytorch_model.bin", vit.state_dict())

        def download(repository: str, file_name: str, *, local_files_only: bool) -> str:
            assert local_files_only
            if file_name == path.name:
                return str(path)
            raise LocalEntryNotFoundError(file_name)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        backbone = load_vit(NAME)
        assert_holds(backbone, vit.state_dict())
        assert backbone.weights is not None
        assert backbone.weights.file == "timm/test_vit.r160_in1k/pytorch_model.bin"

    def test_load_vit__downloads_when_the_hub_answers(
        self, vit: VisionTransformer, tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write(tmp_path / "model.safetensors", vit.state_dict())

        def download(
            repository: str, file_name: str, *, local_files_only: bool = False, etag_timeout: float = 0
        ) -> str:
            if local_files_only:
                raise LocalEntryNotFoundError(file_name)
            return str(path)

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: None)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        assert_holds(load_vit(NAME), vit.state_dict())

        def fail(repository: str, file_name: str, **options: Any) -> str:
            raise (
                LocalEntryNotFoundError(file_name) if "local_files_only" in options else OSError("disk full")
            )

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
        with pytest.raises(UsageError, match=r"could not be fetched \(disk full\)"):
            load_vit(NAME)

    def test_load_vit__names_no_hub_where_there_is_none(self, offline: None) -> None:
        with pytest.raises(UsageError, match="timm knows no weights for it"):
            load_vit("vit_base_patch16_plus_240.untrained")


class TestEmbedded:
    def test_embedded_file__is_the_one_that_was_measured(self) -> None:
        path = ASSETS / f"{EMBEDDED_NAME}.safetensors"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == EMBEDDED_SHA256

    def test_load_vit__loads_the_embedded_model_offline(self, offline: None) -> None:
        backbone = load_vit(BackboneConfig().name)
        state = load_file(ASSETS / f"{EMBEDDED_NAME}.safetensors")
        assert_holds(backbone, {key: tensor.float() for key, tensor in state.items()})
        assert backbone.weights is not None
        assert backbone.weights.sha256 == EMBEDDED_SHA256
        assert backbone.weights.file == f"vbm_ptm/assets/{EMBEDDED_NAME}.safetensors"
        used = backbone.preprocessing
        assert (used.image_size, used.interpolation, used.crop_fraction) == (64, "bicubic", 1.0)
        assert used.mean == used.std == (0.5, 0.5, 0.5)

    @pytest.mark.slow
    def test_embedded_model__is_used_without_deprecation_warnings_of_our_own(self) -> None:
        program = (
            "import warnings; warnings.filterwarnings('error', '', DeprecationWarning, r'vbm_ptm(\\.|$)'); "
            "import torch; from vbm_ptm.backbones import EMBEDDED_NAME, list_backbones, load_vit; "
            "list_backbones(); load_vit(EMBEDDED_NAME, image_size=96).query(torch.zeros(1, 3, 96, 96))"
        )
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY, env=environment)
