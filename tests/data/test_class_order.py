"""VBM-C: parts of the classes come back, and each sample is shown as often as with one view."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from vbm_ptm.data.class_order import ClassOrderSampler


def epochs_of(sampler: ClassOrderSampler, count: int) -> list[list[list[int]]]:
    epochs = []
    for epoch in range(count):
        sampler.set_epoch(epoch)
        epochs.append(sampler.steps())
        assert len(sampler) == len(epochs[-1])
    return epochs


@pytest.mark.parametrize(
    ("num_classes", "per_class", "num_parts", "batch_size"), [(10, 66, 4, 24), (4, 8, 4, 8), (8, 5, 2, 16)]
)
def test_steps__show_a_part_of_the_classes_several_times(
    num_classes: int, per_class: int, num_parts: int, batch_size: int
) -> None:
    classes = np.arange(num_classes).repeat(per_class)
    sampler = ClassOrderSampler(classes, batch_size, num_parts, seed=3, task_index=1)
    epochs = epochs_of(sampler, 2 * num_parts)
    shown_in = []
    for steps in epochs:
        positions, counts = np.unique(np.concatenate(steps), return_counts=True)
        assert set(counts) == {num_parts}
        shown = set(classes[positions].tolist())
        assert abs(len(shown) - num_classes / num_parts) < 1
        assert len(positions) == len(shown) * per_class  # all samples of these classes
        assert all(len(set(step)) == len(step) <= batch_size for step in steps)
        shown_in.append(shown)
    assert set.union(*shown_in[:num_parts]) == set(range(num_classes))
    assert shown_in[:num_parts] == shown_in[num_parts:]  # a class comes back after V epochs
    # Exposures of a cycle: V of every sample, V x N images in all.
    _, counts = np.unique(
        np.concatenate([np.concatenate(steps) for steps in epochs[:num_parts]]), return_counts=True
    )
    assert counts.tolist() == [num_parts] * len(classes)


def test_steps__are_as_many_as_those_of_one_view_where_parts_fill_them() -> None:
    sampler = ClassOrderSampler(np.arange(10).repeat(500), 125, 5, seed=0)
    assert [len(steps) for steps in epochs_of(sampler, 5)] == [math.ceil(5000 / 125)] * 5


def test_steps__are_shuffled_anew_in_every_pass_and_epoch() -> None:
    sampler = ClassOrderSampler(np.arange(2).repeat(40), 40, 2, seed=0)
    passes = [step for steps in epochs_of(sampler, 4) for step in steps]
    assert len(passes) == 8
    assert len({tuple(step) for step in passes}) == 8


def test_draw_of__counts_how_often_a_sample_was_shown() -> None:
    classes = np.arange(6).repeat(7)
    sampler = ClassOrderSampler(classes, 4, 3, seed=5)
    shown = np.zeros(len(classes), dtype=int)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for step, positions in enumerate(sampler.steps()):
            assert shown[positions].tolist() == [sampler.draw_of(step)] * len(positions)
            shown[positions] += 1


def test_sampler__of_fewer_classes_than_parts_has_a_part_for_each() -> None:
    sampler = ClassOrderSampler(np.array([4, 4, 9, 9, 9]), 2, 4, seed=0)
    assert (sampler.cycle_length, sampler.num_views) == (2, 1)
    sizes = sorted(len(set(itertools.chain(*steps))) for steps in epochs_of(sampler, 2))
    assert sizes == [2, 3]


def test_sampler__parts_depend_on_seed_and_task_and_cut_no_class() -> None:
    classes = np.arange(20) % 10
    parts = {
        tuple(sorted(classes[ClassOrderSampler(classes, 4, 5, seed, task).parts[0]].tolist()))
        for seed in range(4)
        for task in range(4)
    }
    assert len(parts) > 8
    assert all(len(part) == 4 and len(set(part)) == 2 for part in parts)
