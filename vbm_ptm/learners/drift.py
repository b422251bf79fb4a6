"""Drift compensation: Gaussians of earlier tasks follow the features of a backbone that continues to learn.

The linear variant of SLDC (Rao et al., "Compensating Distribution Drifts in Class-incremental Learning of Pre-trained
Vision Transformers", AAAI 2026; the authors' repository). The features of the current task's images before and after
training on it show how features have changed; the same map is applied to the Gaussians of older classes.

Differs from the official code in:
  - Features are those of the evaluation transform, not of augmented images, and of the task's images alone (the
    official default adds 1,024 images of ImageNet-1k).
  - A Gaussian is moved through its factor, so nothing is added to its covariance with every task.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from pydantic import model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.learners.alignment import AlignmentConfig
from vbm_ptm.learners.config import TaskSizes


class DriftConfig(AlignmentConfig):
    """Settings of alignment with Gaussians that may follow the backbone.

    Attributes:
        drift: "linear": the Gaussians of earlier tasks are moved by the linear map that takes a new task's features
            before training to those after it; one more pass over its images. "none": they stay.
    """

    drift: Literal["none", "linear"] = "none"

    def viewed_images(self, sizes: TaskSizes) -> int:
        """Return the task's images, twice where features from before training are kept."""
        return sum(sizes.own) * (2 if self.drift == "linear" and sizes.task_index else 1)

    def held_numbers(self, sizes: TaskSizes, *, width: int) -> int:
        """Return the numbers in the features from before training."""
        return width * sum(sizes.own) if self.drift == "linear" and sizes.task_index else 0

    @model_validator(mode="after")
    def _check_covariance(self) -> DriftConfig:
        if self.drift == "linear" and getattr(self, "covariance", "full") == "diagonal":
            raise ValueError(
                "drift 'linear' turns the axes of a Gaussian, which covariance 'diagonal' cannot follow: take "
                "covariance 'full' or 'shared', or drift 'none'"
            )
        return self


class Drift(nn.Module):
    """The features of a task's images from before its training, and the map from them to those after it."""

    earlier: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("earlier", torch.zeros(0, 0))

    def hold(self, values: Tensor) -> None:
        """Keep the features (n,D) of the task's images, before training."""
        self.earlier = values.clone()

    def finish(self, values: Tensor) -> dict[str, Tensor]:
        """Return what the task leaves behind, given the features (n,D) of the same images after training.

        It is ``transport`` (D,D); nothing after the first task, before which no Gaussian was made. What was held is
        dropped.
        """
        earlier, self.earlier = self.earlier, self.earlier.new_zeros(0, 0)
        if not len(earlier):
            return {}
        return {"transport": transport(earlier.to(values.device), values).to(values.dtype)}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Take as many rows as were held when the state was saved, inside a task."""
        saved = state_dict.get(f"{prefix}earlier")
        if saved is not None:
            self.earlier = self.earlier.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *others)


def transport(before: Tensor, after: Tensor, *, ridge: float = 1e-4, alpha: float = 1.0) -> Tensor:
    """Return the linear map (D,D), float64, that takes features (n,D) from what they were to what they are.

    It is the ridge regression of the rows ``after`` on the rows ``before``, each divided by its length, drawn towards
    the identity where there are few rows: (1 - w) (X'X + ridge I)^-1 X'Y + w I with w = exp(-n / (alpha D)). A mean
    (D,) is moved by ``mean @ map``, a factor (R,D) by ``factor @ map``.

    Args:
        before: X before its rows are divided by their lengths.
        after: Y likewise, of the same images in the same order.
        ridge: Added to the diagonal.
        alpha: Rows per dimension at which the identity has a weight of 1/e.
    """
    device = "cpu" if before.device.type == "mps" else before.device  # which has no float64
    old, new = (F.normalize(rows.detach().to(device, torch.float64), dim=1) for rows in (before, after))
    num_rows, width = old.shape
    identity = torch.eye(width, dtype=torch.float64, device=device)
    solved = torch.linalg.solve(old.T @ old + ridge * identity, old.T @ new)
    share = math.exp(-num_rows / (alpha * width))
    moved: Tensor = (1 - share) * solved + share * identity
    return moved
