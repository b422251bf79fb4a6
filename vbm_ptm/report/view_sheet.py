"""What the network sees of some samples, and when: the content of pages of views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]


class Visit(NamedTuple):
    """A step that holds a sample.

    Attributes:
        epoch: Epoch, from 0.
        step: Step in the epoch, from 0.
        task_step: Step in the task, from 0.
    """

    epoch: int
    step: int
    task_step: int

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1} step {self.step + 1}"


class View(NamedTuple):
    """One augmented copy.

    Attributes:
        pixels: (H,W,3), as the network gets them, but without normalisation.
        kind: "weak", "strong", or "weak or strong" if a share of single views is strong.
    """

    pixels: Pixels
    kind: str


@dataclass(frozen=True)
class SampleViews:
    """A sample and its views.

    Attributes:
        name: Name of the image in its source.
        class_name: Its class.
        original: The image before any transform.
        views: Those of its first visit.
        visits: All its visits in the task, in order; never empty.
    """

    name: str
    class_name: str
    original: Image.Image
    views: tuple[View, ...]
    visits: tuple[Visit, ...]


@dataclass(frozen=True)
class ViewSheet:
    """The samples of a task that are shown.

    Attributes:
        facts: Facts about the run, in words, by name.
        samples: Samples by class.
        epoch_starts: Step in the task, from 0, that each epoch begins with; the last epoch may be cut off.
        num_steps: Steps of the task.
    """

    facts: Mapping[str, str]
    samples: tuple[SampleViews, ...]
    epoch_starts: tuple[int, ...]
    num_steps: int

    @property
    def epochs(self) -> int:
        """Epochs that the task trains, whole or in part."""
        return len(self.epoch_starts)

    @property
    def by_class(self) -> dict[str, list[SampleViews]]:
        """The samples of each class."""
        classes: dict[str, list[SampleViews]] = {}
        for sample in self.samples:
            classes.setdefault(sample.class_name, []).append(sample)
        return classes

    def planned(self, count: int) -> list[SampleViews]:
        """Return the samples whose recall plan is drawn: the first of each class, then the others."""
        first = [samples[0] for samples in self.by_class.values()]
        others = [sample for samples in self.by_class.values() for sample in samples[1:]]
        return [*first, *others][:count]


def recall(sample: SampleViews) -> str:
    """Say when a sample comes back."""
    steps = [visit.task_step + 1 for visit in sample.visits]
    shown = ", ".join(map(str, steps[:12])) + (", …" if len(steps) > 12 else "")
    if len(steps) == 1:
        return f"step {shown} of the task, and not again"
    rests = [later - earlier for earlier, later in pairwise(steps)]
    rest = f"{min(rests)}" if min(rests) == max(rests) else f"{min(rests)} to {max(rests)}"
    return f"steps {shown} of the task: {len(steps)} visits, {rest} steps apart"
