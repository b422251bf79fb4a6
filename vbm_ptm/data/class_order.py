"""View batches of classes: an epoch holds a part of a task's classes, several times over.

The control VBM-C of the paper's appendix ("Results on two types of View-Batch Model"): what comes back after a rest is
a class, not a sample. The classes of a task are cut into V parts; epoch e shows the samples of part e mod V, V times,
one view at a time and each time in a new order. Over a cycle of V epochs every sample is shown V times, as often as
with one view, and no more images are shown than with any other order.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from vbm_ptm.data.view_batch import Integers, ViewBatchSampler, chunk
from vbm_ptm.randomness import seed_for


class ClassOrderSampler(ViewBatchSampler):
    """Positions of the samples of every step, part by part of the classes.

    Args:
        class_indices: Class of each sample of the task.
        batch_size: B, images per step; every pass over a part ends with a short step, as an epoch of one view does.
        num_parts: V; a task with fewer classes has one part per class.
        seed: Training seed.
        task_index: Index of the task.
    """

    def __init__(
        self, class_indices: Integers, batch_size: int, num_parts: int, seed: int, task_index: int = 0
    ) -> None:
        super().__init__(len(class_indices), batch_size, 1, seed, task_index)
        classes = np.unique(class_indices)
        shuffled = classes[self._shuffle(len(classes), purpose="class_parts", draw=0)]
        self.num_parts = min(num_parts, len(classes))
        bounds = [chunk(len(classes), part, self.num_parts) for part in range(self.num_parts)]
        self.parts = [np.isin(class_indices, shuffled[first:last]).nonzero()[0] for first, last in bounds]

    @property
    def cycle_length(self) -> int:
        """Epochs after which every sample has been visited equally often."""
        return self.num_parts

    def draw_of(self, step: int) -> int:
        """Return how often the samples of a step have been shown before."""
        return self.epoch // self.num_parts * self.num_parts + step // self._steps_per_pass

    def __len__(self) -> int:
        """Return the number of steps in the epoch."""
        return self.num_parts * self._steps_per_pass

    def steps(self) -> list[list[int]]:
        """Return the distinct positions in 0..num_samples-1 of each step of the epoch."""
        own = self.parts[self.epoch % self.num_parts]
        steps = []
        for repetition in range(self.num_parts):
            draw = self.epoch * self.num_parts + repetition
            order = own[self._shuffle(len(own), purpose="sampler", draw=draw)].tolist()
            steps += [
                order[first : first + self.batch_size] for first in range(0, len(order), self.batch_size)
            ]
        return steps

    @property
    def _steps_per_pass(self) -> int:
        return math.ceil(len(self.parts[self.epoch % self.num_parts]) / self.batch_size)

    def _shuffle(self, length: int, *, purpose: str, draw: int) -> Integers:
        generator = torch.Generator()
        generator.manual_seed(seed_for(purpose, seed=self.seed, task=self.task_index, epoch=draw))
        return torch.randperm(length, generator=generator).numpy()
