"""Adaptations against golden numbers, and against the model that they leave as it is.

Shapes: N images (3), D width (16).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from timm.layers import SwiGLUPacked
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vbm_ptm.backbones import Adaptation, PromptableViT, evaluating
from vbm_ptm.backbones.adaptations import (
    Adapters,
    ChannelAffine,
    DeepTokens,
    LowRankUpdates,
    ScalesAndShifts,
    ShallowTokens,
)
from vbm_ptm.backbones.blocks import BlockChange
from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seeded

GOLDEN = Path(__file__).parents[1] / "golden2"
KINDS = ("adapter", "ssf", "vpt_deep", "vpt_shallow", "lora")


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def tiny() -> dict[str, Tensor]:
    return load_file(GOLDEN / "tiny2_vit.safetensors")


@pytest.fixture
def backbone(tiny: dict[str, Tensor]) -> PromptableViT:
    """Two blocks of two heads for images of 16 px, in float64."""
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0)
    vit.double().load_state_dict({key[4:]: value for key, value in tiny.items() if key.startswith("vit.")})
    return PromptableViT(vit.eval()).requires_grad_(False)


def golden(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


def load(module: nn.Module, tensors: dict[str, Tensor], *names: tuple[str, str]) -> None:
    """Load parameters whose names here differ from those of the fixture."""
    state = {}
    for name in module.state_dict():
        found = name
        for ours, theirs in names:
            found = found.replace(ours, theirs)
        state[name] = tensors[found]
    module.load_state_dict(state)


def new(kind: str, backbone: PromptableViT) -> nn.Module:
    builders: dict[str, Callable[[], nn.Module]] = {
        "adapter": lambda: Adapters(backbone.depth, 16, 4),
        "ssf": lambda: ScalesAndShifts(backbone),
        "vpt_deep": lambda: DeepTokens(backbone.depth, 2, 16),
        "vpt_shallow": lambda: ShallowTokens(2, 16),
        "lora": lambda: LowRankUpdates(backbone, 2, sites=("qkv", "proj", "fc1", "fc2")),
    }
    with seeded(0):
        return builders[kind]()


def disturb(module: nn.Module) -> nn.Module:
    """Move every parameter away from where it starts."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def test_encode__without_an_adaptation_is_the_model_itself(
    backbone: PromptableViT, tiny: dict[str, Tensor]
) -> None:
    for adaptation in (None, Adaptation(), Adaptation({0: BlockChange(), 1: BlockChange()})):
        encoded = backbone.encode(tiny["images"], adaptation=adaptation)
        torch.testing.assert_close(encoded[:, 0], tiny["cls"], atol=1e-12, rtol=0)


def test_adapters__equal_the_reference(backbone: PromptableViT, tiny: dict[str, Tensor]) -> None:
    expected = golden("adapter_forward")
    adapters = Adapters(2, 16, 4, scale=expected["scale"].item())
    load(adapters, expected, ("blocks.", ""))
    cls = backbone.encode(tiny["images"], adaptation=adapters())[:, 0]
    torch.testing.assert_close(cls, expected["cls"], atol=1e-12, rtol=0)
    cls.square().sum().backward()
    for name, parameter in adapters.named_parameters():
        gradient = expected[f"grad.{name.removeprefix('blocks.')}"]
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-11, rtol=0)


def test_scales_and_shifts__equal_the_reference(backbone: PromptableViT, tiny: dict[str, Tensor]) -> None:
    expected, module = golden("ssf_forward"), ScalesAndShifts(backbone)
    load(module, expected, ("blocks.", ""), ("patches.", "patch_embed."), ("features.", "norm."))
    cls = backbone.encode(tiny["images"], adaptation=module())[:, 0]
    torch.testing.assert_close(cls, expected["cls"], atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("kind", "module"), [("shallow", ShallowTokens(2, 16)), ("deep", DeepTokens(2, 2, 16))]
)
def test_tokens__equal_the_reference(
    backbone: PromptableViT, tiny: dict[str, Tensor], kind: str, module: nn.Module
) -> None:
    expected = golden("vpt_forward")
    module.double().load_state_dict({"tokens": expected[kind]})
    encoded = backbone.encode(tiny["images"], adaptation=module())
    torch.testing.assert_close(encoded[:, 0], expected[f"cls.{kind}"], atol=1e-12, rtol=0)
    assert encoded.shape[1] == 5 + 2 * (kind == "shallow")


def test_low_rank__equals_the_reference(backbone: PromptableViT, tiny: dict[str, Tensor]) -> None:
    expected = {key[7:]: value for key, value in golden("lora_forward").items() if key.startswith("slcapp.")}
    updates = LowRankUpdates(backbone, 4, sites=("qkv", "fc1", "fc2"), factor=0.8)
    load(updates, expected, ("blocks.", ""), (".down", ".A"), (".up", ".B"))
    cls = backbone.encode(tiny["images"], adaptation=updates())[:, 0]
    torch.testing.assert_close(cls, expected["cls"], atol=1e-12, rtol=0)


def test_low_rank__matches_hand_values(backbone: PromptableViT) -> None:
    """W = I, up [1; 2], down [1, 1], factor 1/2 make [[1.5, 0.5], [1, 2]]."""
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(2))
    change = BlockChange(updates={"fc1": 0.5 * torch.tensor([[1.0], [2.0]]) @ torch.tensor([[1.0, 1.0]])})
    outputs = change.linear("fc1", layer, torch.eye(2))
    assert outputs.T.tolist() == [[1.5, 0.5], [1.0, 2.0]]


@pytest.mark.parametrize("kind", KINDS)
def test_adaptation__at_its_identity_is_the_model_itself(
    backbone: PromptableViT, tiny: dict[str, Tensor], kind: str
) -> None:
    module, keys = new(kind, backbone), list(backbone.state_dict())
    if kind == "ssf":  # starts beside the identity
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.fill_(1.0 if name.endswith("scale") else 0.0)
    plain = backbone.encode(tiny["images"])
    encoded = backbone.encode(tiny["images"], adaptation=module())
    if kind.startswith("vpt"):  # a token of zeros is still a token: it takes attention
        without = Adaptation({index: BlockChange(tokens=torch.zeros(1, 0, 16)) for index in (0, 1)})
        encoded = backbone.encode(tiny["images"], adaptation=without)
    torch.testing.assert_close(encoded, plain, atol=1e-12, rtol=0)
    assert list(backbone.state_dict()) == keys
    assert not torch.allclose(
        backbone.encode(tiny["images"], adaptation=disturb(module)())[:, 0], plain[:, 0]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_adaptation__gradients_are_the_same_when_activations_are_computed_again(
    backbone: PromptableViT, tiny: dict[str, Tensor], kind: str
) -> None:
    module = disturb(new(kind, backbone))
    gradients = []
    for is_recomputed in (False, True):
        backbone.gradient_checkpointing = is_recomputed
        module.zero_grad()
        backbone.encode(tiny["images"], adaptation=module())[:, 0].square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    assert all(bool(gradient.any()) for gradient in gradients[0])
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_adaptation__does_not_depend_on_the_other_images(
    backbone: PromptableViT, tiny: dict[str, Tensor], kind: str
) -> None:
    module = disturb(new(kind, backbone))
    whole = backbone.encode(tiny["images"], adaptation=module())
    for row in range(3):
        alone = backbone.encode(tiny["images"][row : row + 1], adaptation=module())
        torch.testing.assert_close(alone[0], whole[row], atol=1e-12, rtol=0)
    assert backbone.encode(tiny["images"][:0], adaptation=module()).shape == (0, *whole.shape[1:])


def test_adaptation__parts_add_up_beside_a_prefix(backbone: PromptableViT, tiny: dict[str, Tensor]) -> None:
    """Each part shows in the sum of all, whatever their order."""
    modules = {kind: disturb(new(kind, backbone)) for kind in ("adapter", "ssf", "vpt_deep", "lora")}
    prefixes = {1: torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(3))}

    def encode(*kinds: str, **more: dict[int, Tensor]) -> Tensor:
        adaptation = Adaptation()
        for kind in kinds:
            adaptation = adaptation | modules[kind]()
        return backbone.encode(tiny["images"], adaptation=adaptation, **more)[:, 0]

    everything = encode(*modules, prefixes=prefixes)
    torch.testing.assert_close(everything, encode(*reversed(modules), prefixes=prefixes), atol=1e-12, rtol=0)
    assert not torch.allclose(everything, encode(*modules))
    for kind in modules:
        assert not torch.allclose(everything, encode(*(set(modules) - {kind}), prefixes=prefixes))


def test_adaptation__refuses_two_changes_of_one_part(backbone: PromptableViT) -> None:
    adapters, updates = new("adapter", backbone)(), new("lora", backbone)()
    with pytest.raises(ValueError, match="adapter"):
        adapters | adapters
    with pytest.raises(ValueError, match="updates of fc1, fc2, proj, qkv"):
        updates | updates
    tokens = ShallowTokens(2, 16)()
    with pytest.raises(ValueError, match="tokens"):
        tokens | tokens


def test_encode__refuses_changes_of_blocks_that_are_not_there(
    backbone: PromptableViT, tiny: dict[str, Tensor]
) -> None:
    with pytest.raises(ValueError, match=r"blocks \[2\].* 0 to 1"):
        backbone.encode(tiny["images"], adaptation=Adaptation({2: BlockChange()}))


def test_scales_and_shifts__follow_the_weights_when_merged(
    backbone: PromptableViT, tiny: dict[str, Tensor]
) -> None:
    """A scale and a shift after a layer are a weight and a bias of it."""
    module, merged = new("ssf", backbone), copy.deepcopy(backbone)
    with torch.no_grad():
        for block, affines in zip(merged.vit.blocks, module.blocks, strict=True):
            layers = {
                "norm1": block.norm1,
                "norm2": block.norm2,
                "qkv": block.attn.qkv,
                "proj": block.attn.proj,
            }
            for site, layer in (layers | {"fc1": block.mlp.fc1, "fc2": block.mlp.fc2}).items():
                scale, shift = affines[site].scale, affines[site].shift
                layer.weight.mul_(scale[:, None] if layer.weight.ndim == 2 else scale)
                layer.bias.mul_(scale).add_(shift)
        merged.vit.norm.weight.mul_(module.features.scale)
        merged.vit.norm.bias.mul_(module.features.scale).add_(module.features.shift)
        merged.vit.patch_embed.proj.weight.mul_(module.patches.scale[:, None, None, None])
        merged.vit.patch_embed.proj.bias.mul_(module.patches.scale).add_(module.patches.shift)
    torch.testing.assert_close(
        backbone.encode(tiny["images"], adaptation=module()),
        merged.encode(tiny["images"]),
        atol=1e-10,
        rtol=0,
    )


def test_adapter__starts_as_the_references_do() -> None:
    with seeded(0):
        adapters = Adapters(12, 768, 64)
    assert sum(parameter.numel() for parameter in adapters.parameters()) == 1_189_632
    first = adapters.blocks[0]
    assert first.scale == 0.1
    assert not any(bool(zero.any()) for zero in (first.up.weight, first.up.bias, first.down.bias))
    assert 0.99 / 768**0.5 < first.down.weight.abs().max() <= 1 / 768**0.5
    with seeded(0):
        affine = ChannelAffine(20_000)
    assert affine.scale.mean().item() == pytest.approx(1, abs=1e-3)
    assert affine.scale.std().item() == pytest.approx(0.02, rel=0.03)
    assert affine.shift.std().item() == pytest.approx(0.02, rel=0.03)


def test_evaluating__switches_dropout_off_and_on_again() -> None:
    adapters = Adapters(1, 16, 4, dropout=0.5).train()
    adapters.blocks[0].up.requires_grad_(False)
    adapters.blocks[0].down.eval()
    modes = [module.training for module in adapters.modules()]
    with evaluating(adapters):
        assert not any(module.training for module in adapters.modules())
        assert not torch.is_grad_enabled()
    assert [module.training for module in adapters.modules()] == modes
    with pytest.raises(RuntimeError), evaluating(adapters):
        raise RuntimeError
    assert [module.training for module in adapters.modules()] == modes


@pytest.mark.parametrize("kind", ["ssf", "lora"])
def test_adaptation__refuses_layers_that_it_does_not_know(kind: str) -> None:
    vit = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=0, mlp_layer=SwiGLUPacked
    )
    with pytest.raises(UsageError, match=r"SwiGLU|GluMlp"):
        new(kind, PromptableViT(vit))


def test_adapters__compute_in_the_precision_of_autocast(tiny: dict[str, Tensor]) -> None:
    vit = VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0
    ).float()
    backbone = PromptableViT(vit.eval())
    for kind in KINDS:
        module = disturb(new(kind, backbone)).float()
        exact = backbone.encode(tiny["images"].float(), adaptation=module())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = backbone.encode(tiny["images"].float(), adaptation=module())
        torch.testing.assert_close(rounded.float(), exact, atol=0.15, rtol=0.1)
