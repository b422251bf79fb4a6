"""Outputs of frozen modules under the evaluation transform: computed once per run, then looked up.

Shapes: n rows that are asked for, D width.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.data.loaders import Loaders
from vbm_ptm.learners.base import Learner

# A larger table is kept in a temporary file, which the system caches in memory as far as there is room.
_MEMORY_BYTES = 2**28


class QueriedBatch(NamedTuple):
    """Images and their known queries.

    Attributes:
        rows: n rows of the split.
        images: (n,C,H,W), or empty where nothing needs them.
        query: (n,D), or None where queries change.
    """

    rows: list[int]
    images: Tensor
    query: Tensor | None


class QueryCache:
    """Queries, or one part of them, of the rows of one split.

    They belong to one set of weights: with others, or once weights have been written to, it is emptied.

    Args:
        num_rows: Rows of the split.
    """

    def __init__(self, num_rows: int) -> None:
        self._is_known = np.zeros(num_rows, dtype=bool)
        self._table: Tensor | None = None
        self._weights: list[tuple[int, int]] = []

    def begin(self, modules: Sequence[nn.Module]) -> None:
        """Forget the queries of weights other than those of these modules."""
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        weights = [(id(tensor), tensor._version) for tensor in tensors]
        if weights != self._weights:
            self._weights, self._table = weights, None
            self._is_known[:] = False

    def knows(self, rows: Sequence[int]) -> bool:
        """Return whether the queries of all of these rows are known."""
        return bool(self._is_known[rows].all())

    def get(self, rows: Sequence[int], device: torch.device) -> Tensor:
        """Return the queries (n,D) of known rows, in the dtype that they were computed in."""
        assert self._table is not None
        return self._table[rows].to(device, non_blocking=True)

    def put(self, rows: Sequence[int], queries: Tensor) -> None:
        """Keep the queries (n,D) of rows."""
        if self._table is None:
            self._table = _table(len(self._is_known), queries.shape[1], queries.dtype)
        self._table[rows] = queries.to("cpu")
        self._is_known[rows] = True


class QueriedImages:
    """Images of both splits with their queries, if these are the same after every task.

    Args:
        accelerator: Device and precision.
        loaders: Bring the images.
    """

    def __init__(self, accelerator: Accelerator, loaders: Loaders) -> None:
        self._accelerator = accelerator
        self.loaders = loaders
        self._caches: dict[str, list[QueryCache]] = {"train": [], "test": []}

    def batches(
        self,
        learner: Learner,
        split: ImageSplit,
        parts: Sequence[list[int]],
        *,
        needs_images: Sequence[bool] | None = None,
    ) -> Iterator[QueriedBatch]:
        """Yield batches in order; images are loaded where the learner needs them or a query is not known.

        Args:
            learner: Whose queries they are, in eval mode.
            split: The training or the test split.
            parts: Rows of each batch.
            needs_images: For each batch, whether images are needed in any case; None: for no batch.
        """
        device, to_input = self._accelerator.device, self.loaders.benchmark.transforms.to_input
        caches = self._begin(learner, split) if query_is_fixed(learner) else []
        is_enough = bool(caches) and learner.predicts_from_query
        is_loaded = [
            is_needed or not (is_enough and all(cache.knows(part) for cache in caches))
            for part, is_needed in zip(parts, needs_images or [False] * len(parts), strict=True)
        ]
        wanted = [part for part, is_needed in zip(parts, is_loaded, strict=True) if is_needed]
        loaded = iter(self.loaders.evaluation(split, wanted))
        for part, is_needed in zip(parts, is_loaded, strict=True):
            images = to_input(next(loaded).images, device) if is_needed else torch.empty(0)
            for number, cache in enumerate(caches):
                if not cache.knows(part):
                    with self._accelerator.autocast():
                        cache.put(part, learner.query_part(images, number))
            query = torch.cat([cache.get(part, device) for cache in caches], dim=1) if caches else None
            yield QueriedBatch(part, images, query)

    def _begin(self, learner: Learner, split: ImageSplit) -> list[QueryCache]:
        """Return what is known of each part of the learner's queries."""
        caches = self._caches[split.name]
        for number, modules in enumerate(learner.query_parts):
            if number == len(caches):
                caches.append(QueryCache(len(split)))
            caches[number].begin(modules)
        return caches[: len(learner.query_parts)]


def query_is_fixed(learner: Learner) -> bool:
    """Return whether ``query`` gives an image the same features after every task, so that they are computed once."""
    own = type(learner)
    is_told = own.query is Learner.query or own.query_parts is not Learner.query_parts
    modules = (module for part in learner.query_parts for module in part)
    return is_told and not any(each.requires_grad for module in modules for each in module.parameters())


@torch.inference_mode(mode=False)  # an inference tensor could not be written to outside of that mode
def _table(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised table (num_rows, width), in a file where it is large; the file goes with the table."""
    num_bytes = num_rows * width * dtype.itemsize
    if num_bytes <= _MEMORY_BYTES:
        return torch.empty(num_rows, width, dtype=dtype)
    with tempfile.TemporaryFile() as file:
        file.truncate(num_bytes)
        stored = np.memmap(file, dtype=np.uint8, shape=(num_rows, width * dtype.itemsize))
    return torch.from_numpy(stored).view(dtype)
