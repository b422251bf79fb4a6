"""Which past samples each step replays: decided ahead of the loaders, from the stream of rows alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vbm_ptm.data.view_batch import Integers, ViewBatchSampler
from vbm_ptm.data.views import ReplayPart
from vbm_ptm.learners.base import Learner
from vbm_ptm.replay import Admission, ChosenRows, Rehearsal, Reservoir, is_held_out, records_per_draw


@dataclass(frozen=True)
class StepPlan:
    """What a step has in addition to its current samples, over all ranks.

    Attributes:
        draws: Past samples; empty while the buffer is.
        admissions: Which current samples the buffer holds after the step, and where.
    """

    draws: tuple[ReplayPart, ...] = ()
    admissions: tuple[Admission, ...] = ()


class ReplayPlanner:
    """Fills a reservoir with the samples of every step, after the step has drawn from it; or draws from chosen rows.

    A sample is offered once, however many views it has. Nothing here depends on the model, so a resumed run walks
    through the steps that it has taken and has the same buffer again.

    Args:
        rehearsal: What the learner needs.
        num_views: V of replayed samples.
        seed: Training seed.

    Attributes:
        num_tasks: Finished tasks that the buffer has seen.
        num_replayed: Images that were drawn in the task in progress, over all ranks.
    """

    def __init__(self, rehearsal: Rehearsal, *, num_views: int, seed: int) -> None:
        self.rehearsal = rehearsal
        self.num_views = num_views
        self.buffer: Reservoir | ChosenRows = (
            Reservoir(rehearsal.capacity, seed=seed, is_distinct=rehearsal.is_distinct)
            if rehearsal.filled_by == "steps"
            else ChosenRows(seed=seed)
        )
        self.num_tasks = 0
        self.num_replayed = 0

    def plan(
        self, steps: Sequence[Sequence[int]], *, task: int, epoch: int, first_step: int
    ) -> list[StepPlan]:
        """Decide the draws of the steps of an epoch, and admit what they show.

        Args:
            steps: Row numbers of the current samples of each step.
            task: Index of the task.
            epoch: Epoch of the task.
            first_step: Steps of the task before these.
        """
        plans = []
        for number, rows in enumerate(steps, start=first_step):
            draws = self._draws(task, number) if len(self.buffer) else ()
            self.num_replayed += sum(len(draw.rows) * draw.num_views for draw in draws)
            plans.append(StepPlan(draws, tuple(self.buffer.offer(rows, task=task, epoch=epoch))))
        return plans

    def choose(self, rows: Sequence[int]) -> None:
        """Draw from these rows from now on, if the learner chooses them."""
        if isinstance(self.buffer, ChosenRows):
            self.buffer.rows = list(rows)

    def finish_task(self) -> None:
        """Continue with the next task."""
        self.num_tasks += 1
        self.num_replayed = 0

    def walk(self, sampler: ViewBatchSampler, rows: Integers, *, task: int, num_steps: int) -> None:
        """Show the reservoir the steps of a finished task, without drawing from it.

        Args:
            sampler: The steps of the task.
            rows: Its row numbers, by the sampler's positions.
            task: Index of the task.
            num_steps: Steps that were taken.
        """
        left = num_steps
        for epoch in itertools.count():
            if not left:
                break
            sampler.set_epoch(epoch)
            for positions in sampler.steps()[:left]:
                self.buffer.offer(rows[positions].tolist(), task=task, epoch=epoch)
                left -= 1
        self.finish_task()

    def report(self, classes: Integers, *, chosen: Sequence[int] = ()) -> dict[str, Any]:
        """Return what the buffer holds, as JSON values.

        Args:
            classes: Class index of every row of the training split.
            chosen: Rows that the learner has chosen, if it is the one that chooses.
        """
        self.choose(chosen)
        report = buffer_report(self.buffer.rows, classes, capacity=self.rehearsal.capacity)
        return report | {"replayed_images": self.num_replayed}

    def _draws(self, task: int, step: int) -> tuple[ReplayPart, ...]:
        rows, draws = self.buffer.rows, []
        for draw in range(self.rehearsal.draws):
            slots = self.buffer.draw(
                records_per_draw(self.rehearsal, self.num_views), task=task, step=step, part=draw
            )
            own = [rows[slot] for slot in slots]
            draws.append(ReplayPart(step, draw, own, slots, self.num_views, len(slots)))
        return tuple(draws)


def buffer_report(rows: Sequence[int], classes: Integers, *, capacity: int) -> dict[str, Any]:
    """Return what a buffer of these rows of the training split holds, as JSON values."""
    counts = Counter(int(classes[row]) for row in rows)
    return {
        "capacity": capacity,
        "stored": len(rows),
        "distinct": len(set(rows)),
        "per_class": {str(label): counts[label] for label in sorted(counts)},
    }


def rows_to_train(learner: Learner, own: Integers, classes: Integers) -> tuple[Integers, int]:
    """Return the rows of the training split that a task is trained on, and how many exemplars are behind its own.

    Args:
        learner: Has begun the task.
        own: Rows of the task.
        classes: Class index of every row of the split.
    """
    rehearsal = learner.rehearsal
    if rehearsal is None or rehearsal.mode == "stream":
        return own, 0
    exemplars = learner.rehearsed_rows().numpy()
    rows = np.concatenate([own, exemplars])
    if not (rehearsal.held_out and len(exemplars)):
        return rows, len(exemplars)
    held = is_held_out(torch.from_numpy(rows), torch.from_numpy(classes[rows]), share=rehearsal.held_out)
    is_kept = ~held.numpy()
    return rows[is_kept], int(is_kept[len(own) :].sum())


def buffer_bytes(learner: Learner, *, num_images: int) -> dict[str, int]:
    """Return what a buffer would take if it copied its images as the network sees them, and of what it stores for them.

    Args:
        learner: Holds what is remembered.
        num_images: Images in the buffer, each of 3 bytes for a pixel.
    """
    side = learner.backbone.preprocessing.image_size
    return {"image_bytes": num_images * 3 * side**2, "logit_bytes": learner.remembered_bytes}
