"""Tasks and scenarios: what a learner may know about a task, and which rows of a split belong to it.

Class indices are assigned in order of appearance, so that the classes seen after any task are 0..seen-1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vbm_ptm.errors import UsageError

Integers = npt.NDArray[np.int64]
Names = npt.NDArray[Any]


@dataclass(frozen=True)
class Task:
    """What a learner may know about a task.

    Attributes:
        index: Position in the run, from 0.
        classes: Indices of all classes that occur in it.
        new_classes: Those that occur for the first time; always the next indices in order.
        num_seen_classes: Classes seen up to and including this task.
        domain: Name of its domain in the domain-incremental scenario.
        num_planned_classes: Classes planned for the whole run, for methods whose head has a column for each from the
            beginning; 0 if unknown.
    """

    index: int
    classes: tuple[int, ...]
    new_classes: tuple[int, ...]
    num_seen_classes: int
    domain: str | None = None
    num_planned_classes: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Scenario:
    """The tasks of a run and which rows belong to them.

    Attributes:
        kind: As in the configuration.
        class_names: Names by class index, hence in order of appearance.
        tasks: Tasks that are trained one after another.
        evaluation_tasks: Tasks that accuracy is reported on; in joint training, those of the scenario it bounds.
        class_index_of_label: Class index for each label id of the data set.
    """

    kind: str
    class_names: tuple[str, ...]
    tasks: tuple[Task, ...]
    evaluation_tasks: tuple[Task, ...]
    class_index_of_label: Integers = field(compare=False)

    def rows_of(self, task: Task, labels: Integers, domains: Names | None = None) -> Integers:
        """Return the row numbers of a split that belong to the task, in order.

        In the domain-incremental scenario a test image whose class was not seen by the end of the task
        belongs to no task.

        Args:
            task: One of ``tasks`` or ``evaluation_tasks``.
            labels: (N,) label ids of the split as the data set numbers them.
            domains: (N,) domain names of the split.
        """
        class_indices = self.class_index_of_label[labels]
        if task.domain is None:
            return np.flatnonzero(np.isin(class_indices, task.classes))
        if domains is None:
            raise UsageError(
                f"task {task.index + 1} is domain '{task.domain}', but this split names no domains"
            )
        return np.flatnonzero((domains == task.domain) & (class_indices < task.num_seen_classes))

    def seen_after(self, task_index: int) -> tuple[Task, ...]:
        """Return the tasks to evaluate after the training task of that index."""
        return self.evaluation_tasks if self.kind == "joint" else self.evaluation_tasks[: task_index + 1]
