"""A timm ViT that takes prompts: tokens in the sequence, or prefixes of keys and values.

Shapes: N images, T tokens, P patches, D width, H heads, L prompt length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from timm.layers.attention import Attention
from timm.layers.patch_embed import PatchEmbed
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import PretrainedCfg
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vbm_ptm.backbones.adaptations import Adaptation
from vbm_ptm.backbones.blocks import BlockChange, changed_block, plain_block
from vbm_ptm.backbones.compiling import compiled, is_compilable
from vbm_ptm.backbones.support import Backbone, Preprocessing, WeightsRecord, as_interpolation
from vbm_ptm.errors import UsageError

# The parts of a timm block that the forward pass below knows. Any other part would be left out silently,
# so a block that has one is refused.
_BLOCK_PARTS = {"norm1", "attn", "ls1", "drop_path1", "norm2", "mlp", "ls2", "drop_path2"}
_ATTENTION_PARTS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}


class PromptableViT(Backbone):
    """An unmodified timm ViT with a forward pass that takes prompts; state-dict keys begin with ``vit.``.

    Args:
        vit: The model. It needs a class token as its only prefix token, a learned position embedding and
            timm's plain blocks; anything else is refused. A classifier head is removed.
        preprocessing: How images must be prepared; by default as the model's timm configuration says.
        weights: Where the weights come from; None if the caller made them.
        gradient_checkpointing: Keep no activations inside blocks, but recompute them in the backward pass.

    Raises:
        UsageError: The model has an attribute for which prompts are not defined.
    """

    def __init__(
        self,
        vit: nn.Module,
        *,
        preprocessing: Preprocessing | None = None,
        weights: WeightsRecord | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        problems = unsupported_attributes(vit)
        if problems:
            raise UsageError(
                *(f"this backbone cannot take prompts: {problem}" for problem in problems),
                "Take a backbone that can.",
                advice="backbone",
            )
        assert isinstance(vit, VisionTransformer)
        if vit.num_classes != 0:
            vit.reset_classifier(0)
        self.vit = vit
        self.preprocessing = preprocessing or _preprocessing_of(vit)
        self.weights = weights
        self.gradient_checkpointing = gradient_checkpointing
        self.width = vit.embed_dim
        self.depth: int = len(vit.blocks)
        first_block: Any = vit.blocks[0]
        self.num_heads: int = first_block.attn.num_heads
        self.head_width: int = self.width // self.num_heads
        self.num_patches: int = vit.patch_embed.num_patches

    @property
    def class_position(self) -> Tensor:
        """Position vector of the class token (1,1,D): zeros if the model gives it none."""
        assert self.vit.cls_token is not None
        assert self.vit.pos_embed is not None
        if self.vit.no_embed_class:
            return torch.zeros_like(self.vit.cls_token)
        return self.vit.pos_embed[:, :1]

    def encode(
        self,
        images: Tensor,
        tokens: Tensor | None = None,
        prefixes: Mapping[int, Tensor] | None = None,
        adaptation: Adaptation | None = None,
    ) -> Tensor:
        """Return all tokens (N,T,D) after the final norm; token 0 is the class token.

        Without tokens, prefixes and adaptation this is timm's own ``forward_features``.

        Args:
            images: Images (N,3,height,width).
            tokens: Prompt tokens (N or 1, L, D), inserted between the class token and the patches once the
                position embedding has been added: they carry no position. T is then 1 + L + P.
            prefixes: Block index -> (N or 1, 2, L, D), keys at [:, 0] and values at [:, 1]. They are split
                into heads and put before the block's keys and values after projection (and after the
                norm of the keys, where the block has one); queries and T are unchanged.
            adaptation: What else is changed (``vbm_ptm.backbones.adaptations``). Its tokens come after the patches.
        """
        adaptation = adaptation or Adaptation()
        sequence = self._embed(images, adaptation)
        if tokens is not None:
            _check_shape("tokens", tokens, (len(images), None, self.width))
            tokens = tokens.to(sequence.dtype).expand(len(images), -1, -1)
            sequence = torch.cat([sequence[:, :1], tokens, sequence[:, 1:]], dim=1)
        for index, prefix in (prefixes or {}).items():
            _check_shape(f"prefixes[{index}]", prefix, (len(images), 2, None, self.width))
            adaptation = adaptation | Adaptation({index: BlockChange(prefix=prefix)})
        unknown = sorted(set(adaptation.blocks) - set(range(self.depth)))
        if unknown:
            raise ValueError(
                f"prefixes or changes of blocks {unknown}, but the blocks are 0 to {self.depth - 1}"
            )
        sequence = self.vit.norm_pre(sequence)
        for index, block in enumerate(self.vit.blocks):
            if index in adaptation.blocks:
                sequence = self._apply_block(changed_block, block, sequence, adaptation.blocks[index])
            else:
                sequence = self._apply_block(plain_block, block, sequence)
        encoded: Tensor = self.vit.norm(sequence)
        return encoded if adaptation.features is None else adaptation.features(encoded)

    def features(self, images: Tensor) -> Tensor:
        """Return the class token (N,D) of the model without prompts."""
        return self.encode(images)[:, 0]

    def feature_map(self, images: Tensor) -> Tensor:
        """Return the patches (N,D,h,w) of the model without prompts, on their square grid."""
        patches = self.encode(images)[:, 1:]
        side = math.isqrt(patches.shape[1])
        maps: Tensor = patches.transpose(1, 2).unflatten(2, (side, side))
        return maps

    def _apply_block(self, function: Callable[..., Any], *inputs: Any) -> Tensor:
        """Run a block (N,T,D) -> (N,T,D), keeping its activations or not, as configured."""
        if self.compile_backend is not None and is_compilable(inputs):
            function = compiled(function, self.compile_backend)
        is_recomputed = self.gradient_checkpointing and torch.is_grad_enabled()
        output: Tensor = (
            checkpoint(function, *inputs, use_reentrant=False) if is_recomputed else function(*inputs)
        )
        return output

    def _embed(self, images: Tensor, adaptation: Adaptation) -> Tensor:
        """Return the class token and patches with their positions, then the adaptation's tokens (N,1+P+L,D)."""
        vit = self.vit
        assert vit.cls_token is not None
        assert vit.pos_embed is not None
        patches: Tensor = vit.patch_embed(images)
        positions: Tensor = vit.pos_embed
        if vit.dynamic_img_size:  # such models keep the patches on their grid (N,rows,columns,D)
            grid = patches.shape[1:3]
            if tuple(grid) != tuple(vit.patch_embed.grid_size):
                positions = resample_abs_pos_embed(
                    positions,
                    new_size=list(grid),
                    old_size=list(vit.patch_embed.grid_size),
                    num_prefix_tokens=0 if vit.no_embed_class else 1,
                )
            patches = patches.flatten(1, 2)
        if adaptation.patches is not None:
            patches = adaptation.patches(patches)
        class_token = vit.cls_token.expand(len(images), -1, -1)
        if vit.no_embed_class:
            sequence = torch.cat([class_token, patches + positions], dim=1)
        else:
            sequence = torch.cat([class_token, patches], dim=1) + positions
        embedded: Tensor = vit.pos_drop(sequence)
        if adaptation.tokens is not None:
            _check_shape("adaptation.tokens", adaptation.tokens, (len(images), None, self.width))
            tokens = adaptation.tokens.to(embedded.dtype).expand(len(images), -1, -1)
            embedded = torch.cat([embedded, tokens], dim=1)
        return embedded


def unsupported_attributes(vit: nn.Module) -> list[str]:
    """Return what keeps a model from taking prompts, one line each, which names the attribute.

    Only the configuration is looked at, so a model on the meta device will do.
    """
    # A subclass may embed, attend or pool in its own way, so the classes are compared exactly.
    if type(vit) is not VisionTransformer:
        return [f"its class is {type(vit).__name__}; needed: timm's VisionTransformer."]
    problems = []
    if vit.cls_token is None or vit.num_prefix_tokens != 1:
        class_token = "no" if vit.cls_token is None else "a"
        problems.append(
            f"num_prefix_tokens={vit.num_prefix_tokens} ({class_token} class token, {vit.num_reg_tokens} "
            "register tokens); needed: the class token and no other."
        )
    if vit.global_pool != "token":
        problems.append(f"global_pool='{vit.global_pool}'; needed: 'token', the class token as the feature.")
    if not isinstance(vit.fc_norm, nn.Identity):
        problems.append("fc_norm is in use; needed: the final norm before pooling.")
    if vit.pos_embed is None:
        problems.append("pos_embed=None; needed: a learned position embedding.")
    if not isinstance(vit.patch_drop, nn.Identity):
        problems.append("patch_drop is in use (patch_drop_rate > 0); needed: all patches.")
    if type(vit.patch_embed) is not PatchEmbed:
        problems.append(f"patch_embed is {type(vit.patch_embed).__name__}; needed: timm's PatchEmbed.")
    elif vit.patch_embed.img_size is None or len(set(vit.patch_embed.img_size)) != 1:
        problems.append(f"patch_embed.img_size={vit.patch_embed.img_size}; needed: a square image size.")
    for index, block in enumerate(vit.blocks):
        if type(block) is not Block:
            problems.append(f"blocks[{index}] is {type(block).__name__}; needed: timm's Block.")
        elif type(block.attn) is not Attention:
            problems.append(f"blocks[{index}].attn is {type(block.attn).__name__}; needed: timm's Attention.")
        else:
            parts = [name for name, _ in block.named_children() if name not in _BLOCK_PARTS]
            attention_parts = [name for name, _ in block.attn.named_children()]
            parts += [f"attn.{name}" for name in attention_parts if name not in _ATTENTION_PARTS]
            if parts:
                problems.append(f"blocks[{index}] has {', '.join(parts)}; needed: plain blocks.")
        if problems:
            break  # all blocks are alike: one line is enough
    return problems


def _preprocessing_of(vit: VisionTransformer) -> Preprocessing:
    # A model that timm's factory did not build has no configuration; timm's defaults stand in for it.
    config = asdict(PretrainedCfg()) | (getattr(vit, "pretrained_cfg", None) or {})
    return Preprocessing(
        image_size=vit.patch_embed.img_size[0],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=as_interpolation(config["interpolation"]),
        crop_fraction=float(config["crop_pct"]),
    )


def _check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise unless a tensor (N or 1, ...) has this shape; None allows any length."""
    is_right = tensor.ndim == len(shape) and tensor.shape[0] in (1, shape[0])
    if is_right:
        wanted = zip(tensor.shape[1:], shape[1:], strict=True)
        is_right = all(length is None or given == length for given, length in wanted)
    if not is_right:
        needed = ", ".join(["N or 1", *("L" if length is None else str(length) for length in shape[1:])])
        raise ValueError(f"{name} {tuple(tensor.shape)} must be ({needed}) with N={shape[0]}")
