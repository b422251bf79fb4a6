"""Accuracies of a run as integer counts, and the numbers that papers report from them.

Rows are training tasks (the learner as it was after them), columns are evaluation tasks, T is the number of
rows, a[j][t] the accuracy in percent on task t after task j. Fractions appear only when a number is read, so
that nothing is rounded on the way. Tasks without test images have no accuracy and are left out of every mean. A cell
that was not measured is None, and so is every number that would need it.
Shapes: N images, K seen classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Scope = Literal["class_incremental", "task_incremental"]
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
    """

    total: int
    class_incremental_top1: int
    class_incremental_top5: int
    task_incremental_top1: int | None = None
    task_incremental_top5: int | None = None

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
        """Pool the images of two parts of one task."""

        def together(one: int | None, two: int | None) -> int | None:
            return None if one is None or two is None else one + two

        return AccuracyCell(
            total=self.total + other.total,
            class_incremental_top1=self.class_incremental_top1 + other.class_incremental_top1,
            class_incremental_top5=self.class_incremental_top5 + other.class_incremental_top5,
            task_incremental_top1=together(self.task_incremental_top1, other.task_incremental_top1),
            task_incremental_top5=together(self.task_incremental_top5, other.task_incremental_top5),
        )


def count_correct(scores: Tensor, labels: Tensor, *, task_classes: Iterable[int] | None) -> AccuracyCell:
    """Count the images of one task that the scores get right.

    A class is among the k best if its score is finite and fewer than k other classes score higher, or equal
    with a lower index. A class that the learner rules out (-inf) is never right.

    Args:
        scores: (N,K), one column per seen class.
        labels: (N,) class indices; a label beyond K is a class not seen yet, never right.
        task_classes: The task's own class indices, for the task-incremental counts; None where tasks share
            their classes.
    """
    all_classes = torch.arange(scores.shape[1], device=scores.device)
    ranks = _ranks(scores, labels, all_classes)
    inside: Tensor | None = None
    if task_classes is not None:
        own = torch.tensor(sorted(task_classes), dtype=torch.int64, device=scores.device)
        inside = _ranks(scores[:, own], labels, own)
    return AccuracyCell(
        total=len(labels),
        class_incremental_top1=int((ranks < 1).sum()),
        class_incremental_top5=int((ranks < 5).sum()),
        task_incremental_top1=None if inside is None else int((inside < 1).sum()),
        task_incremental_top5=None if inside is None else int((inside < 5).sum()),
    )


def _ranks(scores: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
    """Return (N,) how many of the classes (K,) come before the label by their scores (N,K).

    A label without a finite score of its own comes after all others, and at least five.
    """
    is_label = labels[:, None] == classes
    ruled_out = ~(is_label & torch.isfinite(scores)).any(dim=1)
    own_score = torch.where(is_label, scores, -torch.inf).amax(dim=1, keepdim=True)
    before = (scores > own_score) | ((scores == own_score) & (classes < labels[:, None]))
    return torch.where(ruled_out, len(classes) + 5, before.sum(dim=1))


class AccuracyMatrix:
    """The counts of a run, one row per finished training task.

    Class- and domain-incremental runs add row j with the columns 0..j; joint training adds one row with the
    columns of all tasks.

    Args:
        rows: Cells by training task and evaluation task.
    """

    def __init__(self, rows: Iterable[Sequence[AccuracyCell | None]] = ()) -> None:
        self._rows: list[tuple[AccuracyCell | None, ...]] = []
        for row in rows:
            self.add_row(row)

    @property
    def rows(self) -> tuple[tuple[AccuracyCell | None, ...], ...]:
        """Cells by training task and evaluation task."""
        return tuple(self._rows)

    def add_row(self, cells: Sequence[AccuracyCell | None]) -> None:
        """Add what was counted after the next training task, evaluation tasks in order."""
        if not cells:
            raise ValueError("a row of the accuracy matrix needs at least one evaluated task")
        if self._rows and len(cells) <= len(self._rows[-1]):
            raise ValueError(
                f"row {len(self._rows)} has {len(cells)} tasks after a row of {len(self._rows[-1])}: "
                "each training task adds a task to evaluate"
            )
        for task, (before, now) in enumerate(zip(self._rows[-1] if self._rows else (), cells, strict=False)):
            if before and now and before.total != now.total:
                raise ValueError(f"task {task} had {before.total} test images and now has {now.total}")
        self._rows.append(tuple(cells))

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
        """Return a[after][task], None if the task has no test images or the scope does not apply."""
        return _percent([self._rows[after][task]], top=top, scope=scope)

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
        if weighting == "pooled":
            return tuple(_percent(row, top=top, scope=scope) for row in self._rows)
        return tuple(
            None if None in row else _mean(_percent([cell], top=top, scope=scope) for cell in row)
            for row in self._rows
        )

    def last(
        self, *, weighting: Weighting = "pooled", top: TopK = 1, scope: Scope = "class_incremental"
    ) -> float | None:
        """Return the accuracy after the last training task."""
        return self.curve(weighting=weighting, top=top, scope=scope)[-1] if self._rows else None

    def average_incremental(
        self, *, weighting: Weighting = "pooled", top: TopK = 1, scope: Scope = "class_incremental"
    ) -> float | None:
        """Return the mean of the curve."""
        if self.rows_with_gaps:
            return None
        return _mean(self.curve(weighting=weighting, top=top, scope=scope))

    def forgetting(self, *, top: TopK = 1, scope: Scope = "class_incremental") -> float | None:
        """Return the mean over t < T-1 of max(a[j][t] for t <= j <= T-2) - a[T-1][t]; may be negative.

        None with fewer than two training tasks. The last row does not take part in the maximum.
        """
        return self._mean_change(lambda earlier, last: max(earlier) - last, top=top, scope=scope)

    def backward_transfer(self, *, top: TopK = 1, scope: Scope = "class_incremental") -> float | None:
        """Return the mean over t < T-1 of a[T-1][t] - a[t][t], None with fewer than two training tasks."""
        return self._mean_change(lambda earlier, last: last - earlier[0], top=top, scope=scope)

    def _mean_change(
        self, change: Callable[[Sequence[float], float], float], *, top: TopK, scope: Scope
    ) -> float | None:
        """Return the mean over all old tasks of a function of (accuracies before the last row, last)."""
        if self.rows_with_gaps:
            return None
        changes = []
        for task in range(len(self._rows) - 1):
            column = [
                self.accuracy(after, task, top=top, scope=scope) for after in range(task, len(self._rows))
            ]
            known = [accuracy for accuracy in column if accuracy is not None]
            if known:
                changes.append(change(known[:-1], known[-1]))
        return _mean(changes)

    def summary(self) -> dict[str, Any]:
        """Return every number by name, in percent, None where it does not exist (JSON-able).

        Layout: ``[scope]["top1" or "top5"][number]``; a scope that does not apply is None.
        """
        skipped, gaps = list(self.tasks_without_test_images), list(self.rows_with_gaps)
        notes = [f"tasks {skipped} have no test images and are left out of all means"] if skipped else []
        if gaps:
            notes.append(f"after tasks {gaps} not all tasks were measured: nothing is known of all classes")
        return {
            **{scope: self._scope_summary(scope) for scope in get_args(Scope)},
            "num_training_tasks": len(self._rows),
            "tasks_without_test_images": skipped,
            "rows_with_gaps": gaps,
            "note": "; ".join(notes) or None,
        }

    def _scope_summary(self, scope: Scope) -> dict[str, Any] | None:
        if all(cell.correct(scope=scope) is None for row in self._rows for cell in row if cell):
            return None
        return {f"top{top}": self._numbers(top, scope) for top in get_args(TopK)}

    def _numbers(self, top: TopK, scope: Scope) -> dict[str, Any]:
        return {
            "last_accuracy": self.last(top=top, scope=scope),
            "average_incremental_accuracy": self.average_incremental(top=top, scope=scope),
            "last_accuracy_task_mean": self.last(weighting="task_mean", top=top, scope=scope),
            "average_incremental_accuracy_task_mean": self.average_incremental(
                weighting="task_mean", top=top, scope=scope
            ),
            "forgetting": self.forgetting(top=top, scope=scope),
            "backward_transfer": self.backward_transfer(top=top, scope=scope),
            "curve": list(self.curve(top=top, scope=scope)),
            "curve_task_mean": list(self.curve(weighting="task_mean", top=top, scope=scope)),
            "matrix": [
                [self.accuracy(after, task, top=top, scope=scope) for task in range(len(row))]
                for after, row in enumerate(self._rows)
            ],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the counts for a JSON file."""
        return {"rows": [[cell and asdict(cell) for cell in row] for row in self._rows]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AccuracyMatrix:
        """Return the matrix that ``to_dict`` wrote."""
        return cls([cell and AccuracyCell(**cell) for cell in row] for row in values["rows"])


def _percent(cells: Sequence[AccuracyCell | None], *, top: TopK, scope: Scope) -> float | None:
    """Return the accuracy over the images of all cells, None without images, with a gap, or outside the scope."""
    measured = [cell for cell in cells if cell]
    counts = [cell.correct(top=top, scope=scope) for cell in measured if cell.total]
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts) or len(measured) < len(cells):
        return None
    return 100 * sum(known) / sum(cell.total for cell in measured)


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that exist, None if none does."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
