"""Classifier alignment: Gaussians of the classes seen, and heads trained on draws from all of them.

Stage 2 of SLCA (Zhang et al., ICCV 2023, section 3.3), apart from the learner: which heads are trained, under which
loss, and how a draw is scaled by the age of its class is decided by the method.
Shapes: n images, D width, M Gaussians (one per class, or per class and domain), K columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn

from vbm_ptm.class_statistics import diagonal_factor, draw, gaussian_factor, pooled_factor
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner, LearnerConfig

Covariance = Literal["full", "diagonal", "shared"]


class AlignmentConfig(LearnerConfig):
    """Settings of alignment, for the configuration class of a method to inherit.

    Attributes:
        alignment_epochs: Epochs of classifier alignment after each task except the first; 0 disables it.
        alignment_samples_per_class: Draws from each class's Gaussian per epoch; also the batch size.
        alignment_learning_rate: Rate at the first alignment epoch, annealed by a cosine per epoch.
        alignment_momentum: Momentum of alignment's SGD.
        alignment_weight_decay: Weight decay of alignment's SGD.
    """

    alignment_epochs: int = Field(default=5, ge=0)
    alignment_samples_per_class: int = Field(default=256, ge=1)
    alignment_learning_rate: float = Field(default=0.01, gt=0)
    alignment_momentum: float = Field(default=0.9, ge=0, lt=1)
    alignment_weight_decay: float = Field(default=5e-4, ge=0)


def notes_on_normalization(task: Task, *, remedy: str) -> list[str]:
    """Warn of logit normalisation with a single logit per task, whose length is its absolute value.

    Measured on 12 tasks of one class (6 images each, small ViT): SLCA ends with 33 % and 8 classes at 0 %, without it
    100 %; SLCA++ with 33 % and 8 classes at 0 %, at a temperature of 1 100 %.
    """
    if len(task.new_classes) != 1:
        return []
    return [
        f"task {task.index + 1} adds one class: logit normalisation, which is made for tasks of several, may push "
        f"whole classes to 0 %; {remedy}"
    ]


class Gaussians(NamedTuple):
    """The Gaussians to draw from.

    Attributes:
        means: (M,D).
        factors: M factors of covariances, as ``class_statistics.draw`` takes them.
        classes: (M,) int64 class indices.
        ages: (M,) int64, tasks that came after the one that the Gaussian was made in.
    """

    means: Tensor
    factors: list[Tensor]
    classes: Tensor
    ages: Tensor


def class_gaussians(
    values: Tensor, labels: Tensor, classes: Sequence[int], *, covariance: Covariance = "full"
) -> dict[str, Tensor]:
    """Return what a task has to keep of its features (n,D) with labels (n,): ``mean_K`` (D,) and ``factor_K``.

    Args:
        values: Features; statistics are computed in float64 and returned in the features' dtype.
        labels: Class indices.
        classes: The classes to model, each with at least one image.
        covariance: "full" or "diagonal" for each class, or one "shared" by all, then named ``factor``.
    """
    tensors: dict[str, Tensor] = {}
    gaussian = diagonal_factor if covariance == "diagonal" else gaussian_factor
    for class_index in classes:
        own = values[labels == class_index].double()
        if covariance == "shared":
            tensors[f"mean_{class_index}"] = own.mean(dim=0)
        else:
            tensors[f"mean_{class_index}"], tensors[f"factor_{class_index}"] = gaussian(own)
    if covariance == "shared":
        tensors["factor"] = pooled_factor(values, labels)
    return {name: tensor.to(values.dtype) for name, tensor in tensors.items()}


def gaussians_size(class_sizes: Sequence[int], width: int, *, covariance: Covariance = "full") -> int:
    """Return how many numbers ``class_gaussians`` keeps of classes with these numbers of images."""
    if covariance == "diagonal":
        return 2 * width * len(class_sizes)
    if covariance == "shared":
        return width * (len(class_sizes) + min(sum(class_sizes) - len(class_sizes), width))
    return sum(width * (1 + min(max(count - 1, 0), width)) for count in class_sizes)


def gaussians_of(learner: Learner) -> Gaussians:
    """Return what ``class_gaussians`` stored in the statistics of the learner's tasks, in their order.

    Where tasks have left a ``transport`` (D,D), the Gaussians of those before them have moved with it.
    """
    found: list[tuple[Tensor, Tensor, int, int]] = []
    moved: Tensor | None = None  # the product (D,D) of the maps that later tasks have left
    for age, task in enumerate(reversed(learner.tasks)):
        kept = learner.statistics_of(task)
        for class_index in reversed(task.classes):
            own = f"factor_{class_index}"
            mean, factor = kept[f"mean_{class_index}"], kept[own if own in kept else "factor"]
            if moved is not None:
                mean, factor = mean @ moved, factor @ moved
            found.append((mean, factor, class_index, age))
        if (transport := kept.get("transport")) is not None:
            moved = transport if moved is None else transport @ moved
    means, factors, classes, ages = zip(*reversed(found), strict=True)
    numbers = torch.tensor([classes, ages], device=means[0].device)
    return Gaussians(torch.stack(means), list(factors), numbers[0], numbers[1])


def align(
    heads: nn.Module,
    gaussians: Gaussians,
    config: AlignmentConfig,
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    mean_scales: Tensor | None = None,
    draw_scales: Callable[[torch.Generator], Tensor] | None = None,
) -> None:
    """Train all parameters of the heads on draws from the Gaussians; afterwards none requires a gradient.

    Each epoch makes new draws, the same number for every Gaussian, and visits them in random order. Random numbers
    come from a generator on the heads' device that the global one seeds.

    Args:
        heads: Features (N,D) -> logits (N,K).
        gaussians: Where the draws come from.
        config: Epochs, draws and SGD.
        loss: Logits (N,K) and class indices (N,) -> scalar.
        mean_scales: (M,) factors on the means alone (SLCA); 1 without them.
        draw_scales: Generator -> factors on whole draws (SLCA++), of a shape that broadcasts with
            (M, alignment_samples_per_class); drawn anew in every epoch.
    """
    count = config.alignment_samples_per_class
    device = next(heads.parameters()).device
    generator = torch.Generator(device).manual_seed(int(torch.randint(2**62, ())))
    labels = gaussians.classes.repeat_interleave(count)
    heads.requires_grad_(True)
    optimizer = torch.optim.SGD(
        heads.parameters(), momentum=config.alignment_momentum, weight_decay=config.alignment_weight_decay
    )
    features = gaussians.means.new_empty(len(gaussians.means), count, gaussians.means.shape[1])
    for epoch in range(config.alignment_epochs):
        annealing = (1 + math.cos(math.pi * epoch / config.alignment_epochs)) / 2
        for group in optimizer.param_groups:
            group["lr"] = config.alignment_learning_rate * annealing
        draw(gaussians.means, gaussians.factors, out=features, mean_scales=mean_scales, generator=generator)
        if draw_scales is not None:
            features *= draw_scales(generator).to(features)[..., None]
        rows = features.flatten(0, 1)
        for batch in torch.randperm(len(rows), generator=generator, device=device).split(count):
            with torch.autocast(device.type, enabled=False):
                value = loss(heads(rows[batch]), labels[batch])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
    heads.requires_grad_(False)
