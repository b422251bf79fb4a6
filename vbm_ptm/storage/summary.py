"""Every number of an accuracy matrix by name, as results, model cards and ``--json`` show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from vbm_ptm.metrics import AccuracyMatrix, Scope, TopK


def summary(matrix: AccuracyMatrix) -> dict[str, Any]:
    """Return the numbers in percent as JSON values, None for those that do not exist.

    Layout: ``[scope]["top1" or "top5"][number]``; a scope that does not apply is None. Tasks are indices from 0, in
    the note numbers from 1.
    """
    skipped, gaps = list(matrix.tasks_without_test_images), list(matrix.rows_with_gaps)
    notes = []
    if skipped:
        notes.append(f"without test images and left out of all means: task {_numbered(skipped)}")
    if gaps:
        notes.append(
            f"not all tasks were measured after task {_numbered(gaps)}: accuracy over all classes is unknown"
        )
    return {
        **{scope: _of_scope(matrix, scope) for scope in get_args(Scope)},
        "num_training_tasks": len(matrix.rows),
        "tasks_without_test_images": skipped,
        "rows_with_gaps": gaps,
        "note": "; ".join(notes) or None,
    }


def _numbered(indices: Sequence[int]) -> str:
    """Return the numbers of tasks as readers count them, from 1."""
    return ", ".join(str(index + 1) for index in indices)


def _of_scope(matrix: AccuracyMatrix, scope: Scope) -> dict[str, Any] | None:
    if all(cell.correct(scope=scope) is None for row in matrix.rows for cell in row if cell):
        return None
    return {f"top{top}": _numbers(matrix, top, scope) for top in get_args(TopK)}


def _numbers(matrix: AccuracyMatrix, top: TopK, scope: Scope) -> dict[str, Any]:
    return {
        "last_accuracy": matrix.last(top=top, scope=scope),
        "average_incremental_accuracy": matrix.average_incremental(top=top, scope=scope),
        "last_accuracy_task_mean": matrix.last(weighting="task_mean", top=top, scope=scope),
        "average_incremental_accuracy_task_mean": matrix.average_incremental(
            weighting="task_mean", top=top, scope=scope
        ),
        "forgetting": matrix.forgetting(top=top, scope=scope),
        "backward_transfer": matrix.backward_transfer(top=top, scope=scope),
        "curve": list(matrix.curve(top=top, scope=scope)),
        "curve_task_mean": list(matrix.curve(weighting="task_mean", top=top, scope=scope)),
        "matrix": [
            [matrix.accuracy(after, task, top=top, scope=scope) for task in range(len(row))]
            for after, row in enumerate(matrix.rows)
        ],
    }
