"""What a frozen backbone makes of the images of a split: computed once per run, and looked up after later tasks.

Shapes: n rows that are asked for, D width.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vbm_ptm.learners.base import Learner

# A larger table lies in a temporary file, of which the system keeps in memory what there is room for.
_MEMORY_BYTES = 2**28


class QueryCache:
    """Queries of the rows of one split under the evaluation transform.

    They belong to one set of backbone weights: with others, or weights that have been written to, it starts anew.

    Args:
        num_rows: Rows of the split.
    """

    def __init__(self, num_rows: int) -> None:
        self._is_known = np.zeros(num_rows, dtype=bool)
        self._table: Tensor | None = None
        self._weights: list[tuple[int, int]] = []

    def begin(self, learner: Learner) -> None:
        """Forget what other weights than the learner's have made."""
        tensors = [
            tensor for module in learner.query_modules for tensor in (*module.parameters(), *module.buffers())
        ]
        weights = [(id(tensor), tensor._version) for tensor in tensors]
        if weights != self._weights:
            self._weights, self._table = weights, None
            self._is_known[:] = False

    def knows(self, rows: Sequence[int]) -> bool:
        """Return whether the queries of all of these rows are there."""
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


def _table(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised table (num_rows, width), in a file where it is large; the file goes with the table."""
    num_bytes = num_rows * width * dtype.itemsize
    if num_bytes <= _MEMORY_BYTES:
        return torch.empty(num_rows, width, dtype=dtype)
    with tempfile.TemporaryFile() as file:
        file.truncate(num_bytes)
        stored = np.memmap(file, dtype=np.uint8, shape=(num_rows, width * dtype.itemsize))
    return torch.from_numpy(stored).view(dtype)
