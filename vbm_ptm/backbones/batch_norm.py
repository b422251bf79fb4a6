"""Batch normalisation over the images of all ranks.

torch's ``SyncBatchNorm`` runs only on GPUs, and pads. Here each rank sends its number of values, its mean and its sum
of squared deviations, which are merged exactly (Chan, Golub, LeVeque 1979), however many images it has.
Shapes: N images of this rank, C channels, M values per channel over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.errors import UsageError


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` with training statistics over the images of all ranks; on one rank it is the same."""

    def forward(self, input: Tensor) -> Tensor:
        """Return normalised values of the same shape (N,C,H,W); N may be 0 if other ranks have images."""
        return global_batch_norm(self, input)


class GlobalBatchNormAct2d(BatchNormAct2d):
    """timm's batch norm followed by an activation, with statistics over all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Return activated values of the same shape (N,C,H,W)."""
        activated: Tensor = self.act(self.drop(global_batch_norm(self, x)))
        return activated


def global_batch_norm(norm: nn.BatchNorm2d, values: Tensor) -> Tensor:
    """Normalise values (N,C,H,W) with a module's parameters and statistics, which it updates in training mode."""
    is_spread = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if not (norm.training and is_spread):
        if norm.training and values.numel() == values.shape[1]:
            raise UsageError(
                "batch norm has a single value per channel: a step of one image, whose map has shrunk to one place. "
                "Take larger images, or steps (and draws) of at least two."
            )
        return F.batch_norm(
            values,
            norm.running_mean,
            norm.running_var,
            norm.weight,
            norm.bias,
            training=norm.training,
            momentum=_count(norm),
            eps=norm.eps,
        )
    normalised, mean, variance, count = _Normalise.apply(values, norm.weight, norm.bias, norm.eps)
    momentum = _count(norm)
    if norm.running_mean is not None and norm.running_var is not None:
        with torch.no_grad():
            norm.running_mean.lerp_(mean.to(norm.running_mean), momentum)
            unbiased = variance * count / (count - 1).clamp(min=1)
            norm.running_var.lerp_(unbiased.to(norm.running_var), momentum)
    output: Tensor = normalised
    return output


def _count(norm: nn.BatchNorm2d) -> float:
    """Count the batch in training mode; return the weight of its statistics in the running averages."""
    if norm.training and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    if norm.momentum is None:
        raise ValueError("batch norm with momentum=None (a cumulative average) is not supported")
    return norm.momentum


class _Normalise(torch.autograd.Function):
    """Normalisation by the mean and variance over all ranks, forwards and backwards."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact = values.to(torch.promote_types(values.dtype, torch.float32))
        count = exact.new_tensor(values.numel() // max(values.shape[1], 1))
        axes = (0, 2, 3)
        mean = exact.sum(axes) / count.clamp(min=1)
        deviations = (exact - _wide(mean)).square().sum(axes)
        counts, means, squares = _of_all_ranks(count, mean, deviations)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (squares + counts * (means - mean).square()).sum(0) / total
        scale = torch.rsqrt(variance + eps)
        standard = (exact - _wide(mean)) * _wide(scale)
        ctx.save_for_backward(standard, weight, scale, total)
        ctx.mark_non_differentiable(mean, variance, total)
        return (standard * _wide(weight) + _wide(bias)).to(values.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        standard, weight, scale, total = ctx.saved_tensors
        gradient = gradients[0].to(standard.dtype)
        axes = (0, 2, 3)
        sums = torch.stack([gradient.sum(axes), (gradient * standard).sum(axes)])
        own = sums.clone()
        torch.distributed.all_reduce(sums)
        means = sums / total
        flow = gradient - _wide(means[0]) - standard * _wide(means[1])
        # The gradients of weight and bias are this rank's share: averaging over ranks is done for all parameters alike.
        return (flow * _wide(weight * scale)).to(gradients[0].dtype), own[1], own[0], None


def _of_all_ranks(count: Tensor, mean: Tensor, deviations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the counts (ranks,1), means (ranks,C) and sums of squared deviations (ranks,C) of all ranks."""
    own = torch.cat([count[None], mean, deviations])
    everyones = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyones, own)
    table = torch.stack(everyones)
    counts, means, squares = table.split([1, len(mean), len(mean)], dim=1)
    return counts, means, squares


def _wide(channels: Tensor) -> Tensor:
    return channels[:, None, None]


def with_global_batch_norm(module: nn.Module) -> nn.Module:
    """Replace every batch norm inside a module, keeping its tensors; return the module."""
    for name, child in module.named_children():
        if type(child) in _REPLACEMENTS:
            child.__class__ = _REPLACEMENTS[type(child)]
        elif isinstance(child, nn.modules.batchnorm._BatchNorm) and type(child) not in _REPLACEMENTS.values():
            raise TypeError(
                f"{name} is a {type(child).__name__}, whose statistics over ranks are not supported"
            )
        else:
            with_global_batch_norm(child)
    return module


_REPLACEMENTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm2d: GlobalBatchNorm2d,
    BatchNormAct2d: GlobalBatchNormAct2d,
}
