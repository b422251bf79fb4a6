"""Accuracies of a run as integer counts, and the numbers that papers report from them.

Rows are training tasks (the learner as it was after them), columns are evaluation tasks, T is the number of
rows, a[j][t] the accuracy in percent on task t after task j. Fractions appear only when a number is read, so
that nothing is rounded on the way. Tasks without test images have no accuracy and are left out of every mean.
A cell that was not measured is None outside and NaN in every formula, so that no sum, mean or maximum hides it: each
number that needs the cell is None.
Shapes: N images, K seen classes, T tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, Literal, get_args

import numpy as np

Scope = Literal["class_incremental", "task_incremental", "task_expert"]
TopK = Literal[1, 5]
Weighting = Literal["pooled", "task_mean"]


@dataclass(frozen=True)
class AccuracyCell:
    """What was counted on the test images of one task.

    Attributes:
        total: Number of test images; 0 means that the task has none.
        class_incremental_top1: Images whose class has the best score of all seen classes.
        class_incremental_top5: Images whose class is among the five best of all seen classes.
        task_incremental_top1: The same among the task's own classes; None where tasks share their classes.
        task_incremental_top5: Likewise.
        task_expert_top1: The same with the task's own expert in place of a chosen one; None where the learner has no
            expert for a task, or where the task-incremental counts are made with it already.
        task_expert_top5: Likewise.
    """

    total: int
    class_incremental_top1: int
    class_incremental_top5: int
    task_incremental_top1: int | None = None
    task_incremental_top5: int | None = None
    task_expert_top1: int | None = None
    task_expert_top5: int | None = None

    def __post_init__(self) -> None:
        for scope in get_args(Scope):
            best, best_five = self.correct(top=1, scope=scope), self.correct(top=5, scope=scope)
            if (best is None) != (best_five is None):
                raise ValueError(f"{scope} needs top-1 and top-5 or neither, not {best} and {best_five}")
            if best is not None and best_five is not None and not 0 <= best <= best_five <= self.total:
                raise ValueError(
                    f"{scope} counts {best} (top-1) and {best_five} (top-5) of {self.total} images "
                    "must not be negative and must rise in this order"
                )

    def correct(self, *, top: TopK = 1, scope: Scope = "class_incremental") -> int | None:
        """Return the number of correct images, None if this scope does not apply."""
        count: int | None = getattr(self, f"{scope}_top{top}")
        return count

    def __add__(self, other: AccuracyCell) -> AccuracyCell:
        """Pool the images of two parts of one task; what one of them has not counted is unknown of both."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        counts: list[Any] = [None if None in pair else sum(pair) for pair in pairs]
        return AccuracyCell(*counts)


class AccuracyMatrix:
    """The counts of a run, one row per finished training task.

    Class- and domain-incremental runs add row j with the columns 0..j; joint training adds one row with the
    columns of all tasks.

    Args:
        rows: Cells by training task and evaluation task; None where nothing was measured.
    """

    def __init__(self, rows: Iterable[Sequence[AccuracyCell | None]] = ()) -> None:
        self._rows: list[tuple[AccuracyCell | None, ...]] = []
        for row in rows:
            self.add_row(row)

    @property
    def rows(self) -> tuple[tuple[AccuracyCell | None, ...], ...]:
        """Cells by training task and evaluation task; None where nothing was measured."""
        return tuple(self._rows)

    def add_row(self, cells: Sequence[AccuracyCell | None], *, first_task: int = 0) -> None:
        """Add what was counted after the next training task.

        Args:
            cells: Of the evaluation tasks from ``first_task`` on, in order.
            first_task: The tasks before this one were not measured.
        """
        row = (*[None] * first_task, *cells)
        if not row:
            raise ValueError("a row of the accuracy matrix needs at least one evaluated task")
        if self._rows and len(row) <= len(self._rows[-1]):
            raise ValueError(
                f"row {len(self._rows)} has {len(row)} tasks after a row of {len(self._rows[-1])}: "
                "each training task adds a task to evaluate"
            )
        for task, (before, now) in enumerate(zip(self._rows[-1] if self._rows else (), row, strict=False)):
            if before and now and before.total != now.total:
                raise ValueError(f"task {task} had {before.total} test images and now has {now.total}")
        self._rows.append(row)

    @property
    def tasks_without_test_images(self) -> tuple[int, ...]:
        """Evaluated tasks that have no accuracy."""
        last = self._rows[-1] if self._rows else ()
        return tuple(task for task, cell in enumerate(last) if cell and not cell.total)

    @property
    def rows_with_gaps(self) -> tuple[int, ...]:
        """Training tasks after which not every task was measured."""
        return tuple(after for after, row in enumerate(self._rows) if None in row)

    def accuracy(
        self, after: int, task: int, *, top: TopK = 1, scope: Scope = "class_incremental"
    ) -> float | None:
        """Return a[after][task]; None if there are no images, nothing was measured or the scope does not apply."""
        return _known(_percent([self._rows[after][task]], top, scope))

    def curve(
        self,
        *,
        weighting: Weighting = "pooled",
        top: TopK = 1,
        scope: Scope = "class_incremental",
    ) -> tuple[float | None, ...]:
        """Return the accuracy over all evaluated tasks after each training task.

        Args:
            weighting: "pooled" counts every test image once (the headline, as in SLCA and PILOT);
                "task_mean" is the unweighted mean of the tasks' accuracies (as in L2P, DualPrompt and CODA).
            top: A hit is the best or one of the five best classes.
            scope: Among all seen classes or the task's own.
        """
        return tuple(map(_known, self._curve(weighting, top, scope)))

    def _curve(self, weighting: Weighting, top: TopK, scope: Scope) -> list[float | None]:
        if weighting == "pooled":
            return [_percent(row, top, scope) for row in self._rows]
        return [_mean(_percent([cell], top, scope) for cell in row) for row in self._rows]

    def last(
        self, *, weighting: Weighting = "pooled", top: TopK = 1, scope: Scope = "class_incremental"
    ) -> float | None:
        """Return the accuracy after the last training task."""
        return self.curve(weighting=weighting, top=top, scope=scope)[-1] if self._rows else None

    def average_incremental(
        self, *, weighting: Weighting = "pooled", top: TopK = 1, scope: Scope = "class_incremental"
    ) -> float | None:
        """Return the mean of the curve."""
        return _known(_mean(self._curve(weighting, top, scope)))

    def forgetting(self, *, top: TopK = 1, scope: Scope = "class_incremental") -> float | None:
        """Return the mean over t < T-1 of max(a[j][t] for t <= j <= T-2) - a[T-1][t]; may be negative.

        None with fewer than two training tasks. The last row does not take part in the maximum.
        """
        # Unlike Python's, NumPy's maximum with a NaN is NaN.
        return self._mean_change(lambda earlier, last: float(np.max(earlier)) - last, top=top, scope=scope)

    def backward_transfer(self, *, top: TopK = 1, scope: Scope = "class_incremental") -> float | None:
        """Return the mean over t < T-1 of a[T-1][t] - a[t][t], None with fewer than two training tasks."""
        return self._mean_change(lambda earlier, last: last - earlier[0], top=top, scope=scope)

    def _mean_change(
        self, change: Callable[[Sequence[float], float], float], *, top: TopK, scope: Scope
    ) -> float | None:
        """Return the mean over all old tasks of a function of (accuracies before the last row, last)."""
        changes = []
        for task in range(len(self._rows) - 1):
            column = [_percent([row[task]], top, scope) for row in self._rows[task:]]
            existing = [accuracy for accuracy in column if accuracy is not None]
            if len(existing) == len(column):  # else the task has no test images
                changes.append(change(existing[:-1], existing[-1]))
        return _known(_mean(changes))

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for a JSON file."""
        return {"rows": [[cell and asdict(cell) for cell in row] for row in self._rows]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AccuracyMatrix:
        """Return the matrix that ``to_dict`` wrote."""
        return cls([cell and AccuracyCell(**cell) for cell in row] for row in values["rows"])


def _percent(cells: Iterable[AccuracyCell | None], top: TopK, scope: Scope) -> float | None:
    """Return the accuracy over the images of all cells: NaN if one is not known, None without images."""
    num_correct = num_images = 0.0
    for cell in cells:
        correct = cell.correct(top=top, scope=scope) if cell else None
        if cell is None or (cell.total and correct is None):
            return math.nan
        num_correct, num_images = num_correct + (correct or 0), num_images + cell.total
    return 100 * num_correct / num_images if num_images else None


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that exist, None if none does; NaN if one of them is."""
    existing = [value for value in values if value is not None]
    return sum(existing) / len(existing) if existing else None


def _known(value: float | None) -> float | None:
    """Return what is shown of a number."""
    return None if value is None or math.isnan(value) else value
