"""The plan of draws: only rows of the task and the buffer, one offer for each sample, the same after a stop."""

from __future__ import annotations

import numpy as np
import pytest

from vbm_ptm.data.view_batch import ViewBatchSampler
from vbm_ptm.engine.replay_planner import ReplayPlanner, StepPlan, buffer_report
from vbm_ptm.replay import Rehearsal

ROWS = [np.arange(100, 140), np.arange(10, 33)]  # of two tasks
EPOCHS, BATCH_SIZE = 6, 8


def planner_of(*, num_views: int, draws: int = 1, capacity: int = 12) -> ReplayPlanner:
    return ReplayPlanner(Rehearsal("stream", capacity, draws=draws, draw_size=8), num_views=num_views, seed=5)


def sampler_of(task: int, num_views: int) -> ViewBatchSampler:
    return ViewBatchSampler(len(ROWS[task]), BATCH_SIZE, num_views, 5, task)


def rows_of(task: int, num_views: int, epoch: int) -> list[list[int]]:
    sampler = sampler_of(task, num_views)
    sampler.set_epoch(epoch)
    return [ROWS[task][positions].tolist() for positions in sampler.steps()]


def plan_task(planner: ReplayPlanner, task: int) -> list[tuple[list[int], StepPlan]]:
    """Return the current rows and the plan of every step."""
    steps: list[tuple[list[int], StepPlan]] = []
    for epoch in range(EPOCHS):
        rows = rows_of(task, planner.num_views, epoch)
        plans = planner.plan(rows, task=task, epoch=epoch, first_step=len(steps))
        steps += zip(rows, plans, strict=True)
    planner.finish_task()
    return steps


@pytest.mark.parametrize("num_views", [1, 2, 4])
@pytest.mark.parametrize("draws", [1, 2])
def test_plan__reads_rows_that_the_buffer_holds_at_that_moment(num_views: int, draws: int) -> None:
    planner = planner_of(num_views=num_views, draws=draws)
    held: dict[int, int] = {}
    for task in (0, 1):
        for number, (rows, plan) in enumerate(plan_task(planner, task)):
            assert len(plan.draws) == (draws if held else 0)
            for draw in plan.draws:
                assert draw.rows == [
                    held[slot] for slot in draw.slots
                ]  # the learner's table has the same places
                assert len(set(draw.slots)) == len(draw.slots) == min(len(held), 8 // num_views)
                assert (draw.step, draw.num_views) == (number, num_views)
            for position, slot in plan.admissions:
                held[slot] = rows[position]
    assert [held[slot] for slot in range(12)] == planner.buffer.rows


@pytest.mark.parametrize("num_views", [1, 2, 4])
def test_plan__costs_as_many_images_a_step_with_any_number_of_views(num_views: int) -> None:
    steps = plan_task(planner_of(num_views=num_views, capacity=40), 0)
    assert len(steps) == EPOCHS * 5
    images = [
        len(rows) * num_views + sum(len(draw.rows) * draw.num_views for draw in plan.draws)
        for rows, plan in steps[10:]
    ]
    assert set(images) == {16}


def test_plan__offers_a_sample_once_however_many_views_it_has() -> None:
    for num_views in (1, 4):
        planner = planner_of(num_views=num_views, capacity=10_000)
        steps = plan_task(planner, 0)
        offered = sum(len(rows) for rows, _ in steps)
        assert len(planner.buffer) == offered
        assert abs(offered - EPOCHS * 40 // num_views) <= 40 // num_views


@pytest.mark.parametrize("num_steps", [0, 1, 7, 30])
def test_walk__leaves_the_buffer_of_the_same_steps(num_steps: int) -> None:
    planned, walked = planner_of(num_views=2), planner_of(num_views=2)
    taken = 0
    for epoch in range(EPOCHS):
        rows = rows_of(0, 2, epoch)[: num_steps - taken]
        planned.plan(rows, task=0, epoch=epoch, first_step=taken)
        taken += len(rows)
    planned.finish_task()
    walked.walk(sampler_of(0, 2), ROWS[0], task=0, num_steps=num_steps)
    assert walked.buffer.rows == planned.buffer.rows
    assert walked.num_tasks == planned.num_tasks == 1


def test_replay_part__is_divided_among_ranks_without_a_rest() -> None:
    (*_, (_, plan)) = plan_task(planner_of(num_views=1), 0)
    (draw,) = plan.draws
    parts = [draw.of_rank(rank, 3) for rank in range(3)]
    assert [row for part in parts for row in part.rows] == draw.rows
    assert [slot for part in parts for slot in part.slots] == draw.slots
    assert {part.num_global_groups for part in parts} == {len(draw.rows)}


def test_buffer_report__counts_images_rows_and_classes() -> None:
    report = buffer_report([3, 3, 0, 5], np.array([7, 0, 0, 7, 0, 2]), capacity=9)
    assert report == {"capacity": 9, "stored": 4, "distinct": 3, "per_class": {"2": 1, "7": 3}}
