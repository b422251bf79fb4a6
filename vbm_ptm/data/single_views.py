"""Rows of a split, one view each, for features and predictions.

Shapes: N images, C colour channels, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vbm_ptm.data.view_batch import Integers
from vbm_ptm.data.views import check_class_indices
from vbm_ptm.randomness import seed_for, seeded

if TYPE_CHECKING:
    from vbm_ptm.data.image_split import ImageSplit
    from vbm_ptm.data.view_transforms import ViewTransforms


class EvaluationBatch(NamedTuple):
    """Images of one view each.

    Attributes:
        images: (N,C,H,W) uint8.
        labels: (N,) int64 class indices.
        sample_ids: (N,) int64 row numbers in the whole split.
    """

    images: Tensor
    labels: Tensor
    sample_ids: Tensor


@dataclass(eq=False)
class SingleViewDataset(Dataset[Tensor]):
    """Rows of a split, one fixed view each.

    Attributes:
        split: Training or test split.
        class_indices: Class index of every row of the split.
        transforms: Evaluation and weak view.
        transform: "flip" is the mirror image of "eval"; "weak" is drawn once per row, always the same for the same
            seed, task and draw.
        seed: Training seed.
        task_index: Index of the task.
        draw: Which of the weak view's draws.
    """

    split: ImageSplit
    _: KW_ONLY
    class_indices: Integers
    transforms: ViewTransforms
    transform: Literal["eval", "flip", "weak"]
    seed: int
    task_index: int
    draw: int = 0

    def __post_init__(self) -> None:
        check_class_indices(self.split, self.class_indices)

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, row: int) -> Tensor:
        """Return the view (C,H,W) of a row."""
        image = self.split.image(row)
        if self.transform == "eval":
            return self.transforms.evaluate(image)
        if self.transform == "flip":
            return self.transforms.evaluate(image).flip(-1)
        with seeded(seed_for("features", seed=self.seed, task=self.task_index, epoch=self.draw, sample=row)):
            return self.transforms.weak(image)

    def __getitems__(self, rows: Sequence[int]) -> EvaluationBatch:
        """Return a batch of rows; a data loader calls this."""
        return EvaluationBatch(
            torch.stack([self[row] for row in rows]),
            torch.tensor([int(self.class_indices[row]) for row in rows], dtype=torch.int64),
            torch.tensor(rows, dtype=torch.int64),
        )
