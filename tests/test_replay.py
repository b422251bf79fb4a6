"""Buffers as row numbers: the law of the reservoir, herding's choices, and what is kept of which class."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seeded
from vbm_ptm.replay import (
    ChosenRows,
    ExemplarSet,
    Rehearsal,
    Reservoir,
    herd,
    quota_of,
    trained_classes,
)

HERDED = torch.tensor([[1, 0.2], [0.1, 1], [0.9, 1.2], [3, 0.1], [0.3, 2.2]], dtype=torch.float64)


def filled(
    capacity: int, steps: list[list[int]], *, seed: int = 0, task: int = 0, epoch: int = 0
) -> Reservoir:
    reservoir = Reservoir(capacity, seed=seed)
    for rows in steps:
        reservoir.offer(rows, task=task, epoch=epoch)
    return reservoir


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 40), order_seed=st.integers(0, 1000), seed=st.integers(0, 1000))
def test_reservoir__does_not_depend_on_order_or_steps(size: int, order_seed: int, seed: int) -> None:
    rows = list(range(100))
    shuffled = random.Random(order_seed).sample(rows, len(rows))
    steps = [shuffled[first : first + size] for first in range(0, 100, size)]
    assert sorted(filled(17, steps, seed=seed).rows) == sorted(filled(17, [rows], seed=seed).rows)


def test_reservoir__keeps_everything_while_there_is_room() -> None:
    assert sorted(filled(100, [list(range(60)), list(range(60, 100))]).rows) == list(range(100))
    with pytest.raises(ValueError, match="at least 1"):
        Reservoir(0, seed=0)


def test_reservoir__admissions_say_which_slot_every_row_of_a_step_holds() -> None:
    reservoir = Reservoir(10, seed=3)
    table: dict[int, int] = {}
    for first in range(0, 300, 7):
        rows = list(range(first, first + 7))
        for position, slot in reservoir.offer(rows, task=0, epoch=0):
            table[slot] = rows[position]
        assert [table[slot] for slot in range(len(reservoir))] == reservoir.rows
    assert len(table) == 10


def test_reservoir__admits_as_often_as_reservoir_sampling_does() -> None:
    capacity, total = 200, 10_000
    reservoir = Reservoir(capacity, seed=1)
    admitted = sum(
        len(reservoir.offer(range(first, first + 10), task=0, epoch=0)) for first in range(0, total, 10)
    )
    expected = capacity * (1 + math.log(total / capacity))
    assert admitted == pytest.approx(expected, rel=0.06)


def test_reservoir__shares_itself_between_tasks_of_one_length() -> None:
    shares = []
    for seed in range(60):
        reservoir = Reservoir(50, seed=seed)
        for task in (0, 1):
            reservoir.offer(range(1000 * task, 1000 * task + 300), task=task, epoch=0)
        shares.append(sum(row < 1000 for row in reservoir.rows) / 50)
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.02)


def test_reservoir__is_uniform_over_the_stream() -> None:
    counts = Counter(row for seed in range(300) for row in filled(20, [list(range(100))], seed=seed).rows)
    expected = 300 * 20 / 100
    chi_square = sum((counts[row] - expected) ** 2 / (expected * (1 - 20 / 100)) for row in range(100))
    assert chi_square / 99 == pytest.approx(1, abs=0.3)


def test_reservoir__holds_presentations_unless_it_is_told_to_hold_rows() -> None:
    sizes = {}
    for is_distinct in (False, True):
        reservoir = Reservoir(50, seed=0, is_distinct=is_distinct)
        for epoch in range(40):
            reservoir.offer(range(60), task=0, epoch=epoch)
        sizes[is_distinct] = len(set(reservoir.rows))
        assert len(reservoir) == 50
    assert sizes[True] == 50
    # 50 of 2400 presentations of 60 rows: 60 * (1 - (1 - 1/60)**50) = 34.1 distinct ones are expected.
    assert 26 <= sizes[False] <= 42


def test_reservoir__draws_distinct_slots_that_depend_on_step_and_part_alone() -> None:
    reservoir = filled(30, [list(range(100))])
    one = reservoir.draw(8, task=1, step=5, part=0)
    assert len(set(one)) == 8
    assert one == filled(30, [list(range(50)), list(range(50, 100))]).draw(8, task=1, step=5, part=0)
    others = [reservoir.draw(8, task=1, step=5, part=1), reservoir.draw(8, task=1, step=6, part=0)]
    assert all(one != other for other in others)
    assert sorted(reservoir.draw(99, task=0, step=0, part=0)) == list(range(30))
    assert Reservoir(5, seed=0).draw(3, task=0, step=0, part=0) == []


def test_herd__breaks_exact_ties_by_the_lowest_row() -> None:
    # At the third pick rows 1 and 4 are both sqrt(0.174311) away; rounding would take row 4.
    assert herd(HERDED, 3, normalize=False).tolist() == [2, 0, 1]
    assert herd(HERDED, 4, normalize=True).tolist() == [2, 0, 4, 3]


def test_herd__keeps_its_first_choices_and_takes_each_image_once() -> None:
    features = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    whole = herd(features, 50).tolist()
    assert sorted(whole) == list(range(50))
    for count in (1, 7, 30):
        assert herd(features, count).tolist() == whole[:count]
    assert herd(features[:0], 3).tolist() == []


def test_exemplar_set__divides_its_room_among_the_classes_and_keeps_the_first_of_each() -> None:
    exemplars = ExemplarSet(12)
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(20, 4, generator=generator)
    labels = torch.arange(20) % 2
    exemplars.add(first, labels, torch.arange(20) + 100, task=0)
    assert exemplars.per_class() == {0: 6, 1: 6}
    before = {label: exemplars.rows[exemplars.labels == label].tolist() for label in (0, 1)}
    expected = (torch.arange(20)[labels == 0] + 100)[herd(first[labels == 0], 6)]
    assert before[0] == expected.tolist()
    exemplars.add(torch.randn(9, 4), torch.full((9,), 2), torch.arange(9), task=1)
    assert exemplars.per_class() == {0: 4, 1: 4, 2: 4}
    for label in (0, 1):
        assert exemplars.rows[exemplars.labels == label].tolist() == before[label][:4]
    exemplars.add(torch.randn(2, 4), torch.full((2,), 3), torch.arange(2) + 50, task=2)
    assert exemplars.per_class() == {0: 3, 1: 3, 2: 3, 3: 2}  # a class of two images


def test_exemplar_set__keeps_a_class_of_two_domains_twice() -> None:
    exemplars = ExemplarSet(8)
    exemplars.add(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64), torch.arange(6), task=0)
    exemplars.add(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64), torch.arange(6) + 10, task=1)
    assert [int((exemplars.table[:, 2] == task).sum()) for task in (0, 1)] == [4, 4]


def test_exemplar_set__does_not_depend_on_the_order_of_the_rows() -> None:
    features = torch.randn(10, 4, generator=torch.Generator().manual_seed(3)).repeat(
        2, 1
    )  # every image twice
    labels, rows = torch.zeros(20, dtype=torch.int64), torch.arange(20)
    one, other = ExemplarSet(7), ExemplarSet(7)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(4))
    one.add(features, labels, rows, task=0)
    other.add(features[order], labels[order], rows[order], task=0)
    assert one.rows.tolist() == other.rows.tolist()


def test_exemplar_set__is_restored_by_a_strict_load() -> None:
    exemplars = ExemplarSet(8)
    exemplars.add(torch.randn(12, 4), torch.arange(12) % 3, torch.arange(12), task=0)
    restored = ExemplarSet(8)
    restored.load_state_dict(exemplars.state_dict())
    assert restored.rows.tolist() == exemplars.rows.tolist()
    assert quota_of(8, 3) == 2


def test_rehearsal__extends_a_run_only_without_a_buffer() -> None:
    Rehearsal("merged", 0).check(num_cells=5, is_extension=True)
    with pytest.raises(UsageError, match="not part of an extension"):
        Rehearsal("merged", 5).check(num_cells=5, is_extension=True)


def test_trained_classes__counts_what_is_held_out() -> None:
    own, cells = np.array([2] * 20 + [3] * 30), [(0, 50), (1, 50)]
    merged = Rehearsal("merged", 40, held_out=0.1)
    together, num_exemplars = trained_classes(merged, own, cells)
    # 20 of each earlier class, two of every class held out.
    assert (np.bincount(together).tolist(), num_exemplars) == ([18, 18, 18, 28], 36)
    assert set(together[-36:].tolist()) == {0, 1}
    alone, num_exemplars = trained_classes(merged, own, [])
    assert (np.bincount(alone).tolist(), num_exemplars) == ([0, 0, 20, 30], 0)
    beside, num_exemplars = trained_classes(Rehearsal("stream", 40), own, cells)
    assert (beside.tolist(), num_exemplars) == (own.tolist(), 0)


def test_chosen_rows__change_by_no_step() -> None:
    chosen = ChosenRows(seed=0)
    chosen.rows = [5, 7, 9]
    assert chosen.offer([1, 2], task=0, epoch=0) == []
    assert sorted(chosen.draw(8, task=1, step=0, part=0)) == [0, 1, 2]
    draws = {tuple(chosen.draw(2, task=1, step=step, part=0)) for step in range(20)}
    assert len(draws) == 6


def test_exemplar_set__without_features_chooses_by_chance() -> None:
    found = []
    for seed in (0, 0, 1):
        exemplars = ExemplarSet(6)
        with seeded(seed):
            exemplars.add(None, torch.arange(20) % 2, torch.arange(20) + 100, task=0)
        found.append(exemplars.rows.tolist())
        assert exemplars.per_class() == {0: 3, 1: 3}
    assert found[0] == found[1] != found[2]
