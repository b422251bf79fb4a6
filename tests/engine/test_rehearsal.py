"""Runs of learners that see past images again: what they read, and that they go on as if they had not stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.errors import TrainingInterrupted
from vbm_ptm.learners.base import Learner

STREAMS = {"er": {"capacity": 6, "draw_size": 4}}


@pytest.fixture(params=STREAMS)
def stream(request: pytest.FixtureRequest, new_learner: Callable[..., Learner]) -> Callable[[], Learner]:
    """Return a function that makes a fresh learner with a small reservoir on a ResNet-18."""
    name: str = request.param

    def make() -> Learner:
        return new_learner(name, on_resnet=True, **STREAMS[name])

    return make


def tensors_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.state_dict().items()}


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


@pytest.mark.parametrize("every", ["1 steps", "task"])
@pytest.mark.parametrize("max_steps", [None, 3])
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
    learner, forward = stopped.trainer.learner, stopped.trainer.learner.forward
    calls: list[int] = []

    def in_the_second_task(*inputs: Any) -> Any:
        calls.append(learner.task.index)
        if calls.count(1) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(*inputs)

    learner.forward = in_the_second_task
    with pytest.raises(TrainingInterrupted), stopped.stop.listening():
        stopped.trainer.fit()
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
