"""Compiled blocks and networks against plain ones, and what is said where no compiler is found."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.backbones.adaptations import Adaptation
from vbm_ptm.backbones.blocks import BlockChange
from vbm_ptm.backbones.compiling import check_compiler, compiled, is_compilable
from vbm_ptm.errors import UsageError


def test_is_compilable__tells_functions_from_modules() -> None:
    assert is_compilable((torch.ones(1),))
    assert is_compilable((BlockChange(prefix=torch.ones(1)),))
    assert is_compilable((BlockChange(adapter=nn.Identity(), affines={"fc1": nn.Identity()}),))
    assert not is_compilable((BlockChange(adapter=lambda tokens: tokens),))
    assert not is_compilable((BlockChange(affines={"norm1": lambda tokens: tokens}),))


@pytest.mark.slow
def test_compile_parts__keeps_values_gradients_and_names_and_shares_its_graph() -> None:
    torch.manual_seed(0)
    plain = PromptableViT(VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4))
    ours = copy.deepcopy(plain)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.cache_clear()
    ours.compile_parts(backend="aot_eager")
    again = copy.deepcopy(ours)
    changes = [
        Adaptation(),
        Adaptation({1: BlockChange(prefix=torch.randn(1, 2, 5, 48), updates={"qkv": torch.randn(144, 48)})}),
    ]
    for change in changes:
        for count in (3, 2):
            images = torch.randn(count, 3, 32, 32)
            expected, got, copied = (each.encode(images, adaptation=change) for each in (plain, ours, again))
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(copied, expected)
            for values in (expected, got):
                values.square().sum().backward()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
    # Plain with this number of images, plain and changed with open sizes.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert list(ours.state_dict()) == list(plain.state_dict())


@pytest.mark.slow
def test_check_compiler__says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    for device, missing in (("cpu", "a C\\+\\+ compiler"), ("cuda", "a C compiler")):
        with pytest.raises(UsageError, match=f"trainer.compile is true, .*{missing}") as caught:
            check_compiler(device)
        assert len(caught.value.problems) == 1
