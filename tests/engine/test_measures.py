"""Retention by epoch and drift of features: against values by hand, and without a trace in what is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import depth_for
from torch import Tensor

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.data.loader_config import LoaderConfig
from vbm_ptm.engine.acceleration import build_accelerator, loaders_for
from vbm_ptm.engine.measures import Retention, degree_of_forgetting
from vbm_ptm.engine.query_cache import QueriedImages
from vbm_ptm.errors import TrainingInterrupted
from vbm_ptm.learners.base import Learner

NewLearner = Callable[..., Learner]
NewRun = Callable[..., Any]


def test_degree_of_forgetting__is_the_variance_of_the_saturated_epochs() -> None:
    # Of 80, 84, 82, 86 the mean is 83: (9 + 1 + 1 + 9) / 4.
    assert degree_of_forgetting([10, 60, 80, 84, 82, 86], first=2) == pytest.approx(5)
    assert degree_of_forgetting([70], first=0) == 0
    assert degree_of_forgetting([], first=0) is None


def retention_of(learner: Learner, benchmark: Benchmark) -> Retention:
    accelerator = build_accelerator(device="cpu")
    loaders = loaders_for(accelerator, benchmark, LoaderConfig())
    images = QueriedImages(accelerator, loaders)
    return Retention(learner, learner.task, accelerator=accelerator, loaders=loaders, images=images)


def test_retention__what_samples_lose_until_they_come_back(
    benchmark_of_three: Benchmark, new_learner: NewLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten samples; which of them are right after each epoch is given."""
    learner = new_learner("finetune")
    learner.begin_task(benchmark_of_three.scenario.tasks[0])
    retention = retention_of(learner, benchmark_of_three)
    first_right = iter([5, 8, 3, 10])  # the first so many samples are right
    is_train = benchmark_of_three.datasets.train

    def correct(split: Any, rows: Any) -> Any:
        return np.arange(len(rows)) < next(first_right) if split is is_train else np.array([True, False])

    monkeypatch.setattr(retention, "_correct", correct)
    own = benchmark_of_three.training_rows(benchmark_of_three.scenario.tasks[0])
    others = benchmark_of_three.training_rows(benchmark_of_three.scenario.tasks[1])[
        :3
    ]  # exemplars, as it were
    halves = [np.concatenate([others, half]) for half in (own[:5], own[5:])]
    found = [retention.measure(halves[epoch % 2]) for epoch in range(3)]
    assert [each["train_accuracy"] for each in found] == [50, 80, 30]
    assert found[0]["test_accuracy"] == 50
    again = retention_of(learner, benchmark_of_three)
    again.load_position(retention.position())
    monkeypatch.setattr(again, "_correct", correct)
    again.measure(halves[1])
    # The first half is right after its visit (5 of 5) and before it comes back (5 of 5): nothing is lost. Of the second
    # half 3 are right after its visit and none before it comes back: 3 of 10 rests in all.
    facts = again.facts()
    assert facts["sample_forgetting"] == pytest.approx(30)
    assert facts["epoch_accuracy"] == {"train": [50, 80, 30, 100], "test": [50, 50, 50, 50]}
    assert facts["degree_of_forgetting"] == {"train": pytest.approx(35**2), "test": 0}


@pytest.mark.parametrize(("name", "num_loaded"), [("linear_probe", [14, 0]), ("l2p", [14, 14])])
def test_retention__loads_no_image_whose_features_it_knows(
    benchmark_of_three: Benchmark,
    new_learner: NewLearner,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    num_loaded: list[int],
) -> None:
    """Ten training and four test images of a task."""
    learner = new_learner(name)
    learner.begin_task(benchmark_of_three.scenario.tasks[0])
    images: list[int] = []
    queried: list[int] = []
    split_type, decode, query = (
        type(benchmark_of_three.datasets.test),
        ImageSplit.image,
        learner.backbone.query,
    )
    monkeypatch.setattr(split_type, "image", lambda split, row: (images.append(row), decode(split, row))[1])
    monkeypatch.setattr(
        learner.backbone, "query", lambda batch: (queried.append(len(batch)), query(batch))[1]
    )
    retention = retention_of(learner, benchmark_of_three)
    for count in num_loaded:
        images.clear()
        found = retention.measure([0, 1])
        assert len(images) == count
        assert sum(queried) == 14
        queried_now = list(queried)
        assert retention_of(learner, benchmark_of_three).measure([0, 1]) == found
        queried[:] = queried_now
        with torch.no_grad():
            learner.heads.tasks[0].bias.add_(torch.tensor([5.0, -5.0]))


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.state_dict().items()}


@pytest.mark.parametrize(
    "name", ["finetune", *(pytest.param(name, marks=pytest.mark.slow) for name in ("s_iprompt", "l2p"))]
)
def test_fit__measuring_leaves_no_trace(
    benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun, name: str
) -> None:
    states = []
    for measures in ({}, {"evaluate_every_epoch": True, "feature_drift": True}):
        run = new_run(
            new_learner(name, depth=depth_for(name)),
            benchmark_of_three,
            num_views=2,
            epochs=4,
            name=f"{name} {len(states)}",
            trainer=measures,
        )
        run.trainer.fit()
        states.append(weights(run.trainer.learner))
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    records = run.trainer.records
    assert [len(run.events("epoch")), len(records)] == [3 * 4, 3]
    for record in records:
        assert [len(values) for values in record.epoch_accuracy.values()] == [4, 4]
        # On random weights, whose draws differ between versions of timm, only own tokens and heads learn for sure.
        assert record.epoch_accuracy["train"][-1] >= (50 if name == "s_iprompt" else 0)
        assert record.degree_of_forgetting["train"] >= 0
        assert record.sample_forgetting is not None
        # Ten samples, two views, two cycles: each sample rests once, for twenty images on average.
        assert record.recall_interval["mean"] == 20
        assert record.summed_rate["max"] == record.summed_rate["min"] > 0
        assert record.feature_drift is not None
        assert (record.feature_drift > 0) == (name == "finetune")


def test_fit__measures_training_images_alone(
    benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
) -> None:
    runs = [
        new_run(
            new_learner("finetune"),
            benchmark_of_three,
            epochs=2,
            name=str(measured),
            trainer={"evaluate_every_epoch": measured},
        )
        for measured in (True, "train")
    ]
    for run in runs:
        run.trainer.fit()
    for both, train in zip(*(run.trainer.records for run in runs), strict=True):
        assert train.epoch_accuracy == {"train": both.epoch_accuracy["train"], "test": []}
        assert train.degree_of_forgetting == {"train": both.degree_of_forgetting["train"]}
        assert len(both.epoch_accuracy["test"]) == 2
        assert train.sample_forgetting == both.sample_forgetting
    assert {key for event in runs[1].events("epoch") for key in event if "accuracy" in key} == {
        "train_accuracy"
    }


@pytest.mark.parametrize("name", ["ease", "aper"])
def test_fit__says_where_no_epoch_can_be_measured(
    benchmark_of_three: Benchmark,
    new_learner: NewLearner,
    new_run: NewRun,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = new_run(new_learner(name), benchmark_of_three, epochs=1, trainer={"evaluate_every_epoch": True})
    run.trainer.fit()
    assert caplog.text.count("evaluate_every_epoch measures nothing here") == 1
    assert all(not record.epoch_accuracy for record in run.trainer.records)
    assert not run.events("epoch")


def test_fit__measures_go_on_where_a_task_was_left(
    benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
) -> None:
    settings: dict[str, Any] = {
        "num_views": 2, "epochs": 3, "trainer": {"evaluate_every_epoch": True, "feature_drift": True}
    }  # fmt: skip
    whole = new_run(new_learner("finetune"), benchmark_of_three, name="whole", **settings)
    whole.trainer.fit()
    learner = new_learner("finetune")
    run = new_run(learner, benchmark_of_three, name="parts", every="1 step", **settings)
    forward, calls = learner.forward, []

    def failing(images: Tensor, labels: Tensor) -> Any:
        calls.append(learner.task.index)
        if calls.count(1) == 6:
            raise RuntimeError("as if killed")
        return forward(images, labels)

    learner.forward = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="as if killed"):
        run.trainer.fit()
    run.log.close()
    last = new_run(new_learner("finetune"), benchmark_of_three, name="parts", goes_on=True, **settings)
    last.trainer.fit()
    for one, two in zip(whole.trainer.records, last.trainer.records, strict=True):
        assert one.facts == two.facts
    assert last.events("epoch") == whole.events("epoch")


def test_fit__an_epoch_whose_measurement_was_broken_off_is_done_again(
    benchmark_of_three: Benchmark,
    new_learner: NewLearner,
    new_run: NewRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {"num_views": 2, "epochs": 4, "trainer": {"evaluate_every_epoch": True}}
    whole = new_run(new_learner("finetune"), benchmark_of_three, name="whole", **settings)
    whole.trainer.fit()
    run = new_run(new_learner("finetune"), benchmark_of_three, name="parts", every="epoch", **settings)
    measure, calls = Retention.measure, []

    def waiting(retention: Retention, visited: Any) -> Any:
        calls.append(visited)
        if len(calls) == 7:
            raise TrainingInterrupted(143, "asked to stop while workers let the measurement wait")
        return measure(retention, visited)

    monkeypatch.setattr(Retention, "measure", waiting)
    with pytest.raises(TrainingInterrupted):
        run.trainer.fit()
    run.log.close()
    last = new_run(new_learner("finetune"), benchmark_of_three, name="parts", goes_on=True, **settings)
    last.trainer.fit()
    for one, two in zip(whole.trainer.records, last.trainer.records, strict=True):
        assert one.facts == two.facts
    assert last.events("epoch") == whole.events("epoch")
