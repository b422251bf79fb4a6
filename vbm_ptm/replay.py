"""Buffers of past images, kept as row numbers of the training split: which rows a learner may see again.

All images of a run lie on disk, so nothing copies pixels: a record is a row number, and a replayed image takes the same
way to the device as any other. A ``Reservoir`` depends on the stream of rows alone, never on the model; an
``ExemplarSet`` is chosen by features and is part of the learner's state.
Shapes: n images, D width, M capacity in images.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seed_for

# Distances that differ by less are equal: rounding must not choose an exemplar.
_TIE = 1e-9


@dataclass(frozen=True)
class Rehearsal:
    """What a method asks of the engine to see past images again; it never sees a loader.

    Attributes:
        mode: "stream": each step has draws from a reservoir beside its current images; "merged": the exemplars of
            earlier tasks are training images of the task like its own.
        capacity: M, images that are kept.
        draws: Of "stream": independent draws per step.
        draw_size: Of "stream": images per draw, views counted.
        remembers_logits: Of "stream": the learner keeps the logits of every record.
        is_distinct: Of "stream": a row is kept once at most; else each of its presentations may be kept.
        held_out: Of "merged": part of the smallest class that is held out of the training of every class where there
            are exemplars (``is_held_out``).
        filled_by: Of "stream": what the draws are from. "steps": a reservoir that every step fills; "tasks": rows that
            the learner chooses at the end of each task (``Learner.rehearsed_rows``).
        passes: Of "stream". "one": the draws are part of a step's only pass. Else they have a pass of their own behind
            that of the current images (``Learner.rehearse``): "projected": ``Learner.project_gradient`` makes one
            gradient of both; "successive": each pass ends with a step of the optimizer.
    """

    mode: Literal["stream", "merged"]
    capacity: int
    draws: int = 0
    draw_size: int = 32
    remembers_logits: bool = False
    is_distinct: bool = False
    held_out: float = 0.0
    filled_by: Literal["steps", "tasks"] = "steps"
    passes: Literal["one", "projected", "successive"] = "one"

    @property
    def buffer(self) -> str:
        """A short description of what is kept, to be shown."""
        if self.mode == "merged":
            kind = "exemplars"
        else:
            kind = "a reservoir" if self.filled_by == "steps" else "chosen images"
        return f"{kind} and logits" if self.remembers_logits else kind

    def check(self, *, num_cells: int, is_extension: bool) -> None:
        """Refuse a buffer that would be empty, or whose images are not part of the run.

        Args:
            num_cells: Classes that share the buffer, counted once in every task.
            is_extension: The images of the earlier tasks are not here.

        Raises:
            UsageError: The buffer cannot be filled.
        """
        if is_extension and self.capacity:
            raise UsageError(
                "this learner trains on images of earlier tasks again, which are not part of an extension: train on "
                "all tasks in one run."
            )
        is_divided = self.mode == "merged" or self.filled_by == "tasks"
        if is_divided and 0 < self.capacity < num_cells:
            raise UsageError(
                f"learner.capacity is {self.capacity}, but the last task would have {num_cells} classes (counted once "
                f"in every task) to share it: take at least {num_cells}, or 0 for no buffer."
            )


class Replay(NamedTuple):
    """A draw of past images that a step has beside its own.

    Attributes:
        images: (R, C, H, W) float.
        labels: (R,) int64 class indices.
        slots: (R,) int64, where the buffer holds each image.
    """

    images: Tensor
    labels: Tensor
    slots: Tensor


class ReplayOutput(NamedTuple):
    """What a training forward returns of one draw.

    Attributes:
        logits: (R, K) scores whose views should agree.
        terms: Signed and weighted losses (R,) by name, averaged over the images of the draw.
    """

    logits: Tensor
    terms: dict[str, Tensor]


class Admission(NamedTuple):
    """A row that enters the reservoir: its position in what was offered, and the slot it takes."""

    position: int
    slot: int


class Reservoir:
    """A uniform sample of a stream: the presentations with the M smallest keys.

    A key is a hash of (seed, task, epoch, row), so the sample depends neither on the order of arrival nor on how the
    stream is cut into steps or spread over ranks, and no random state has to be kept. It has the law of reservoir
    sampling over presentations, where a row may be held several times.

    Args:
        capacity: M.
        seed: Training seed.
        is_distinct: Give all presentations of a row one key, so that it is held once at most.
    """

    def __init__(self, capacity: int, *, seed: int, is_distinct: bool = False) -> None:
        if capacity < 1:
            raise ValueError(f"a reservoir holds at least 1 image, not {capacity}")
        self.capacity = capacity
        self.seed = seed
        self.is_distinct = is_distinct
        self._rows: list[int] = []  # by slot
        self._largest: list[tuple[int, int]] = []  # a heap of (-key, slot)
        self._keys: set[int] = set()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[int]:
        """Row numbers by slot."""
        return list(self._rows)

    def offer(self, rows: Sequence[int], *, task: int, epoch: int) -> list[Admission]:
        """Show rows to the reservoir; return those that are in it afterwards, each once, in order.

        Args:
            rows: Row numbers of one step's samples, each once however many views it has.
            task: Index of the task.
            epoch: Epoch of the task.
        """
        taken: dict[int, int] = {}
        for position, row in enumerate(rows):
            epoch_of_key = 0 if self.is_distinct else epoch
            key = seed_for("reservoir", seed=self.seed, task=task, epoch=epoch_of_key, sample=row)
            if key in self._keys:
                continue
            if len(self._rows) < self.capacity:
                slot = len(self._rows)
                self._rows.append(row)
                heapq.heappush(self._largest, (-key, slot))
            elif key < -self._largest[0][0]:
                largest, slot = heapq.heapreplace(self._largest, (-key, self._largest[0][1]))
                self._keys.discard(-largest)
                self._rows[slot] = row
            else:
                continue
            self._keys.add(key)
            taken[slot] = position  # a row of this very step may lose its slot again
        return sorted(Admission(position, slot) for slot, position in taken.items())

    def draw(self, count: int, *, task: int, step: int, part: int) -> list[int]:
        """Return slots drawn uniformly without replacement, ``min(count, len(self))`` of them.

        Args:
            count: Records wanted.
            task: Index of the task.
            step: Step of the task, over all epochs.
            part: Which of the step's draws.
        """
        return _drawn(
            len(self), count, seed=seed_for("draw", seed=self.seed, task=task, sample=step, view=part)
        )


class ChosenRows:
    """A buffer that no step changes: rows that a learner has chosen at the end of earlier tasks.

    Args:
        seed: Training seed.

    Attributes:
        rows: Row numbers by slot.
    """

    def __init__(self, *, seed: int) -> None:
        self.seed = seed
        self.rows: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def offer(self, rows: Sequence[int], *, task: int, epoch: int) -> list[Admission]:
        """Take nothing."""
        return []

    def draw(self, count: int, *, task: int, step: int, part: int) -> list[int]:
        """Return slots as ``Reservoir.draw`` does."""
        return _drawn(
            len(self), count, seed=seed_for("draw", seed=self.seed, task=task, sample=step, view=part)
        )


def _drawn(size: int, count: int, *, seed: int) -> list[int]:
    generator = torch.Generator()
    generator.manual_seed(seed)
    drawn: list[int] = torch.randperm(size, generator=generator)[:count].tolist()
    return drawn


class ExemplarSet(nn.Module):
    """Row numbers of a few images of every cell, a class in a task, in the order in which they were chosen.

    Every cell holds ``capacity // cells`` images, or all that it has; with more cells each keeps its first ones. The
    table is a buffer of fixed size: it travels with the learner's state.

    Args:
        capacity: M.

    Attributes:
        table: (M, 4) int64: row, class index, task and rank of each image; -1 where there is none.
    """

    table: Tensor

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.register_buffer("table", torch.full((capacity, 4), -1, dtype=torch.int64))

    @property
    def rows(self) -> Tensor:
        """Row numbers (n,) of the images that are held, on the CPU."""
        return self._held()[:, 0]

    @property
    def labels(self) -> Tensor:
        """Class indices (n,) of the images that are held, on the CPU."""
        return self._held()[:, 1]

    def add(
        self, features: Tensor | None, labels: Tensor, rows: Tensor, *, task: int, normalize: bool = True
    ) -> None:
        """Choose images of a task's classes, after trimming those that are held.

        Args:
            features: (n, D) of the task's training images, for herding; None to choose by the global generator.
            labels: (n,) class indices.
            rows: (n,) row numbers.
            task: Index of the task.
            normalize: Herd unit vectors.
        """
        held, classes = self._held(), labels.unique().tolist()
        quota = quota_of(self.capacity, len(held[:, 1:3].unique(dim=0)) + len(classes))
        chosen = [held[held[:, 3] < quota]]
        for label in classes:
            own = (labels == label).nonzero()[:, 0]
            own = own[rows[own].argsort()]  # ties go to the lowest row
            if features is None:
                own = own[torch.randperm(len(own))[:quota]]
            else:
                own = own[herd(features[own], quota, normalize=normalize)]
            constants = torch.tensor([[label, task]]).expand(len(own), 2)
            ranks = torch.arange(len(own))[:, None]
            chosen.append(torch.cat([rows[own][:, None], constants, ranks], dim=1))
        table = torch.cat(chosen)
        self.table.fill_(-1)
        self.table[: len(table)] = table.to(self.table)

    def per_class(self) -> dict[int, int]:
        """Return how many images of each class are held."""
        classes, counts = self.labels.unique(return_counts=True)
        return dict(zip(classes.tolist(), counts.tolist(), strict=True))

    def _held(self) -> Tensor:
        table = self.table.cpu()
        return table[table[:, 0] >= 0]


def quota_of(capacity: int, num_cells: int) -> int:
    """Return how many images of each cell (a class in a task) a buffer of this size keeps."""
    return capacity // max(num_cells, 1)


def records_per_draw(rehearsal: Rehearsal, num_views: int) -> int:
    """Return the samples in a draw from a full buffer: its size counts images."""
    return max(1, round(rehearsal.draw_size / num_views))


def kept_sizes(capacity: int, sizes: Sequence[int], *, num_cells: int) -> list[int]:
    """Return how many images of cells of these sizes are kept where so many cells share the capacity."""
    quota = quota_of(capacity, num_cells)
    return [min(quota, size) for size in sizes]


def num_held_out(smallest: int, *, share: float) -> int:
    """Return how many images of each class are held out, given those of the smallest class."""
    return min(max(1, int(share * smallest)), smallest - 1)


def cells_of(classes: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return every class index (n,) of a task with its number of images."""
    found, counts = np.unique(classes, return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))


def trained_classes(
    rehearsal: Rehearsal | None, own: NDArray[np.int64], cells: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.int64], int]:
    """Return the class of every image that a task is trained on, and how many exemplars are behind its own.

    Args:
        rehearsal: What the method asks for; only "merged" adds images.
        own: Class of every image of the task (n,).
        cells: Each class of each earlier task, and its number of training images.
    """
    if rehearsal is None or rehearsal.mode == "stream":
        return own, 0
    sizes = kept_sizes(rehearsal.capacity, [size for _, size in cells], num_cells=len(cells))
    kept = [[label] * size for (label, _), size in zip(cells, sizes, strict=True)]
    together = np.concatenate([own, np.array(list(itertools.chain.from_iterable(kept)), dtype=np.int64)])
    if not (rehearsal.held_out and cells):
        return together, len(together) - len(own)
    labels = torch.from_numpy(together)
    held: NDArray[np.bool_] = is_held_out(torch.arange(len(labels)), labels, share=rehearsal.held_out).numpy()
    return together[~held], int((~held[len(own) :]).sum())


def is_held_out(rows: Tensor, labels: Tensor, *, share: float) -> Tensor:
    """Return which images (n,) are held out of training: the same number of each class, chosen by a hash of their rows.

    Args:
        rows: (n,) row numbers.
        labels: (n,) class indices.
        share: Part of the smallest class that is held out of each; at least one image, but none of a class of one.
    """
    classes, counts = labels.unique(return_counts=True)
    count = num_held_out(int(counts.min()), share=share) if len(counts) else 0
    keys = torch.tensor([seed_for("held_out", seed=0, task=0, sample=row) for row in rows.tolist()])
    is_held = torch.zeros(len(rows), dtype=torch.bool)
    for label in classes.tolist():
        own = (labels == label).nonzero()[:, 0]
        is_held[own[keys[own].argsort()[:count]]] = True
    return is_held


def herd(features: Tensor, count: int, *, normalize: bool = True) -> Tensor:
    """Return positions of images whose running mean follows the mean of all, best first (Welling 2009; iCaRL).

    Computed in float64; of images that are equally good within 1e-9 the first one is taken. The first m positions do
    not depend on ``count``.

    Args:
        features: (n, D).
        count: Positions wanted; all n where there are fewer.
        normalize: Take unit vectors.
    """
    vectors = features.to("cpu", torch.float64)
    if normalize:
        vectors = F.normalize(vectors, dim=1)
    mean, total = vectors.mean(dim=0), vectors.new_zeros(vectors.shape[1])
    is_free = torch.ones(len(vectors), dtype=torch.bool)
    chosen: list[int] = []
    while len(chosen) < min(count, len(vectors)):
        distances = torch.linalg.vector_norm(mean - (vectors + total) / (len(chosen) + 1), dim=1)
        distances[~is_free] = torch.inf
        best = int((distances <= distances.min() + _TIE).nonzero()[0, 0])
        chosen.append(best)
        is_free[best] = False
        total = total + vectors[best]
    return torch.tensor(chosen, dtype=torch.int64)
