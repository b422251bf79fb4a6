"""The settings that all learners share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple

from vbm_ptm.data.scenario import Task
from vbm_ptm.replay import Rehearsal
from vbm_ptm.settings import Settings

# Which tasks have training steps.
TrainedTasks = Literal["all", "first", "none"]


# A backward pass takes about two forward passes, with a frozen backbone too: gradients run through it to the prompts.
TRAINING_PASSES = 3


class TaskSizes(NamedTuple):
    """How many training images there are.

    Attributes:
        task_index: The task, from 0.
        own: Images of each of its classes.
        earlier: Images of each class of each earlier task.
    """

    task_index: int
    own: Sequence[int]
    earlier: Sequence[int]


class Passes(NamedTuple):
    """Forward passes of the backbone for one image, a backward pass counted as two.

    Attributes:
        training: In a training step.
        viewing: When it is only looked at, for its features.
        testing: In every test after a task, experts of a task apart; None: as when it is looked at.
        querying: In its first test, in addition: for features that stay and are kept between tests.
    """

    training: int
    viewing: int
    testing: int | None = None
    querying: int = 0

    def of_test(self, *, is_first: bool) -> int:
        """Return what a test image takes, measured for the first time or again."""
        testing = self.viewing if self.testing is None else self.testing
        return testing + self.querying * is_first


# Of a learner with a query of the frozen backbone beside the pass that answers an image; tests keep the query.
QUERIED = Passes(TRAINING_PASSES + 1, 1, testing=1, querying=1)


class LearnerConfig(Settings):
    """Settings of a learner; each method's own class adds its hyper-parameters."""

    # How often all images of a task are looked at before and after its training; see ``viewed_images``.
    feature_passes: ClassVar[int] = 0
    # What an image of any task takes; see ``passes``.
    usual_passes: ClassVar[Passes] = Passes(TRAINING_PASSES, 1)
    # Whether the network before the task answers the images of every later task.
    has_teacher: ClassVar[bool] = False

    name: str

    @property
    def trained_tasks(self) -> TrainedTasks:
        """Which tasks have parameter groups; the others take zero steps."""
        return "all"

    def trains(self, task_index: int) -> bool:
        """Return whether a task has training steps."""
        return self.trained_tasks == "all" or (self.trained_tasks == "first" and task_index == 0)

    def viewed_images(self, sizes: TaskSizes) -> int:
        """Return the training images that are looked at before and after the training of a task; for herding once."""
        rehearsal = self.rehearsal
        is_herding = rehearsal is not None and rehearsal.mode == "merged" and rehearsal.capacity > 0
        return max(self.feature_passes, is_herding) * sum(sizes.own)

    def held_numbers(self, sizes: TaskSizes, *, width: int) -> int:
        """Return the numbers that ``prepare_task`` adds to the learner until the end of the task.

        Args:
            sizes: Of the task.
            width: That of the backbone's features.
        """
        return 0

    def passes(self, task_index: int) -> Passes:
        """Return what an image of a task takes."""
        usual = self.usual_passes
        return usual._replace(training=usual.training + (self.has_teacher and task_index > 0))

    def task_notes(self, task: Task) -> list[str]:
        """Return warnings about a task before it is trained with these settings.

        Args:
            task: The task.
        """
        return []

    @property
    def rehearsal(self) -> Rehearsal | None:
        """Which past images the method needs to see again; None: none."""
        return None

    @property
    def forbids_accumulation(self) -> str | None:
        """Why a step cannot be cut into micro-batches, with the setting that says so; None if it can.

        It cannot where what an image is given in training depends on the other images of its step.
        """
        return None
