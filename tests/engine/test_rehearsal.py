"""Runs of learners that see past images again: what they read, and that they go on as if they had not stopped."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.data.view_batch import MultiViewDataset
from vbm_ptm.errors import TrainingInterrupted
from vbm_ptm.learners.base import Learner

STREAMS = {name: {"capacity": 6, "draw_size": 4} for name in ("er", "dark_er", "der_pp")}


# They share the buffer and its planner; der_pp draws twice in a step.
@pytest.fixture(
    params=[name if name == "der_pp" else pytest.param(name, marks=pytest.mark.slow) for name in STREAMS]
)
def stream(request: pytest.FixtureRequest, new_learner: Callable[..., Learner]) -> Callable[[], Learner]:
    """Return a function that makes a fresh learner with a small reservoir on a ResNet-18."""
    name: str = request.param

    def make() -> Learner:
        return new_learner(name, on_resnet=True, **STREAMS[name])

    return make


def tensors_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.state_dict().items()}


def stop_in(run: Any, *, task: int, step: int) -> None:
    """Train until SIGTERM comes in a step of a task, counted from 1."""
    learner, forward = run.trainer.learner, run.trainer.learner.forward
    calls: list[int] = []

    def in_a_step(*inputs: Any) -> Any:
        calls.append(learner.task.index)
        if calls.count(task) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(*inputs)

    learner.forward = in_a_step
    with pytest.raises(TrainingInterrupted), run.stop.listening():
        run.trainer.fit()


@pytest.mark.parametrize("num_views", [1, 2])
def test_fit__reads_no_image_outside_the_task_and_the_buffer(
    stream: Callable[[], Learner],
    benchmark_of_three: Benchmark,
    new_run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    num_views: int,
) -> None:
    read: list[set[int]] = [set()]
    image = ImageSplit.image

    def noted(split: ImageSplit, index: int) -> Any:
        if split.name == "train":
            read[-1].add(int(index))
        return image(split, index)

    monkeypatch.setattr(ImageSplit, "image", noted)
    run = new_run(stream(), benchmark_of_three, num_views=num_views)
    trainer = run.trainer
    held: list[set[int]] = [set()]
    end_task = trainer.learner.end_task

    def at_the_end(task: Any, features: Any) -> None:
        held.append(set(trainer.planner.reservoir.rows))
        read.append(set())
        end_task(task, features)

    trainer.learner.end_task = at_the_end
    trainer.fit()
    for task, rows, buffered in zip(benchmark_of_three.scenario.tasks, read, held, strict=False):
        own = set(benchmark_of_three.training_rows(task).tolist())
        assert own <= rows <= own | buffered
        assert bool(rows - own) == (task.index > 0)  # something of the buffer was seen
    report = trainer.records[-1].learner_report["buffer"]
    assert report["stored"] == 6
    assert sum(report["per_class"].values()) == 6
    assert report["replayed_images"] > 0
    assert trainer.records[0].min_visits == trainer.records[0].max_visits == 2 // num_views


@pytest.mark.parametrize(
    ("every", "max_steps"),
    [
        ("1 steps", 3),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("1 steps", None), ("task", None), ("task", 3)]
        ),
    ],
)
def test_fit__goes_on_with_the_same_buffer_and_draws(
    stream: Callable[[], Learner],
    benchmark_of_three: Benchmark,
    new_run: Callable[..., Any],
    every: str,
    max_steps: int | None,
) -> None:
    settings = {"num_views": 2, "epochs": 4, "every": every, "max_steps_per_task": max_steps, "log_every": 1}
    whole = new_run(stream(), benchmark_of_three, name="whole", **settings)
    whole.trainer.fit()
    stopped = new_run(stream(), benchmark_of_three, name="parts", **settings)
    stop_in(stopped, task=1, step=2)
    again = new_run(stream(), benchmark_of_three, name="parts", goes_on=True, **settings)
    again.trainer.fit()
    one, two = tensors_of(whole.trainer.learner), tensors_of(again.trainer.learner)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert again.trainer.planner.reservoir.rows == whole.trainer.planner.reservoir.rows
    reports = [[record.learner_report for record in run.trainer.records] for run in (whole, again)]
    assert reports[0] == reports[1]


def test_fit__brings_the_same_draws_through_workers(
    stream: Callable[[], Learner], benchmark_of_three: Benchmark, new_run: Callable[..., Any]
) -> None:
    runs = [
        new_run(stream(), benchmark_of_three, name=str(count), num_workers=count, num_views=2)
        for count in (0, 2)
    ]
    for run in runs:
        run.trainer.fit()
    one, two = (tensors_of(run.trainer.learner) for run in runs)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("num_views", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_fit__of_merged_images_shows_exemplars_as_often_as_the_task(
    benchmark_of_three: Benchmark,
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    num_views: int,
) -> None:
    learner = new_learner("icarl", on_resnet=True, capacity=12)
    shown: list[Counter[int]] = []
    dataset = MultiViewDataset.__getitem__

    def noted(self: MultiViewDataset, key: tuple[int, int]) -> Any:
        while len(shown) <= self.task_index:
            shown.append(Counter())
        shown[self.task_index][int(self.rows[key[1]])] += 1
        return dataset(self, key)

    monkeypatch.setattr(MultiViewDataset, "__getitem__", noted)
    run = new_run(learner, benchmark_of_three, num_views=num_views, epochs=4)
    planned = [run.trainer._steps_of(task) for task in benchmark_of_three.scenario.tasks]
    exemplars: list[set[int]] = []
    begin_task = learner.begin_task

    def at_the_beginning(task: Any) -> None:
        exemplars.append(set(learner.rehearsed_rows().tolist()))
        begin_task(task)

    learner.begin_task = at_the_beginning
    run.trainer.fit()
    for task, rows, held in zip(benchmark_of_three.scenario.tasks, shown, exemplars, strict=True):
        own = set(benchmark_of_three.training_rows(task).tolist())
        assert set(rows) == own | held
        assert set(rows.values()) == {4 // num_views}
    # 12 images for 2 classes of 5 each, then for 4: 3 each.
    assert [len(held) for held in exemplars] == [0, 10, 12]
    assert [record.num_samples for record in run.trainer.records] == [10, 20, 22]
    assert [record.num_steps for record in run.trainer.records] == planned
    assert run.trainer.records[-1].learner_report["buffer"]["per_class"] == {str(k): 2 for k in range(6)}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        case if case == ("icarl", 2) else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(["icarl", "lwf", "expandable", "tcil", "wa"], [1, 2])
    ],
)
def test_fit__with_a_teacher_goes_on_as_if_it_had_not_stopped(
    benchmark_of_three: Benchmark,
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    name: str,
    step: int,
) -> None:
    def fresh() -> Learner:
        return new_learner(
            name, on_resnet=True, **({"reset_epoch": 1} if name in ("expandable", "tcil") else {})
        )

    settings = {"num_views": 2, "every": "1 steps", "log_every": 1}
    whole = new_run(fresh(), benchmark_of_three, name="whole", **settings)
    whole.trainer.fit()
    stopped = new_run(fresh(), benchmark_of_three, name="parts", **settings)
    stop_in(stopped, task=1, step=step)
    again = new_run(fresh(), benchmark_of_three, name="parts", goes_on=True, **settings)
    again.trainer.fit()
    one, two = tensors_of(whole.trainer.learner), tensors_of(again.trainer.learner)
    assert list(one) == list(two)
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert whole.trainer.matrix.to_dict() == again.trainer.matrix.to_dict()
