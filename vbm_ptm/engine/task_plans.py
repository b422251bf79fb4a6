"""What is decided about a task before its first step: how many steps it has, and which past images they replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.recipe import Recipe
from vbm_ptm.engine.replay_planner import ReplayPlanner, buffer_bytes, buffer_report
from vbm_ptm.learners.base import Learner
from vbm_ptm.replay import cells_of, trained_classes
from vbm_ptm.storage.task_record import TaskRecord


class TaskPlans:
    """Plans every task of a run.

    Args:
        learner: Decides which tasks it trains and what it rehearses.
        recipe: How each task is trained.
        benchmark: Images and tasks.

    Attributes:
        planner: Decides the draws of past samples; None for a learner without a stream of them.
    """

    def __init__(self, learner: Learner, recipe: Recipe, benchmark: Benchmark) -> None:
        self._learner = learner
        self._recipe = recipe
        self._benchmark = benchmark
        self.planner: ReplayPlanner | None = None
        if learner.rehearsal is not None and learner.rehearsal.mode == "stream":
            self.planner = ReplayPlanner(
                learner.rehearsal, num_views=recipe.view_batch.views_per_replay, seed=recipe.seed
            )

    def num_steps(self, task: Task) -> int:
        """Return the optimizer steps of a task, those of its rehearsed images included."""
        if not self._learner.config.trains(task.index):
            return 0
        classes = self._benchmark.training_classes(task)
        earlier = self._benchmark.scenario.tasks[: task.index]
        cells = [cell for each in earlier for cell in cells_of(self._benchmark.training_classes(each))]
        together = trained_classes(self._learner.rehearsal, classes, cells)
        return self._recipe.workload(self._recipe.sampler(*together, task_index=task.index)).num_steps

    def planner_before(self, task: Task, records: Sequence[TaskRecord]) -> ReplayPlanner | None:
        """Return what decides the draws of a task, after it has seen the steps of all tasks before.

        Args:
            task: The task that begins or is resumed.
            records: Of the finished tasks.
        """
        planner = self.planner
        if planner is None:
            return None
        for record in records[planner.num_tasks : task.index]:
            earlier = self._benchmark.scenario.tasks[record.task_index]
            sampler = self._recipe.sampler(
                self._benchmark.training_classes(earlier), task_index=earlier.index
            )
            rows = self._benchmark.training_rows(earlier)
            planner.walk(sampler, rows, task=earlier.index, num_steps=record.num_steps)
        planner.choose(self._learner.rehearsed_rows().tolist())
        return planner

    def buffer_report(self) -> dict[str, Any]:
        """Return what the buffer holds at the end of a task, for its record; nothing without a buffer."""
        rehearsal = self._learner.rehearsal
        if rehearsal is None:
            return {}
        classes = self._benchmark.class_indices(self._benchmark.datasets.train)
        rows = self._learner.rehearsed_rows().tolist()
        if self.planner is None:
            report = buffer_report(rows, classes, capacity=rehearsal.capacity)
        else:
            report = self.planner.report(classes, chosen=rows)
            self.planner.finish_task()
        return {"buffer": report | buffer_bytes(self._learner, num_images=report["stored"])}
