"""What the settings of every learner say."""

from __future__ import annotations

from typing import Literal

from vbm_ptm.data.scenario import Task
from vbm_ptm.replay import Rehearsal
from vbm_ptm.settings import Settings

# Which tasks have training steps.
TrainedTasks = Literal["all", "first", "none"]


class LearnerConfig(Settings):
    """Settings of a learner; each method's own class adds its hyper-parameters."""

    name: str

    @property
    def trained_tasks(self) -> TrainedTasks:
        """Which tasks have parameter groups; the others take zero steps."""
        return "all"

    def trains(self, task_index: int) -> bool:
        """Return whether a task has training steps."""
        return self.trained_tasks == "all" or (self.trained_tasks == "first" and task_index == 0)

    def task_notes(self, task: Task) -> list[str]:
        """Return what should be known of a task before it is learned with these settings.

        Args:
            task: The task.
        """
        return []

    @property
    def rehearsal(self) -> Rehearsal | None:
        """What the method asks for to see past images again; None: nothing."""
        return None

    @property
    def forbids_accumulation(self) -> str | None:
        """Why a step cannot be cut into micro-batches, with the setting that says so; None if it can.

        It cannot where what an image is given in training depends on the other images of its step.
        """
        return None
