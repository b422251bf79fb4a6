"""Settings of the view batch: how many views, of which samples, and what they are used for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from vbm_ptm.settings import Settings

Share = Annotated[float, Field(ge=0, le=1)]


class ViewBatchConfig(Settings):
    """Settings of the view batch.

    Attributes:
        num_views: V, the number of views; 1 is the plain baseline.
        allow_partial_cycle: Permit fewer epochs than views, in which case some samples are never trained on.
        order: What a view batch repeats. "sample": V views of each sample in one step (VBM-S of the paper). "class":
            the samples of 1/V of the classes, V times in an epoch, one view at a time (VBM-C of its appendix, a
            control).
        views_for: For learners with a buffer: which samples have V views, "all", the "current" ones or those of the
            "buffer"; the others have one weak view, as in the baseline. The number of images per step stays the same.
        strong_share: Fraction of the images that are strong if a sample has one view at a time: a control without
            replay, which with (V - 1) / V shows as many strong images as V views do. The fraction holds for every
            sample over time.
        query_view: The query by which an image chooses its prompts in training: its own, or its group's weak view's.
        pull_view: The query that keys are pulled towards in training: each image's own, or its group's weak view's.
    """

    num_views: PositiveInt = 4
    allow_partial_cycle: bool = False
    order: Literal["sample", "class"] = "sample"
    views_for: Literal["all", "current", "buffer"] = "all"
    strong_share: Share = 0.0
    query_view: Literal["own", "weak"] = "own"
    pull_view: Literal["own", "weak"] = "own"

    @property
    def views_per_group(self) -> int:
        """Views of a current sample that are side by side in a step."""
        if self.views_for != "all" and self.order == "class":
            raise ValueError(
                f"views_for is {self.views_for}, but with order 'class' no sample has views side by side"
            )
        return self.num_views if self.order == "sample" and self.views_for != "buffer" else 1

    @property
    def views_per_replay(self) -> int:
        """Views of a past sample that are side by side in a draw."""
        return self.num_views if self.order == "sample" and self.views_for != "current" else 1

    @property
    def cycle_length(self) -> int:
        """Epochs in which every sample of a task is visited equally often, if it has enough of them."""
        return 1 if self.views_for == "buffer" else self.num_views

    @property
    def is_baseline(self) -> bool:
        """Whether every sample is shown once an epoch, in its weak view."""
        return self.num_views == 1 and not self.strong_share

    @model_validator(mode="after")
    def _check_share(self) -> ViewBatchConfig:
        if self.strong_share and max(self.views_per_group, self.views_per_replay) > 1:
            raise ValueError(
                f"strong_share is {self.strong_share:g}, but {self.num_views} views of a sample stand side by side, "
                "one weak and the others strong: give it with num_views 1 or order 'class'"
            )
        return self

    @model_validator(mode="after")
    def _check_queries(self) -> ViewBatchConfig:
        if self.views_for != "all" and "weak" in (self.query_view, self.pull_view):
            raise ValueError(
                f"views_for is {self.views_for}, so that some samples have one view, but query_view or pull_view asks "
                "for the weak view of a group: leave them at own"
            )
        return self
