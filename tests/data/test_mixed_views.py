"""Steps with views for one kind alone: exposures by kind, as many steps and images as with one view."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

import pytest

from vbm_ptm.data.mixed_views import MixedViewSampler
from vbm_ptm.data.view_batch import ViewBatchSampler
from vbm_ptm.errors import UsageError


@pytest.mark.parametrize("views_for", ["current", "buffer"])
@pytest.mark.parametrize(
    ("num_own", "num_exemplars", "batch_size", "num_views"),
    [(100, 100, 20, 4), (97, 61, 24, 3), (10, 10, 8, 2), (5000, 2000, 128, 4), (40, 4, 8, 4), (9, 120, 8, 4)],
)
def test_steps__show_every_image_of_a_kind_as_often(
    views_for: Literal["current", "buffer"],
    num_own: int,
    num_exemplars: int,
    batch_size: int,
    num_views: int,
) -> None:
    sampler = MixedViewSampler(num_own, num_exemplars, batch_size, num_views, 3, 1, views_for=views_for)
    own, exemplars = (num_views, 1) if views_for == "current" else (1, num_views)
    assert (sampler.num_views, sampler.num_exemplar_views, sampler.cycle_length) == (
        own,
        exemplars,
        num_views,
    )
    num_steps, visits, images = math.ceil((num_own + num_exemplars) / batch_size), Counter[int](), 0
    num_singles = num_exemplars if views_for == "current" else num_own
    for epoch in range(num_views):
        sampler.set_epoch(epoch)
        steps = sampler.steps()
        assert len(steps) == len(sampler) == num_steps
        sizes = [sampler.num_images(step) for step in steps]
        in_kind = [sum(position < num_own for position in step) for step in steps]
        groups = (
            in_kind
            if views_for == "current"
            else [len(step) - own for step, own in zip(steps, in_kind, strict=True)]
        )
        assert max(groups) - min(groups) <= 1
        if num_singles // num_steps >= num_views:
            assert max(sizes) - min(sizes) <= 1
            assert max(sizes) <= batch_size
        else:
            assert max(sizes) < batch_size + num_views
        assert all(step == sorted(step, key=lambda position: position >= num_own) for step in steps)
        shown = [position for step in steps for position in step]
        assert len(shown) == len(set(shown))
        visits.update(shown)
        images += sum(sizes)
    assert images == num_views * (num_own + num_exemplars)
    assert {visits[position] for position in range(num_own)} == {num_views // own}
    assert {visits[num_own + position] for position in range(num_exemplars)} == {num_views // exemplars}


def test_steps__of_a_kind_are_shuffled_anew() -> None:
    sampler = MixedViewSampler(40, 24, 16, 4, 0, views_for="current")
    epochs = []
    for epoch in (0, 1, 4):
        sampler.set_epoch(epoch)
        epochs.append([position for step in sampler.steps() for position in step])
    singles = [[position for position in shown if position >= 40] for shown in epochs]
    assert sorted(singles[0]) == sorted(singles[1]) == list(range(40, 64))
    assert singles[0] != singles[1]
    groups = [[position for position in shown if position < 40] for shown in epochs]
    assert not set(groups[0]) & set(groups[1])
    # The task's own samples come as without exemplars, cycle by cycle.
    plain = ViewBatchSampler(40, 16, 4, 0)
    plain.set_epoch(4)
    assert groups[2] == plain.visited()


def test_sampler__has_no_more_views_than_samples_of_the_kind() -> None:
    sampler = MixedViewSampler(12, 2, 8, 4, 0, views_for="buffer")
    assert (sampler.num_views, sampler.num_exemplar_views, sampler.cycle_length) == (1, 2, 2)
    with pytest.raises(UsageError, match="batch size 10"):
        MixedViewSampler(12, 8, 10, 4, 0, views_for="buffer")
