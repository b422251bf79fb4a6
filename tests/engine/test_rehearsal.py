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
from torch.nn import functional as F

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.data.views import MultiViewDataset
from vbm_ptm.errors import TrainingInterrupted
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seed_for, seeded

STREAMS = {name: {"capacity": 6, "draw_size": 4} for name in ("er", "dark_er", "der_pp", "agem_r")}
TEACHERS = ("icarl", "lwf", "expandable", "tcil", "wa", "bic", "ucir", "lwf_mc", "agem", "fdr")
SETTINGS = {
    **{name: {"capacity": 6, "draw_size": 4} for name in ("agem", "fdr")},
    "expandable": {"reset_epoch": 1, "balanced_epochs": 2},
    "tcil": {"reset_epoch": 1},
}

MERGED = {
    name: {"capacity": 12} | SETTINGS.get(name, {})
    for name in ("icarl", "bic", "wa", "ucir", "expandable", "tcil")
}


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


@pytest.mark.parametrize("num_views", [pytest.param(1, marks=pytest.mark.slow), 2])
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
        held.append(set(trainer.plans.planner.buffer.rows))
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
    assert report["image_bytes"] == 6 * 3 * 32**2
    num_columns = 6 if trainer.learner.rehearsal.remembers_logits else 0
    assert report["logit_bytes"] == 6 * num_columns * 4
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
    settings = {"num_views": 2, "epochs": 4, "max_steps_per_task": max_steps, "log_every": 1}
    whole = new_run(stream(), benchmark_of_three, name="whole", **settings)
    whole.trainer.fit()
    stopped = new_run(stream(), benchmark_of_three, name="parts", every=every, **settings)
    stop_in(stopped, task=1, step=2)
    again = new_run(stream(), benchmark_of_three, name="parts", goes_on=True, **settings)
    again.trainer.fit()
    one, two = tensors_of(whole.trainer.learner), tensors_of(again.trainer.learner)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert again.trainer.plans.planner.buffer.rows == whole.trainer.plans.planner.buffer.rows
    reports = [[record.learner_report for record in run.trainer.records] for run in (whole, again)]
    assert reports[0] == reports[1]


@pytest.mark.slow
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
    learner = new_learner("icarl", capacity=12)
    shown: list[Counter[int]] = []
    dataset = MultiViewDataset.__getitem__

    def noted(self: MultiViewDataset, key: tuple[int, int]) -> Any:
        while len(shown) <= self.task_index:
            shown.append(Counter())
        shown[self.task_index][int(self.rows[key[1]])] += 1
        return dataset(self, key)

    monkeypatch.setattr(MultiViewDataset, "__getitem__", noted)
    run = new_run(learner, benchmark_of_three, num_views=num_views, epochs=4)
    planned = [run.trainer.plans.num_steps(task) for task in benchmark_of_three.scenario.tasks]
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
        case if case == ("fdr", 2) else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(TEACHERS, [1, 2])
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
        return new_learner(name, on_resnet=True, **SETTINGS.get(name, {}))

    settings = {"num_views": 2, "log_every": 1}
    whole = new_run(fresh(), benchmark_of_three, name="whole", **settings)
    whole.trainer.fit()
    stopped = new_run(fresh(), benchmark_of_three, name="parts", every="1 steps", **settings)
    stop_in(stopped, task=1, step=step)
    again = new_run(fresh(), benchmark_of_three, name="parts", goes_on=True, **settings)
    again.trainer.fit()
    one, two = tensors_of(whole.trainer.learner), tensors_of(again.trainer.learner)
    assert list(one) == list(two)
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert whole.trainer.matrix.to_dict() == again.trainer.matrix.to_dict()


@pytest.mark.parametrize("name", ["agem", "fdr"])
def test_fit__gives_draws_a_pass_of_their_own(
    benchmark_of_three: Benchmark, new_learner: Callable[..., Learner], new_run: Callable[..., Any], name: str
) -> None:
    """One step by the projected gradient, or two; the buffer is what was chosen at the ends of tasks."""
    learner = new_learner(name, **SETTINGS[name])
    weights: list[Tensor] = []
    given: list[tuple[Tensor, Tensor, int]] = []
    drawn: list[set[int]] = []
    project_gradient, rehearse = learner.project_gradient, learner.rehearse

    def weights_now() -> Tensor:
        return torch.cat([p.detach().flatten() for g in learner.parameter_groups() for p in g.parameters])

    def projected(current: Tensor, past: Tensor) -> Tensor:
        given.append((current, past, len(weights)))
        return project_gradient(current, past)

    def noted(replay: Any) -> Any:
        held = learner.rehearsed_rows()
        drawn.append({int(held[slot]) for slot in replay.slots})
        return rehearse(replay)

    learner.after_step = lambda: weights.append(weights_now())
    learner.project_gradient, learner.rehearse = projected, noted
    plain = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant"}
    run = new_run(learner, benchmark_of_three, num_views=2, learning_rate=0.1, **plain)
    run.trainer.fit()
    num_steps = [record.num_steps for record in run.trainer.records]
    assert len(drawn) == sum(num_steps[1:])
    assert len(weights) == sum(num_steps) + (sum(num_steps[1:]) if name == "fdr" else 0)
    own = set(benchmark_of_three.training_rows(benchmark_of_three.scenario.tasks[0]).tolist())
    assert set.union(*drawn[: num_steps[1]]) <= own
    report = run.trainer.records[-1].learner_report["buffer"]
    assert report["per_class"] == {str(label): 1 for label in range(6)}
    assert report["replayed_images"] == 4 * num_steps[-1]
    for current, past, number in given[1:]:
        if len(weights[number]) == len(weights[number - 1]):
            step = -0.1 * project_gradient(current, past)
            torch.testing.assert_close(weights[number] - weights[number - 1], step, atol=1e-6, rtol=1e-4)
    assert bool(given) == (name == "agem")
    assert {"replay_loss", "replay_consistency"} <= run.events("step")[-1].keys()


@pytest.mark.parametrize(
    ("views_for", "views"),
    [pytest.param("all", (2, 2), marks=pytest.mark.slow), ("current", (2, 1)), ("buffer", (1, 2))],
)
def test_fit__gives_views_to_the_samples_that_shall_have_them(
    benchmark_of_three: Benchmark,
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    views_for: str,
    views: tuple[int, int],
) -> None:
    """As many images in any case, each sample of the task equally often, one offer to the reservoir for each visit."""
    learner = new_learner("er", capacity=6, draw_size=4)
    shown: list[tuple[Counter[int], int, int]] = []
    items = MultiViewDataset.__getitems__

    def noted(self: MultiViewDataset, part: Any) -> Any:
        batch = items(self, part)
        assert batch.num_views == views[0]
        rows = Counter(dict.fromkeys(batch.sample_ids.tolist(), batch.num_views))
        drawn = sum(draw.num_groups * draw.num_views for draw in batch.replays)
        assert all(draw.num_views == views[1] for draw in batch.replays)
        shown.append((rows, self.task_index, drawn))
        return batch

    monkeypatch.setattr(MultiViewDataset, "__getitems__", noted)
    run = new_run(learner, benchmark_of_three, num_views=2, epochs=4, view_batch={"views_for": views_for})
    run.trainer.fit()
    for task, record in zip(benchmark_of_three.scenario.tasks, run.trainer.records, strict=True):
        steps = [(rows, drawn) for rows, index, drawn in shown if index == task.index]
        assert len(steps) == record.num_steps == 4 * 2  # ten samples, eight images a step
        total = sum((rows for rows, _ in steps), Counter())
        assert total == dict.fromkeys(benchmark_of_three.training_rows(task).tolist(), 4)
        assert record.num_views == views[0]
        assert [drawn for _, drawn in steps[2:]] == [4] * 6
    assert run.trainer.records[-1].learner_report["buffer"]["stored"] == 6
    later = [step for step in run.events("step") if step["task"] > 0]
    assert min(step["consistency"] for step in later) > 0


@pytest.mark.parametrize(
    ("name", "views_for"),
    [
        case
        if case in (("icarl", "current"), ("bic", "buffer"))
        else pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product(MERGED, ["current", "buffer"])
    ],
)
def test_fit__of_merged_images_gives_views_to_one_kind(
    new_benchmark: Callable[..., Benchmark],
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    name: str,
    views_for: str,
) -> None:
    """Each image is shown as often as in the baseline, in as many steps; stopped and gone on it ends the same."""

    benchmark = new_benchmark([5] * 4, num_tasks=2)

    def fresh() -> Learner:
        return new_learner(name, num_tasks=2, **MERGED[name])

    settings = {"epochs": 4, "log_every": 1}
    mixed = settings | {"num_views": 2, "view_batch": {"views_for": views_for}}
    learner = fresh()
    shown: list[Counter[int]] = []
    dataset = MultiViewDataset.__getitem__

    def noted(self: MultiViewDataset, key: tuple[int, int]) -> Any:
        views, label, row = dataset(self, key)
        shown.extend(Counter() for _ in range(self.task_index + 1 - len(shown)))
        shown[self.task_index][row] += len(views)
        return views, label, row

    whole = new_run(learner, benchmark, name="whole", **mixed)
    planned = [whole.trainer.plans.num_steps(task) for task in benchmark.scenario.tasks]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(MultiViewDataset, "__getitem__", noted)
        whole.trainer.fit()
    plain = new_run(fresh(), benchmark, name="plain", **settings, num_views=1)
    plain.trainer.fit()
    records = whole.trainer.records
    assert [record.num_steps for record in records] == planned
    for record, baseline, images in zip(records, plain.trainer.records, shown, strict=True):
        assert record.num_steps == baseline.num_steps
        assert record.num_images == baseline.num_images
        assert set(images.values()) == {4}
        visits = (2, 2) if views_for == "current" else (4, 4)
        assert (record.min_visits, record.max_visits) == visits
        if record.task_index:
            about = record.learner_report["exemplars"]
            assert (about["min_visits"], about["max_visits"]) == (6 - visits[0],) * 2
            assert about["num_views"] * about["min_visits"] == 4
            # An image comes back after an epoch, a group after two.
            assert record.recall_interval["mean"] == pytest.approx(
                4 / visits[0] * record.num_samples, rel=0.25
            )
            assert about["recall_interval"]["mean"] == pytest.approx(
                about["num_views"] * record.num_samples, rel=0.25
            )
        else:
            assert "exemplars" not in record.learner_report
    later = [step for step in whole.events("step") if step["task"] > 0]
    assert sum(step["images"] for step in later) == sum(record.num_images for record in records[1:])
    assert max(step["consistency"] for step in later) > 0

    stopped = new_run(fresh(), benchmark, name="parts", every="1 steps", **mixed)
    stop_in(stopped, task=1, step=2)
    again = new_run(fresh(), benchmark, name="parts", goes_on=True, **mixed)
    again.trainer.fit()
    one, two = tensors_of(learner), tensors_of(again.trainer.learner)
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert [record.facts for record in again.trainer.records] == [record.facts for record in records]


def test_fit__goes_on_where_some_steps_have_nothing_with_views(
    benchmark_of_three: Benchmark, new_learner: Callable[..., Learner], new_run: Callable[..., Any]
) -> None:
    """Three groups of exemplars are shared by the four steps of an epoch, and read together."""
    run = new_run(
        new_learner("icarl", on_resnet=True, capacity=6),
        benchmark_of_three,
        num_views=2,
        epochs=2,
        batch_size=4,
        view_batch={"views_for": "buffer"},
    )
    run.trainer.fit()
    terms = [step["consistency"] for step in run.events("step") if step["task"] > 0]
    assert min(terms) == 0 < max(terms)


@pytest.mark.slow
@pytest.mark.parametrize("views_for", ["current", "buffer"])
def test_fit__of_merged_images_with_one_view_is_the_plain_method(
    benchmark_of_three: Benchmark,
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    views_for: str,
) -> None:
    learners = []
    for name in ("all", views_for):
        learner = new_learner("icarl", on_resnet=True, capacity=12)
        new_run(
            learner, benchmark_of_three, name=name, num_views=1, view_batch={"views_for": name}
        ).trainer.fit()
        learners.append(tensors_of(learner))
    assert all(torch.equal(learners[0][key], learners[1][key]) for key in learners[0])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        pytest.param("er", {"capacity": 6, "draw_size": 4}, marks=pytest.mark.slow),
        ("icarl", {"capacity": 12}),
    ],
)
def test_fit__of_view_batches_of_classes_rehearses(
    benchmark_of_three: Benchmark,
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    name: str,
    settings: dict[str, int],
) -> None:
    """VBM-C: an epoch holds a part of the classes, those of exemplars too, several times over, one view a time."""
    learner = new_learner(name, **settings)
    run = new_run(learner, benchmark_of_three, num_views=2, epochs=4, view_batch={"order": "class"})
    run.trainer.fit()
    for record in run.trainer.records:
        assert record.num_views == 1
        assert (record.min_visits, record.max_visits) == (4, 4)
        assert record.num_images == 4 * record.num_samples
        assert record.learner_report["buffer"]["stored"] >= 6
    assert [record.num_samples for record in run.trainer.records] == (
        [10, 20, 22] if name == "icarl" else [10] * 3
    )


def test_fit__with_one_view_is_the_plain_method_to_the_bit(
    benchmark_of_three: Benchmark, new_learner: Callable[..., Learner], new_run: Callable[..., Any]
) -> None:
    """Experience replay once more, by a loop that knows nothing of views, on the images of the run."""
    learner = new_learner("er", on_resnet=True, capacity=6, draw_size=4)
    steps: list[tuple[int, Tensor, Tensor]] = []

    def noted(module: Any, inputs: Any) -> None:
        images, labels, replays = inputs
        kinds = [(images, labels), *((replay.images, replay.labels) for replay in replays)]
        steps.append((learner.task.index, *(torch.cat(each) for each in zip(*kinds, strict=True))))

    learner.register_forward_pre_hook(noted)
    settings = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant"}
    run = new_run(learner, benchmark_of_three, learning_rate=0.05, **settings)
    run.trainer.fit()
    plain = new_learner("er", on_resnet=True, capacity=6, draw_size=4)
    for task in benchmark_of_three.scenario.tasks:
        with seeded(seed_for("begin_task", seed=0, task=task.index)):
            plain.begin_task(task)
        plain.train()
        optimizer = torch.optim.SGD([*plain.backbone.parameters(), *plain.head.parameters()], lr=0.05)
        for _, images, labels in (step for step in steps if step[0] == task.index):
            logits = plain.head(plain.backbone.features(images))
            optimizer.zero_grad()
            (F.cross_entropy(logits, labels, reduction="none").sum() * (1 / len(labels))).backward()
            optimizer.step()
    one, two = tensors_of(learner), tensors_of(plain)
    assert max(len(labels) for _, _, labels in steps) == 12
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
