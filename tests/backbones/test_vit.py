from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.layers import LayerNorm
from timm.models.vision_transformer import (
    Block,
    ParallelScalingBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.backbones import EMBEDDED_NAME, PromptableViT
from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seeded

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


def build_vit(**changes: Any) -> VisionTransformer:
    settings: dict[str, Any] = {
        "img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 0
    }  # fmt: skip
    with seeded(3):
        return VisionTransformer(**(settings | changes))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Plain softmax attention (H,T,D/H)."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    return scores.softmax(-1) @ value


class TestEncode:
    def test_encode__matches_the_golden_tokens(self, backbone: PromptableViT, images: Tensor) -> None:
        torch.testing.assert_close(backbone.encode(images), golden("plain_vit")["tokens"], rtol=0, atol=1e-8)

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"no_embed_class": True},
            {"pre_norm": True},
            {"qk_norm": True, "scale_attn_norm": True},
            {"init_values": 0.1},
            {"dynamic_img_size": True},
        ],
    )
    def test_encode__without_prompts_is_timms_own_forward(
        self, changes: dict[str, Any], images: Tensor
    ) -> None:
        vit = build_vit(**changes).double().eval()
        expected = vit.forward_features(images)
        backbone = PromptableViT(vit)
        empty = images.new_zeros(1, 2, 0, 48)
        torch.testing.assert_close(backbone.encode(images), expected, rtol=0, atol=1e-12)
        with_empty_prefixes = backbone.encode(images, prefixes={0: empty, 1: empty})
        torch.testing.assert_close(with_empty_prefixes, expected, rtol=0, atol=1e-12)

    def test_encode__resamples_positions_as_timm_does_for_dynamic_sizes(self) -> None:
        vit = build_vit(dynamic_img_size=True).double().eval()
        images = random(2, 3, 48, 40)
        expected = vit.forward_features(images)
        torch.testing.assert_close(PromptableViT(vit).encode(images), expected, rtol=0, atol=1e-12)

    def test_encode__is_timms_own_in_single_precision_and_under_autocast(self, images: Tensor) -> None:
        vit = build_vit().eval()
        backbone = PromptableViT(vit)
        images = images.float()
        torch.testing.assert_close(backbone.encode(images), vit.forward_features(images), rtol=0, atol=1e-6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(backbone.encode(images), vit.forward_features(images))
            prompted = backbone.encode(
                images, torch.randn(1, 3, 48), {0: torch.randn(1, 2, 4, 48, requires_grad=True)}
            )
        assert prompted.shape == (8, 20, 48)
        prompted.float().sum().backward()

    def test_encode__takes_prompts_in_single_precision_for_a_half_precision_model(
        self, images: Tensor
    ) -> None:
        backbone = PromptableViT(build_vit().bfloat16())
        encoded = backbone.encode(images.bfloat16(), torch.randn(1, 3, 48), {0: torch.randn(1, 2, 4, 48)})
        assert encoded.dtype == torch.bfloat16

    def test_encode__takes_an_empty_batch(self, backbone: PromptableViT, images: Tensor) -> None:
        tokens = images.new_zeros(1, 3, 48, requires_grad=True)
        prefix = images.new_zeros(1, 2, 4, 48, requires_grad=True)
        encoded = backbone.encode(images[:0], tokens, {1: prefix})
        assert encoded.shape == (0, 20, 48)
        encoded.sum().backward()
        assert prefix.grad is not None
        assert not prefix.grad.any()

    def test_encode__honours_drop_path_with_and_without_prefixes(self, images: Tensor) -> None:
        backbone = PromptableViT(build_vit(drop_path_rate=0.5).double().train())
        empty = images.new_zeros(1, 2, 0, 48)
        with seeded(5):
            plain = backbone.encode(images)
        with seeded(5):
            prefixed = backbone.encode(images, prefixes={0: empty, 1: empty})
        torch.testing.assert_close(prefixed, plain, rtol=0, atol=1e-12)
        assert not torch.allclose(plain, backbone.eval().encode(images))

    @pytest.mark.parametrize("kind", ["none", "tokens", "prefixes"])
    def test_encode__computes_activations_again_with_the_same_gradients(
        self, images: Tensor, kind: str
    ) -> None:
        vit = build_vit(drop_path_rate=0.3).double().train()
        runs: list[bool] = []
        vit.blocks[1].norm1.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
        tokens, prefix = random(1, 3, 48).requires_grad_(), random(8, 2, 3, 48).requires_grad_()
        given: dict[str, Any] = {
            "none": {},
            "tokens": {"tokens": tokens},
            "prefixes": {"prefixes": {1: prefix}},
        }[kind]
        outcomes = []
        for is_recomputed in (False, True):
            runs.clear()
            backbone = PromptableViT(vit, gradient_checkpointing=is_recomputed)
            with seeded(1):
                encoded = backbone.encode(images, **given)
            gradients = torch.autograd.grad(
                encoded.square().mean(), [*vit.parameters(), tokens, prefix], materialize_grads=True
            )
            assert runs == [True] * (1 + is_recomputed)
            outcomes.append((encoded.detach(), *gradients))
        torch.testing.assert_close(*outcomes, rtol=0, atol=1e-10)
        assert bool(outcomes[0][-2].any()) == (kind == "tokens")
        backbone.query(images)
        assert runs[2:] == [False]  # without gradient there is nothing to keep


class TestTokens:
    def test_tokens__go_after_the_class_token_and_carry_no_position(
        self, backbone: PromptableViT, images: Tensor
    ) -> None:
        vit = backbone.vit
        tokens = random(8, 10, 48)
        patches = vit.patch_embed(images) + vit.pos_embed[:, 1:]
        class_token = (vit.cls_token + vit.pos_embed[:, :1]).expand(8, -1, -1)
        expected = vit.norm(vit.blocks(torch.cat([class_token, tokens, patches], dim=1)))
        encoded = backbone.encode(images, tokens)
        assert encoded.shape == (8, 1 + 10 + 16, 48)
        torch.testing.assert_close(encoded, expected, rtol=0, atol=1e-12)

    def test_tokens__of_ten_make_207_at_the_size_of_the_paper(self) -> None:
        with torch.device("meta"):
            backbone = PromptableViT(timm.create_model("vit_base_patch16_224", num_classes=0))
            encoded = backbone.encode(torch.empty(2, 3, 224, 224), torch.empty(1, 10, 768))
        assert encoded.shape == (2, 207, 768)

    def test_tokens__of_one_for_all_are_those_of_each(self, backbone: PromptableViT, images: Tensor) -> None:
        tokens = random(1, 5, 48)
        torch.testing.assert_close(
            backbone.encode(images, tokens), backbone.encode(images, tokens.expand(8, -1, -1))
        )

    def test_class_position__is_what_the_class_token_gets(self, backbone: PromptableViT) -> None:
        assert torch.equal(backbone.class_position, backbone.vit.pos_embed[:, :1])
        assert not PromptableViT(build_vit(no_embed_class=True)).class_position.any()


class TestPrefixes:
    def test_prefix__is_attended_to_as_computed_by_hand(self) -> None:
        """One head with query (1,0), key (1,0), value (10,0) and the prefix key (0,0), value (0,4)."""
        vit = build_vit(img_size=4, patch_size=4, embed_dim=2, depth=1, num_heads=1).double()
        block = vit.blocks[0]
        block.norm1.eps, vit.norm = 0.0, nn.Identity()
        with torch.no_grad():
            for parameter in vit.parameters():
                parameter.zero_()
            vit.cls_token.copy_(torch.tensor([1.0, -1.0]))
            vit.patch_embed.proj.bias.copy_(torch.tensor([-1.0, 1.0]))
            block.norm1.weight.fill_(1.0)
            # The class token's key is (1,0); the patch's is (-1000,0), so that it gets no attention.
            block.attn.qkv.bias.copy_(torch.tensor([1.0, 0, -499.5, 0, 10, 0]))
            block.attn.qkv.weight[2, 0] = 500.5
            block.attn.proj.weight.copy_(torch.eye(2))
        prefix = torch.tensor([[[[0.0, 0.0]], [[0.0, 4.0]]]], dtype=torch.float64)
        images = torch.zeros(1, 3, 4, 4, dtype=torch.float64)
        attended = PromptableViT(vit).encode(images, prefixes={0: prefix})[0, 0] - vit.cls_token[0, 0]
        expected = torch.tensor([6.697615, 1.320954], dtype=torch.float64)
        torch.testing.assert_close(attended, expected, rtol=0, atol=1e-6)

    def test_prefix__never_mixes_images_or_keys_with_values(self, images: Tensor) -> None:
        """Encode test: filled with 100 * dual + id, image i must meet keys of its id and values of its id."""
        backbone = PromptableViT(build_vit(depth=1).double())
        ids = torch.tensor([0, 1, 2, 0])
        prefix = torch.empty(4, 2, 3, 48, dtype=torch.float64)
        for dual in range(2):
            prefix[:, dual] = (100 * dual + ids)[:, None, None]
        seen: list[tuple[Tensor, Tensor]] = []

        def record(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Tensor:
            seen.append((key, value))
            return query

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "scaled_dot_product_attention", record)
            backbone.encode(images[:4], prefixes={0: prefix})
        ((key, value),) = seen
        for image, identity in enumerate(ids.tolist()):
            assert torch.equal(key[image, :, :3], torch.full_like(key[image, :, :3], identity))
            assert torch.equal(value[image, :, :3], torch.full_like(value[image, :, :3], 100 + identity))

    def test_prefix__splits_into_heads_as_timm_splits_keys(self, images: Tensor) -> None:
        vit = build_vit(depth=1).double()
        prefix = random(8, 2, 3, 48)
        block, start = vit.blocks[0], vit.patch_embed(images)
        start = torch.cat([vit.cls_token.expand(8, -1, -1), start], dim=1) + vit.pos_embed
        projected = block.attn.qkv(block.norm1(start))
        outputs = []
        for head in range(4):
            columns = slice(12 * head, 12 * (head + 1))
            query, key, value = (part[..., columns] for part in projected.split(48, dim=-1))
            key = torch.cat([prefix[:, 0, :, columns], key], dim=1)
            value = torch.cat([prefix[:, 1, :, columns], value], dim=1)
            outputs.append(attend(query, key, value))
        middle = start + block.attn.proj(torch.cat(outputs, dim=-1))
        expected = vit.norm(middle + block.mlp(block.norm2(middle)))
        encoded = PromptableViT(vit).encode(images, prefixes={0: prefix})
        torch.testing.assert_close(encoded, expected, rtol=0, atol=1e-12)

    def test_prefix__of_an_image_does_not_depend_on_its_batch(
        self, backbone: PromptableViT, images: Tensor
    ) -> None:
        prefixes = {block: random(8, 2, 4, 48, seed=block) for block in (0, 3)}
        tokens = random(8, 2, 48, seed=9)
        together = backbone.encode(images, tokens, prefixes)
        for index in range(8):
            one = slice(index, index + 1)
            alone = backbone.encode(images[one], tokens[one], {b: p[one] for b, p in prefixes.items()})
            torch.testing.assert_close(alone, together[one], rtol=0, atol=1e-12)

    def test_prefix__comes_after_the_norm_of_keys(self, images: Tensor) -> None:
        vit = build_vit(depth=1, qk_norm=True).double()
        prefix = random(1, 2, 3, 48)
        larger = prefix * torch.tensor([2.0, 1.0], dtype=torch.float64)[:, None, None]
        backbone = PromptableViT(vit)
        plain, scaled = (backbone.encode(images, prefixes={0: p}) for p in (prefix, larger))
        assert not torch.allclose(plain, scaled)  # a norm over the prefix would take the factor out

    def test_prefixes__of_the_dualprompt_fixture(self, backbone: PromptableViT, images: Tensor) -> None:
        fixture = golden("dual_codarepo_task1")
        query = backbone.query(images)
        for split, cls in (("train", fixture["train.cls"]), ("eval", fixture["eval.cls"])):
            prefixes = {i: fixture[f"param.g_p_{i}"].reshape(1, 2, 3, 48) for i in (0, 1)}
            for i in (2, 3, 4):
                keys = fixture[f"param.e_k_{i}"]
                slots = torch.ones(8, dtype=torch.long)
                if split == "eval":
                    slots = (F.normalize(query, dim=1) @ F.normalize(keys, dim=1).T).argmax(1)
                prefixes[i] = fixture[f"param.e_p_{i}"][slots].reshape(8, 2, 4, 48)
            encoded = backbone.encode(images, prefixes=prefixes)
            torch.testing.assert_close(encoded[:, 0], cls, rtol=0, atol=1e-8)

    @pytest.mark.parametrize(("name", "num_seen"), [("coda_task0", 4), ("coda_task2", 12)])
    def test_prefixes__of_the_coda_fixtures(
        self, name: str, num_seen: int, backbone: PromptableViT, images: Tensor
    ) -> None:
        fixture = golden(name)
        query = backbone.query(images)
        prefixes = {}
        for i in range(5):
            prompts, keys, attentions = (fixture[f"param.e_{part}_{i}"][:num_seen] for part in "pka")
            weights = F.cosine_similarity(query[:, None] * attentions, keys[None], dim=2)
            prefixes[i] = torch.einsum("nk,kld->nld", weights, prompts).reshape(8, 2, 4, 48)
        encoded = backbone.encode(images, prefixes=prefixes)
        torch.testing.assert_close(encoded[:, 0], fixture["eval.cls"], rtol=0, atol=1e-8)
        torch.testing.assert_close(encoded[:, 0], fixture["train.cls"], rtol=0, atol=1e-8)

    def test_prefixes__get_gradients(self, backbone: PromptableViT, images: Tensor) -> None:
        prefix = random(1, 2, 4, 48).requires_grad_()
        backbone.requires_grad_(False)
        backbone.encode(images, prefixes={2: prefix})[:, 0].sum().backward()
        assert prefix.grad is not None
        assert (prefix.grad.abs().sum(-1) > 0).all()


class TestShapes:
    @pytest.mark.parametrize("shape", [(3, 5, 48), (8, 5, 12), (5, 48), (1, 1, 5, 48)])
    def test_tokens__of_a_wrong_shape_are_refused(
        self, shape: tuple[int, ...], backbone: PromptableViT, images: Tensor
    ) -> None:
        with pytest.raises(ValueError, match=r"tokens .* must be \(N or 1, L, 48\)"):
            backbone.encode(images, images.new_zeros(shape))

    @pytest.mark.parametrize("shape", [(3, 2, 4, 48), (2, 8, 4, 48), (8, 1, 4, 48), (8, 4, 48)])
    def test_prefix__of_a_wrong_shape_is_refused(
        self, shape: tuple[int, ...], backbone: PromptableViT, images: Tensor
    ) -> None:
        with pytest.raises(ValueError, match=r"prefixes\[1\] .* must be \(N or 1, 2, L, 48\)"):
            backbone.encode(images, prefixes={1: images.new_zeros(shape)})

    def test_prefix__of_no_block_is_refused(self, backbone: PromptableViT, images: Tensor) -> None:
        with pytest.raises(ValueError, match=r"blocks \[6\], but the blocks are 0 to 5"):
            backbone.encode(images, prefixes={6: images.new_zeros(1, 2, 4, 48)})


class TestQuery:
    def test_query__matches_the_golden_class_token(self, backbone: PromptableViT, images: Tensor) -> None:
        torch.testing.assert_close(backbone.query(images), golden("plain_vit")["cls"], rtol=0, atol=1e-8)

    def test_query__is_in_eval_mode_and_without_gradient_during_training(self, images: Tensor) -> None:
        backbone = PromptableViT(build_vit(drop_path_rate=0.3, proj_drop_rate=0.3).double())
        backbone.train()
        backbone.vit.norm.eval()
        modes = {name: module.training for name, module in backbone.named_modules()}
        first, second = backbone.query(images), backbone.query(images)
        assert torch.equal(first, second)
        assert not first.requires_grad
        assert {name: module.training for name, module in backbone.named_modules()} == modes
        torch.testing.assert_close(first, backbone.eval().encode(images)[:, 0])

    def test_query__gives_the_mode_back_after_an_error(self, backbone: PromptableViT) -> None:
        backbone.train()
        with pytest.raises(AssertionError, match="height"):
            backbone.query(torch.zeros(1, 3, 16, 16, dtype=torch.float64))
        assert all(module.training for module in backbone.modules())

    def test_query__uses_the_weights_in_training(self, backbone: PromptableViT, images: Tensor) -> None:
        before = backbone.query(images)
        with torch.no_grad():
            backbone.vit.cls_token.add_(random(1, 1, 48))
        assert not torch.allclose(backbone.query(images), before)


class GatedBlock(Block):
    """A block of a kind that is not known."""


class TestConstructor:
    def test_promptable_vit__describes_its_model(self, backbone: PromptableViT) -> None:
        described = (backbone.width, backbone.depth, backbone.num_heads, backbone.head_width)
        assert described == (48, 6, 4, 12)
        assert backbone.num_patches == 16
        assert backbone.weights is None
        assert backbone.preprocessing.image_size == 32

    def test_promptable_vit__keeps_the_models_keys_under_vit(self) -> None:
        vit = build_vit()
        expected = {f"vit.{key}": value.clone() for key, value in vit.state_dict().items()}
        state = PromptableViT(vit).state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in expected)

    def test_promptable_vit__takes_the_head_off(self, images: Tensor) -> None:
        backbone = PromptableViT(build_vit(num_classes=10))
        assert backbone.vit.num_classes == 0
        assert not [key for key in backbone.state_dict() if "head" in key]

    def test_promptable_vit__can_be_copied(self, backbone: PromptableViT, images: Tensor) -> None:
        assert torch.equal(copy.deepcopy(backbone).query(images), backbone.query(images))

    def test_preprocessing__is_the_timm_configurations(self) -> None:
        with torch.device("meta"):
            dino = PromptableViT(timm.create_model("vit_small_patch16_224.dino", img_size=64))
            augreg = PromptableViT(timm.create_model("vit_base_patch16_224.augreg_in21k"))
        assert dino.preprocessing.image_size == 64
        assert dino.preprocessing.mean == (0.485, 0.456, 0.406)
        assert dino.preprocessing.std == (0.229, 0.224, 0.225)
        assert augreg.preprocessing.mean == augreg.preprocessing.std == (0.5, 0.5, 0.5)
        assert augreg.preprocessing.interpolation == "bicubic"
        assert augreg.preprocessing.crop_fraction == 0.9

    @pytest.mark.parametrize(
        ("changes", "attribute"),
        [
            ({"reg_tokens": 4}, "num_prefix_tokens=5"),
            ({"class_token": False, "global_pool": "avg"}, "num_prefix_tokens=0"),
            ({"global_pool": "avg"}, "global_pool='avg'"),
            ({"global_pool": "map"}, "global_pool='map'"),
            ({"fc_norm": True}, "fc_norm"),
            ({"pos_embed": "none"}, "pos_embed=None"),
            ({"patch_drop_rate": 0.1}, "patch_drop"),
            ({"img_size": (32, 64)}, "patch_embed.img_size"),
            ({"block_fn": ParallelScalingBlock}, r"blocks\[0\] is ParallelScalingBlock"),
            ({"block_fn": ResPostBlock}, r"blocks\[0\] is ResPostBlock"),
            ({"block_fn": GatedBlock}, r"blocks\[0\] is GatedBlock"),
        ],
    )
    def test_promptable_vit__refuses_what_it_does_not_know(
        self, changes: dict[str, Any], attribute: str
    ) -> None:
        with pytest.raises(UsageError, match=attribute):
            PromptableViT(build_vit(**changes))

    def test_promptable_vit__refuses_unknown_parts_and_attention(self) -> None:
        gated = build_vit()
        gated.blocks[1].attn.gate = nn.Linear(48, 48)
        with pytest.raises(UsageError, match=r"blocks\[1\] has attn\.gate"):
            PromptableViT(gated)
        extra = build_vit()
        extra.blocks[0].norm3 = LayerNorm(48)
        with pytest.raises(UsageError, match=r"blocks\[0\] has norm3"):
            PromptableViT(extra)
        rotary = build_vit()
        rotary.blocks[0].attn = nn.MultiheadAttention(48, 4)
        with pytest.raises(UsageError, match=r"blocks\[0\]\.attn is MultiheadAttention"):
            PromptableViT(rotary)

    @pytest.mark.parametrize(
        "name", ["deit_tiny_distilled_patch16_224", "eva02_tiny_patch14_224", "resnet18"]
    )
    def test_promptable_vit__refuses_other_models_by_class(self, name: str) -> None:
        with torch.device("meta"):
            model = timm.create_model(name)
        with pytest.raises(UsageError, match=f"class is {type(model).__name__}; needed: timm's Vision"):
            PromptableViT(model)


def test_embedded_model__comes_from_timm_with_its_head_and_runs_offline() -> None:
    state = load_file(Path(timm.get_pretrained_cfg(EMBEDDED_NAME).file))
    model = timm.create_model(EMBEDDED_NAME, pretrained=True)
    assert model.state_dict().keys() == state.keys()
    for key, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, state[key].float()), key
    assert model.head.out_features == 200
    assert timm.create_model(EMBEDDED_NAME, pretrained=True, num_classes=7).head.out_features == 7
    larger = timm.create_model(EMBEDDED_NAME, pretrained=True, img_size=96)
    assert larger(torch.zeros(1, 3, 96, 96)).shape == (1, 200)
