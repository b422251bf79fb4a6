"""View batches of one kind: exemplars among a task's images, and V views for one of the two.

The other kind is shown as in the baseline, each sample once an epoch in its weak view. Both kinds are spread evenly
over the steps, whose number and number of images are the same as with one view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from vbm_ptm.data.view_batch import ViewBatchSampler, chunk


class MixedViewSampler(ViewBatchSampler):
    """Positions of the samples of every step, the task's own samples first.

    Of the N_V samples of the kind with views an epoch visits N_V / V, and of the other kind all N_1: N_V + N_1 images
    in ceil((N_V + N_1) / B) steps. Groups are dealt out first, so that the groups of two steps differ by at most one;
    single samples fill up, so that the images of two steps differ by at most one as long as a step has V single ones,
    and by fewer than V otherwise.

    Args:
        num_own: Samples of the task itself.
        num_exemplars: Exemplars, at the positions after them.
        batch_size: B, images per step.
        num_views: V, for the kind that has views; fewer if it has fewer samples.
        views_for: The kind that has views.
        seed: Training seed.
        task_index: Index of the task.
    """

    def __init__(
        self,
        num_own: int,
        num_exemplars: int,
        batch_size: int,
        num_views: int,
        seed: int,
        task_index: int = 0,
        *,
        views_for: Literal["current", "buffer"],
    ) -> None:
        own_views, exemplar_views = (num_views, 1) if views_for == "current" else (1, num_views)
        self._own = ViewBatchSampler(num_own, batch_size, own_views, seed, task_index)
        self._exemplars = _ExemplarSampler(num_exemplars, batch_size, exemplar_views, seed, task_index)
        super().__init__(num_own + num_exemplars, batch_size, 1, seed, task_index)
        self.num_own, self.num_views = num_own, self._own.num_views
        self.num_exemplar_views = self._exemplars.num_views

    @property
    def cycle_length(self) -> int:
        """Epochs after which every sample of a kind has been visited equally often."""
        return self.num_views * self.num_exemplar_views

    def steps(self) -> list[list[int]]:
        """Return the distinct positions in 0..num_samples-1 of each step of the epoch."""
        self._own.set_epoch(self.epoch)
        self._exemplars.set_epoch(self.epoch)
        own = self._own.visited()
        exemplars = [self.num_own + position for position in self._exemplars.visited()]
        groups, singles = (own, exemplars) if self.num_views > 1 else (exemplars, own)
        parts = _filled_up(groups, singles, num_views=self.cycle_length, num_steps=len(self))
        return [sorted(part, key=lambda position: position >= self.num_own) for part in parts]


class _ExemplarSampler(ViewBatchSampler):
    purpose: ClassVar[str] = "exemplar_sampler"


def _filled_up(
    groups: Sequence[int], singles: Sequence[int], *, num_views: int, num_steps: int
) -> list[list[int]]:
    """Deal out groups evenly, and add single samples so that all steps have the same size."""
    num_images, parts, taken = len(groups) * num_views + len(singles), [], 0
    for step in range(num_steps):
        first, last = chunk(len(groups), step, num_steps)
        wanted = num_images * (step + 1) // num_steps - last * num_views
        end = min(max(wanted, taken), len(singles))
        parts.append([*groups[first:last], *singles[taken:end]])
        taken = end
    return parts
