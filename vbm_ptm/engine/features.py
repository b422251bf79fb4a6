"""Features of a task's training images for what a learner does at the end of the task.

Shapes: n rows that are asked for, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from numpy.typing import NDArray
from torch import Tensor

from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.data.view_batch import chunk
from vbm_ptm.learners.base import ImageTransform, Learner

# Bytes that one message between ranks holds; it passes through the device, where a whole table may not fit.
_MESSAGE_BYTES = 2**26


class TaskFeatures:
    """Computes ``learner.query`` over training images, spread over ranks; every rank gets all of them.

    Implements ``vbm_ptm.learners.base.Features``. Nothing is computed before the first call. The network runs in the
    precision of the run; learners compute with the features in float32 or better.
    """

    def __init__(self, learner: Learner, task: Task, *, accelerator: Accelerator, loaders: Loaders) -> None:
        self.learner = learner
        self.task = task
        self.accelerator = accelerator
        self.loaders = loaders

    def __call__(
        self,
        rows: Sequence[int] | None = None,
        transform: ImageTransform = "eval",
        *,
        draw: int = 0,
        function: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return features (n, D) float32, class indices (n,) and sample ids (n,) on the CPU, in the order of rows.

        Raises:
            FloatingPointError: A feature is not finite.
        """
        benchmark = self.loaders.benchmark
        train = benchmark.datasets.train
        wanted = benchmark.training_rows(self.task) if rows is None else np.asarray(rows, dtype=np.int64)
        features = self._table(train, wanted, transform, draw=draw, function=function)
        labels, sample_ids = self._labels(wanted)
        if not bool(features.isfinite().all()):
            broken = sample_ids[~features.isfinite().all(dim=1)].tolist()
            raise FloatingPointError(
                f"after task {self.task.index + 1} the features of {len(broken)} training images are not finite (rows "
                f"{', '.join(map(str, broken[:10]))}): the weights have diverged. Finished tasks are saved; lower "
                "optimization.learning_rate."
            )
        return features, labels, sample_ids

    def labels(self) -> tuple[Tensor, Tensor]:
        """Return class indices (n,) and sample ids (n,) of all images of the task; none of them is read."""
        return self._labels(self.loaders.benchmark.training_rows(self.task))

    def sum(
        self, function: Callable[[Tensor], Mapping[str, Tensor]], transform: ImageTransform = "eval"
    ) -> dict[str, Tensor]:
        """Return the sums of a function over all images of the task, float64 on the CPU, the same on every rank.

        Raises:
            FloatingPointError: A sum is not finite.
        """
        benchmark = self.loaders.benchmark
        totals: dict[str, Tensor] = {}
        for images in self._batches(benchmark.datasets.train, benchmark.training_rows(self.task), transform):
            with torch.no_grad(), self.accelerator.autocast():
                for name, value in function(images).items():
                    value = value.to("cpu", torch.float64)
                    totals[name] = totals[name] + value if name in totals else value
        totals = self._over_ranks(totals)
        broken = [name for name, total in totals.items() if not bool(total.isfinite().all())]
        if broken:
            raise FloatingPointError(
                f"in task {self.task.index + 1} sums over the training images are not finite ({', '.join(broken)}): "
                "the weights have diverged. Finished tasks are saved; lower optimization.learning_rate."
            )
        return totals

    def of_test(self, rows: NDArray[np.int64]) -> Tensor:
        """Return features (n, D) of test images under the evaluation transform, in the order of rows."""
        return self._table(self.loaders.benchmark.datasets.test, rows, "eval")

    def _labels(self, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        benchmark = self.loaders.benchmark
        labels = benchmark.class_indices(benchmark.datasets.train)[rows]
        return torch.from_numpy(labels), torch.from_numpy(rows.copy())

    @torch.no_grad()
    def _table(
        self,
        split: ImageSplit,
        wanted: NDArray[np.int64],
        transform: ImageTransform,
        *,
        draw: int = 0,
        function: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        function = function or self.learner.query
        num_ranks = self.accelerator.num_processes
        shares = [chunk(len(wanted), rank, num_ranks) for rank in range(num_ranks)]
        table: Tensor | None = None
        position, _ = shares[self.accelerator.process_index]
        for images in self._batches(split, wanted, transform, draw=draw):
            with torch.inference_mode(), self.accelerator.autocast():
                values = function(images)
                values = values.to("cpu", torch.promote_types(values.dtype, torch.float32))
            if table is None:
                table = torch.empty(len(wanted), values.shape[1], dtype=values.dtype)
            table[position : position + len(values)] = values
            position += len(values)
        return self._complete(table, shares)

    def _batches(
        self, split: ImageSplit, wanted: NDArray[np.int64], transform: ImageTransform, *, draw: int = 0
    ) -> Iterator[Tensor]:
        """Yield this rank's share of the images in batches (N,C,H,W), on its device."""
        parts = self.loaders.parts_of_rank(wanted)
        loader = self.loaders.evaluation(
            split, parts, transform=transform, task_index=self.task.index, draw=draw
        )
        to_input = self.loaders.benchmark.transforms.to_input
        for images, _, _ in loader:
            yield to_input(images, self.accelerator.device)

    def _over_ranks(self, totals: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums of all ranks; one without images does not know their names and shapes."""
        if self.accelerator.num_processes == 1:
            return totals
        everywhere = gather_object([{name: tuple(total.shape) for name, total in totals.items()}])
        shapes: dict[str, tuple[int, ...]] = next(filter(None, everywhere), {})
        summed = {}
        for name, shape in shapes.items():
            own = totals[name] if name in totals else torch.zeros(shape, dtype=torch.float64)
            message = own.to(self.accelerator.device)
            torch.distributed.all_reduce(message)
            summed[name] = message.cpu()
        return summed

    def _complete(self, table: Tensor | None, shares: Sequence[tuple[int, int]]) -> Tensor:
        """Fill in the other ranks' rows of the table (n, D), which holds this rank's rows; nothing is padded.

        Args:
            table: None on a rank without rows, which has not seen what a feature looks like.
            shares: First row and the one behind the last of every rank.
        """
        num_rows = shares[-1][1]
        if not num_rows:
            return torch.empty(0, self.learner.backbone.width)
        if self.accelerator.num_processes > 1:
            device = self.accelerator.device
            is_double = table is not None and table.dtype == torch.float64
            looks = torch.tensor([0 if table is None else table.shape[1], int(is_double)], device=device)
            torch.distributed.all_reduce(looks, op=torch.distributed.ReduceOp.MAX)
            width, is_double = looks.tolist()
            if table is None:
                table = torch.empty(num_rows, width, dtype=torch.float64 if is_double else torch.float32)
            num_rows_each = max(1, _MESSAGE_BYTES // (width * table.element_size()))
            for rank, (first, last) in enumerate(shares):
                for part in table[first:last].split(num_rows_each) if last > first else ():
                    message = part.to(device)
                    torch.distributed.broadcast(message, src=rank)
                    part.copy_(message)
        assert table is not None
        return table
