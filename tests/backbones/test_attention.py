"""Both ways to attend, against float64 and against each other; which one is chosen where.

Shapes: N images, H heads, T tokens, d width of a head.
"""

from __future__ import annotations

import copy

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.backbones.attention import attend, prefers_fused
from vbm_ptm.randomness import seeded


def inputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("dtype", "digits"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("is_fused", [True, False])
def test_attend__is_the_softmax_average(dtype: torch.dtype, digits: float, is_fused: bool) -> None:
    """More keys than queries, as prefixes make them."""
    query, key, value = inputs((2, 3, 5, 8), (2, 3, 9, 8), (2, 3, 9, 8))
    expected = torch.einsum(
        "nhqt,nhtd->nhqd",
        (torch.einsum("nhqd,nhtd->nhqt", query.double(), key.double()) / 8**0.5).softmax(-1),
        value.double(),
    )
    attended = attend(query.to(dtype), key.to(dtype), value.to(dtype), is_fused=is_fused)
    assert attended.dtype == dtype
    torch.testing.assert_close(attended.double(), expected, atol=digits, rtol=0)


@pytest.mark.parametrize("is_fused", [True, False])
def test_attend__drops_weights(is_fused: bool) -> None:
    query, key, value = inputs((1, 1, 4, 8), (1, 1, 50, 8), (1, 1, 50, 8))
    with seeded(0):
        dropped = attend(query, key, value, is_fused=is_fused, dropout=0.5)
    assert not torch.allclose(dropped, attend(query, key, value, is_fused=is_fused), atol=1e-2)


def test_prefers_fused__by_device_dtype_and_tokens() -> None:
    short, long = torch.zeros(1, 197, 4), torch.zeros(1, 577, 4)
    assert prefers_fused(short)
    assert prefers_fused(long)
    assert not prefers_fused(short.bfloat16())
    assert prefers_fused(long.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert not prefers_fused(short)
        assert prefers_fused(long)
    assert prefers_fused(torch.zeros(1, 197, 4, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_encode__of_both_ways_is_equal_to_rounding(
    monkeypatch: pytest.MonkeyPatch, gradient_checkpointing: bool
) -> None:
    """Blocks with and without prefixes, forward and backward, in fp32."""
    with seeded(0):
        vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=0)
    images, prefix, tokens, direction = inputs((2, 3, 32, 32), (2, 2, 4, 48), (1, 3, 48), (2, 20, 48))
    results = []
    for is_fused in (True, False):
        monkeypatch.setattr(
            "vbm_ptm.backbones.blocks.prefers_fused", lambda sequence, is_fused=is_fused: is_fused
        )
        backbone = PromptableViT(copy.deepcopy(vit), gradient_checkpointing=gradient_checkpointing)
        given = prefix.clone().requires_grad_()
        encoded = backbone.encode(images, tokens=tokens, prefixes={1: given})
        assert {block.attn.fused_attn for block in (backbone.vit.blocks[0], backbone.vit.blocks[2])} == {
            is_fused
        }
        (encoded * direction).sum().backward()
        results.append([encoded.detach(), given.grad, backbone.vit.patch_embed.proj.weight.grad])
    for fused, plain in zip(*results, strict=True):
        torch.testing.assert_close(plain, fused, atol=3e-6 * float(fused.abs().max()), rtol=0)


def test_encode__in_bf16_is_as_near_to_fp32_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain products round no worse than the kernel."""
    with seeded(0):
        vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=0)
    backbone, (images,) = PromptableViT(vit), inputs((4, 3, 32, 32))
    exact = backbone.query(images)
    errors = []
    for is_fused in (True, False):
        monkeypatch.setattr(
            "vbm_ptm.backbones.blocks.prefers_fused", lambda sequence, is_fused=is_fused: is_fused
        )
        with torch.autocast("cpu", torch.bfloat16):
            errors.append(float((backbone.query(images).float() - exact).norm() / exact.norm()))
    assert max(errors) < 0.01
    assert errors[1] < 1.5 * errors[0]
