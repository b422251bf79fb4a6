"""The training loop on small real images: what a run does, counts, writes and leaves behind."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import depth_for
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.parameters import parameter_counts
from vbm_ptm.errors import TrainingInterrupted, UsageError
from vbm_ptm.learners import list_learners
from vbm_ptm.learners.base import Learner, LearnerOutput
from vbm_ptm.randomness import seed_for, seeded
from vbm_ptm.storage.checkpoint_state import RunState
from vbm_ptm.storage.task_record import TaskRecord

NewBenchmark = Callable[..., Benchmark]
NewLearner = Callable[..., Learner]
NewRun = Callable[..., Any]


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def are_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def fitted(run: Any) -> dict[str, Tensor]:
    """Train to the end; return the learner's tensors."""
    run.trainer.fit()
    return tensors_of(run.trainer.learner)


def untimed(records: list[TaskRecord]) -> list[dict[str, Any]]:
    return [asdict(record.facts) for record in records]


def stopped_at(learner: Learner, task: int, step: int | None) -> None:
    """Let SIGTERM come in a training step of a task, counted from 1, or at its end."""
    forward, rehearse, end_task, calls = learner.forward, learner.rehearse, learner.end_task, []

    def in_a_step(images: Tensor, labels: Tensor, *replays: Any) -> LearnerOutput:
        calls.append(learner.task.index)
        if calls.count(task) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return forward(images, labels, *replays)

    def in_a_pass_of_draws(replay: Any) -> LearnerOutput:
        learner.forward = forward  # type: ignore[method-assign]
        output = rehearse(replay)
        learner.forward = in_a_step  # type: ignore[method-assign]
        return output

    def at_the_end(now: Any, features: Any) -> None:
        if step is None and now.index == task:
            os.kill(os.getpid(), signal.SIGTERM)
        end_task(now, features)

    learner.forward, learner.end_task = in_a_step, at_the_end  # type: ignore[method-assign]
    learner.rehearse = in_a_pass_of_draws  # type: ignore[method-assign]


class TestCounts:
    @pytest.mark.parametrize("num_views", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
    def test_fit__visits_each_sample_once_per_cycle(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun, num_views: int
    ) -> None:
        """Ten samples a task, eight images a step: two steps an epoch, with any number of views."""
        run = new_run(new_learner("finetune"), benchmark_of_three, num_views=num_views, epochs=4, log_every=3)
        run.trainer.fit()
        assert [record.task_index for record in run.trainer.records] == [0, 1, 2]
        for record in run.trainer.records:
            assert record.num_samples == 10
            assert record.num_views == num_views
            assert record.num_steps == 4 * math.ceil(10 / 8)
            assert record.min_visits == record.max_visits == 4 // num_views
            assert record.num_images == 4 * 10  # the same budget for the baseline and for more views
        steps = run.events("step")
        assert len(steps) == 3 * 8
        assert all(step["images"] == step["groups"] * step["views"] <= 8 for step in steps)
        assert {step["views"] for step in steps} == {num_views}
        positions = [(step["task"], step["epoch"], step["step"]) for step in steps]
        assert positions == [(t, e, s) for t in range(3) for e in range(4) for s in range(2)]
        terms = {"loss", "cross_entropy", "accuracy"} | ({"consistency"} if num_views > 1 else set())
        assert terms <= set(steps[0])
        assert ("consistency" in steps[0]) == (num_views > 1)

    def test_fit__parts_of_the_classes_show_every_sample_as_often_as_one_view(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        """Two classes of five samples: an epoch shows one of them, twice."""
        run = new_run(
            new_learner("finetune"), benchmark_of_three, num_views=2, epochs=4, view_batch={"order": "class"}
        )
        run.trainer.fit()
        for record in run.trainer.records:
            assert (record.num_views, record.num_images, record.num_steps) == (1, 4 * 10, 4 * 2)
            assert record.min_visits == record.max_visits == 4
        steps = run.events("step")
        assert {step["views"] for step in steps} == {1}
        assert "consistency" not in steps[0]

    @pytest.mark.parametrize(
        ("learner", "roles"),
        [("l2p", ("query", "pull")), pytest.param("dualprompt", ("pull",), marks=pytest.mark.slow)],
    )
    def test_fit__the_weak_view_may_choose_and_pull_for_its_group(
        self,
        benchmark_of_three: Benchmark,
        new_learner: NewLearner,
        new_run: NewRun,
        learner: str,
        roles: Any,
    ) -> None:
        pulls = []
        for number, given in enumerate(({}, {f"{role}_view": "weak" for role in roles})):
            run = new_run(
                new_learner(learner, depth=6), benchmark_of_three, num_views=2, name=f"run {number}",
                max_steps_per_task=1, log_every=1, view_batch=given,
            )  # fmt: skip
            run.trainer.fit()
            pulls.append(run.events("step")[0]["pull"])
        assert pulls[0] != pulls[1]
        assert pulls[0] == pytest.approx(pulls[1], abs=0.2)

    def test_fit__partial_cycles_are_counted(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        run = new_run(new_learner("finetune"), benchmark_of_three, num_views=2, epochs=3)
        run.trainer.fit()
        assert {(record.min_visits, record.max_visits) for record in run.trainer.records} == {(1, 2)}

    def test_fit__tells_the_learning_rate_of_every_group(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        learner = new_learner("slca", alignment_epochs=1)
        run = new_run(
            learner,
            benchmark_of_three,
            epochs=3,
            learning_rate=0.01,
            schedule="multistep",
            milestones=(2,),
        )
        run.trainer.fit()
        for step in run.events("step"):
            factor = 0.1 if step["epoch"] == 2 else 1.0
            expected = {"backbone": 1e-4 * factor, "heads": 1e-2 * factor}
            assert step["learning_rates"] == pytest.approx(expected)
        begun = run.events("begin_task")
        in_backbone = sum(parameter.numel() for parameter in learner.backbone.parameters())
        assert [event["parameters"]["backbone"] for event in begun] == [in_backbone] * 3
        assert [event["parameters"]["heads"] for event in begun] == [2 * 49] * 3
        assert [event["parameters"]["frozen"] for event in begun] == [0, 2 * 49, 4 * 49]

    @pytest.mark.parametrize("limit", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 100))])
    def test_fit__stops_each_task_at_the_limit(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun, limit: int
    ) -> None:
        run = new_run(new_learner("finetune"), benchmark_of_three, max_steps_per_task=limit)
        run.trainer.fit()
        assert [record.num_steps for record in run.trainer.records] == [min(limit, 4)] * 3
        assert len(run.trainer.matrix.rows) == 3
        if limit == 1:
            assert run.trainer.records[0].min_visits == 0

    def test_fit__tiny_tasks_take_at_least_one_step(
        self,
        new_benchmark: NewBenchmark,
        new_learner: NewLearner,
        new_run: NewRun,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Tasks smaller than a batch and smaller than the number of views; nothing is dropped."""
        benchmark = new_benchmark([6, 6, 1, 1, 2, 1], num_tasks=3)
        learner = new_learner("finetune")
        begin_task = learner.begin_task
        states: list[dict[str, Tensor]] = []

        def remembering(task: Any) -> None:
            begin_task(task)
            states.append(tensors_of(learner.backbone))

        learner.begin_task = remembering
        run = new_run(learner, benchmark, num_views=4, batch_size=64, epochs=4)
        run.trainer.fit()
        records = run.trainer.records
        assert [record.num_samples for record in records] == [12, 2, 3]
        assert [record.num_views for record in records] == [4, 2, 3]
        said = [message for message in caplog.messages if "views in place of" in message]
        assert said == [f"task {n} has {m} samples: {m} views in place of 4" for n, m in ((2, 2), (3, 3))]
        assert [record.num_steps for record in records] == [4, 4, 4]
        assert [record.num_images for record in records] == [4 * 12, 4 * 2, 4 * 3]
        assert [(record.min_visits, record.max_visits) for record in records] == [(1, 1), (2, 2), (1, 2)]
        states.append(tensors_of(learner.backbone))
        assert [are_equal(one, two) for one, two in itertools.pairwise(states)] == [False] * 3
        assert [len(row) for row in run.trainer.matrix.rows] == [1, 2, 3]

    @pytest.mark.parametrize(
        ("name", "expected"), [("linear_probe", ["task 2 has one class"]), ("nearest_mean", [])]
    )
    def test_fit__says_that_a_task_of_one_class_has_nothing_to_tell_apart(
        self,
        new_benchmark: NewBenchmark,
        new_learner: NewLearner,
        new_run: NewRun,
        caplog: pytest.LogCaptureFixture,
        name: str,
        expected: list[str],
    ) -> None:
        new_run(new_learner(name, num_tasks=2), new_benchmark([3, 3, 3], task_sizes=(2, 1))).trainer.fit()
        said = [message.partition(":")[0] for message in caplog.messages if "class" in message]
        assert said == expected


PROMPT_LEARNERS = {"l2p", "dualprompt", "coda_prompt", "s_prompt_pp"}


@pytest.mark.slow
class TestReproducibility:
    @pytest.mark.parametrize(("name", "scale"), [("finetune", 1.0), ("slca", 0.01)])
    def test_fit__with_one_view_is_a_plain_loop(
        self, new_benchmark: NewBenchmark, new_learner: NewLearner, new_run: NewRun, name: str, scale: float
    ) -> None:
        """Bitwise equal to what anyone would write: a loader, a head per task, cross-entropy, SGD."""
        benchmark = new_benchmark([5, 6, 4, 5], num_tasks=2)
        learner = new_learner(name, num_tasks=2)
        vit = copy.deepcopy(learner.backbone.vit)
        optimization = {"learning_rate": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
        run = new_run(learner, benchmark, seed=3, **optimization)
        run.trainer.fit()

        train, heads, normalization = benchmark.datasets.train, [], benchmark.transforms.normalization
        for task, classes in enumerate(((0, 1), (2, 3))):
            weight, bias = torch.empty(2, 48), torch.zeros(2)
            with seeded(seed_for("begin_task", seed=3, task=task)):
                nn.init.trunc_normal_(weight, std=0.02)
            head = [weight.requires_grad_(), bias.requires_grad_()]
            optimizer = torch.optim.SGD(
                [{"params": list(vit.parameters()), "lr": 0.05 * scale}, {"params": head, "lr": 0.05}],
                momentum=0.9,
                weight_decay=5e-4,
            )
            rows = [row for row, label in enumerate(train.labels) if label in classes]
            for epoch in range(2):
                dataset = []
                for row in rows:
                    view_seed = seed_for("view", seed=3, task=task, epoch=epoch, sample=row)
                    with seeded(view_seed):
                        view = benchmark.transforms.weak(train.image(row))
                    # As torchvision prepares each image on the host; a run does it for a whole step on its device.
                    values = v2.functional.to_dtype(view, torch.float32, scale=True)
                    values = v2.functional.normalize(
                        values, list(normalization.mean), list(normalization.std)
                    )
                    dataset.append((values, train.labels[row] - classes[0]))
                shuffle = torch.Generator()
                shuffle.manual_seed(seed_for("sampler", seed=3, task=task, epoch=epoch))
                order = torch.randperm(len(rows), generator=shuffle).tolist()
                for images, labels in DataLoader(dataset, sampler=order, batch_size=8):
                    logits = F.linear(vit.forward_features(images)[:, 0], *head)
                    loss = F.cross_entropy(logits, labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            heads.append(head)

        assert are_equal(tensors_of(vit), tensors_of(learner.backbone.vit))
        for head, (weight, bias) in zip(learner.heads.tasks, heads, strict=True):
            assert torch.equal(head.weight, weight)
            assert torch.equal(head.bias, bias)

    def test_fit__tells_how_long_images_were_waited_for(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        run = new_run(new_learner("finetune"), benchmark_of_three)
        run.trainer.fit()
        lines = [json.loads(line) for line in run.log_path.read_text().splitlines()]
        for record in run.trainer.records:
            waited = [
                line["data_seconds"]
                for line in lines
                if line["event"] == "step" and line["task"] == record.task_index
            ]
            assert len(waited) == record.num_steps
            assert min(waited) > 0
            assert record.data_seconds == pytest.approx(sum(waited), abs=1e-3)
            assert record.data_seconds <= record.step_seconds <= record.training_seconds
            assert record.peak_memory_bytes is not None
            assert record.peak_memory_bytes > 2**20

    def test_fit__does_not_depend_on_how_often_it_is_read(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        """Nor on what the global generators hold when it starts."""
        states = []
        for number, log_every in enumerate((1, 3, 1000)):
            torch.rand(number)
            np.random.rand(number)
            learner = new_learner("slca")
            run = new_run(learner, benchmark_of_three, log_every=log_every, num_views=2, name=str(number))
            states.append((fitted(run), [{**step, "event": ""} for step in run.events("step")]))
        for state, steps in states[1:]:
            assert are_equal(state, states[0][0])
            assert steps == states[0][1]

    def test_fit__depends_on_the_seed(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        one, same, other = (
            fitted(new_run(new_learner("finetune"), benchmark_of_three, seed=seed, name=str(number)))
            for number, seed in enumerate((1, 1, 2))
        )
        assert are_equal(one, same)
        assert not any(torch.equal(one[name], other[name]) for name in one if "weight" in name)

    def test_fit__prepares_each_task_once_before_its_first_step(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        """Also where the run is stopped inside a task and goes on."""

        def preparing(learner: Learner, seen: list[tuple[int, bool, int, Tensor]]) -> Learner:
            def prepare(task: Task, features: Any) -> None:
                count = int(features.sum(lambda images: {"images": torch.tensor(len(images))})["images"])
                seen.append((task.index, learner.training, count, torch.randn(())))
                learner.heads.tasks[task.index].bias.data.fill_(features()[0].mean())

            learner.__class__ = type(
                "Preparing", (type(learner),), {"prepare_task": lambda self, *a: prepare(*a)}
            )
            return learner

        whole: list[tuple[int, bool, int, Tensor]] = []
        expected = fitted(
            new_run(preparing(new_learner("linear_probe"), whole), benchmark_of_three, name="whole")
        )
        assert [facts[:3] for facts in whole] == [(0, False, 10), (1, False, 10), (2, False, 10)]
        assert len({float(drawn) for *_, drawn in whole}) == 3
        parts: list[tuple[int, bool, int, Tensor]] = []
        learner = preparing(new_learner("linear_probe"), parts)
        run = new_run(learner, benchmark_of_three)
        stopped_at(learner, 1, 2)
        with run.stop.listening(), pytest.raises(TrainingInterrupted):
            run.trainer.fit()
        learner = preparing(new_learner("linear_probe"), parts)
        assert are_equal(fitted(new_run(learner, benchmark_of_three, goes_on=True)), expected)
        assert parts == whole

    def test_fit__seeds_whatever_a_learner_draws(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        """In every step and at the end of a task, from the position in the run alone."""
        learner = new_learner("finetune")
        forward, drawn = learner.forward, []

        def drawing(images: Tensor, labels: Tensor) -> LearnerOutput:
            drawn.append(torch.rand(1).item())
            return forward(images, labels)

        learner.forward = drawing
        learner.end_task = lambda task, features: drawn.append(torch.rand(1).item())
        new_run(learner, benchmark_of_three, seed=4).trainer.fit()
        expected = []
        for task in range(3):
            purposes = [
                seed_for("step", seed=4, task=task, epoch=epoch, sample=step)
                for epoch in range(2)
                for step in range(2)
            ]
            for seed in [*purposes, seed_for("end_task", seed=4, task=task)]:
                with seeded(seed):
                    expected.append(torch.rand(1).item())
        assert drawn == expected

    def test_fit__nonsense_in_the_test_split_changes_no_weight(
        self, new_benchmark: NewBenchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        honest = new_benchmark([5] * 4, num_tasks=2)
        nonsense = new_benchmark([5] * 4, num_tasks=2, test_sizes=[7, 0, 1, 3])
        nonsense.datasets.test.labels[:] = nonsense.datasets.test.labels[::-1].copy()
        runs = [
            new_run(new_learner("slca"), benchmark, name=name)
            for name, benchmark in (("honest", honest), ("nonsense", nonsense))
        ]
        one, two = (fitted(run) for run in runs)
        assert are_equal(one, two)
        files = [(run.store.directory / "task_01" / "learner.safetensors").read_bytes() for run in runs]
        assert files[0] == files[1]
        assert runs[0].trainer.matrix.to_dict() != runs[1].trainer.matrix.to_dict()

    @pytest.mark.parametrize("learner_name", list_learners())
    def test_fit__goes_on_as_if_it_had_not_stopped(
        self,
        benchmark_of_three: Benchmark,
        new_learner: NewLearner,
        new_run: NewRun,
        learner_name: str,
    ) -> None:
        """Stopped after task 0, inside an epoch of task 1, at the end of task 1, and inside task 2.

        What trains in the first task alone is stopped inside that, too.
        """

        def fresh() -> Learner:
            return new_learner(learner_name, depth=depth_for(learner_name))

        optimizer = "adam" if learner_name in PROMPT_LEARNERS else "sgd"
        settings = {"num_views": 2, "optimizer": optimizer, "log_every": 3}
        whole = new_run(fresh(), benchmark_of_three, name="whole", **settings)
        expected = fitted(whole)
        trained_tasks = whole.trainer.learner.config.trained_tasks
        all_places: dict[str, list[tuple[int, int | None]]] = {
            "all": [(1, 3), (1, None), (2, 1)],
            "first": [(1, None)],
            "none": [(1, None)],
        }
        if trained_tasks == "first":
            for step in (3, None):
                learner = fresh()
                run = new_run(learner, benchmark_of_three, goes_on=step is None, **settings)
                stopped_at(learner, 0, None if step is None else step)
                with run.stop.listening(), pytest.raises(TrainingInterrupted):
                    run.trainer.fit()
                assert run.trainer.progress.saved_steps == (step or 4)
        first = new_run(
            fresh(),
            benchmark_of_three,
            stop_after_task=1,
            goes_on=trained_tasks == "first",
            **settings,
        )
        with pytest.raises(TrainingInterrupted, match="after task 1 as planned"):
            first.trainer.fit()
        for task, step in all_places[trained_tasks]:
            learner = fresh()
            run = new_run(learner, benchmark_of_three, goes_on=True, **settings)
            done = run.trainer.progress.saved_steps if len(run.trainer.records) == task else 0
            stopped_at(learner, task, None if step is None else step - done)
            with run.stop.listening(), pytest.raises(TrainingInterrupted):
                run.trainer.fit()
            assert len(run.trainer.records) == task
            all_steps = run.trainer.plans.num_steps(benchmark_of_three.scenario.tasks[task])
            assert run.trainer.progress.saved_steps == (step or all_steps)
        last = new_run(fresh(), benchmark_of_three, goes_on=True, **settings)
        assert are_equal(fitted(last), expected)
        assert last.trainer.matrix.to_dict() == whole.trainer.matrix.to_dict()
        assert untimed(last.trainer.records) == untimed(whole.trainer.records)
        for name in ("begin_task", "step"):
            assert last.events(name) == whole.events(name)
        assert [path.name for path in last.store.newest_first()] == [
            path.name for path in whole.store.newest_first()
        ]
        for file in ("task_02/learner.safetensors", "statistics/task_02.safetensors"):
            if (whole.store.directory / file).exists():
                one, two = ((run.store.directory / file).read_bytes() for run in (whole, last))
                assert one == two

    @pytest.mark.parametrize(
        "view_batch", [{}, {"order": "class", "strong_share": 0.5}], ids=["sample", "class"]
    )
    def test_fit__goes_on_from_wherever_it_saved_itself(
        self,
        benchmark_of_three: Benchmark,
        new_learner: NewLearner,
        new_run: NewRun,
        view_batch: dict[str, Any],
    ) -> None:
        """As after SIGKILL between two steps: each checkpoint inside a task, found as the newest one."""
        settings = {"num_views": 2, "epochs": 3, "view_batch": view_batch}
        whole = new_run(new_learner("finetune"), benchmark_of_three, every="1 step", **settings)
        directory, copies = whole.store.directory.parent, []
        save = whole.store.save_inside_task

        def copied(*arguments: Any, **options: Any) -> None:
            save(*arguments, **options)
            copies.append(f"copy {len(copies)}")
            shutil.copytree(directory, directory.with_name(copies[-1]))

        whole.store.save_inside_task = copied
        expected = fitted(whole)
        assert len(copies) == 3 * 6
        for name in copies[6:12:2]:  # of task 1
            run = new_run(new_learner("finetune"), benchmark_of_three, name=name, goes_on=True, **settings)
            assert are_equal(fitted(run), expected)
            assert run.events("step") == whole.events("step")
            assert untimed(run.trainer.records) == untimed(whole.trainer.records)

    def test_state__holds_the_gradient_scaler(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        """It lives as long as the run; half precision itself needs a GPU."""
        run = new_run(new_learner("nearest_mean"), benchmark_of_three)
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        state = RunState.model_validate(json.loads(json.dumps(run.trainer.progress.state().to_json())))
        run.accelerator.scaler = torch.amp.GradScaler("cpu")
        run.trainer.progress.load_state(state, {})
        assert run.accelerator.scaler.get_scale() == 128.0

    def test_load_state__says_where_ranks_or_threads_differ(
        self,
        benchmark_of_three: Benchmark,
        new_learner: NewLearner,
        new_run: NewRun,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        trainer = new_run(new_learner("nearest_mean"), benchmark_of_three).trainer
        monkeypatch.setattr(logging.getLogger("vbm_ptm"), "propagate", True)
        trainer.progress.load_state(trainer.progress.state(), {})
        assert not caplog.messages
        trainer.progress.load_state(
            trainer.progress.state().model_copy(update={"num_ranks": 8, "num_threads": 99}), {}
        )
        assert {message.split(":")[0] for message in caplog.messages} == {
            "num_ranks was 8 and is 1 now",
            "num_threads was 99 and is 1 now",
        }


class TestStopping:
    def test_fit__names_the_first_step_that_is_not_finite(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        learner = new_learner("finetune")
        forward, calls = learner.forward, []

        def poisoned(images: Tensor, labels: Tensor) -> LearnerOutput:
            output = forward(images, labels)
            calls.append(len(learner.tasks))
            # The third step of the second task: epoch 1, step 0. The weights are NaN from then on.
            factor = math.nan if calls.count(2) == 3 else 1.0
            return output._replace(logits=output.logits * factor)

        learner.forward = poisoned
        run = new_run(learner, benchmark_of_three, epochs=3, log_every=100)
        with pytest.raises(
            FloatingPointError,
            match=r"the loss is not .* task 2, epoch 2, step 1: loss nan.*Finished tasks are saved",
        ):
            run.trainer.fit()
        assert run.store.tasks() == [0]
        assert len(run.trainer.records) == len(run.trainer.matrix.rows) == 1
        last = run.events("step")[-1]
        assert (last["task"], last["epoch"], last["step"]) == (1, 0, 1)

    def test_fit__names_the_gradient_and_the_images_if_the_loss_is_finite(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        learner = new_learner("linear_probe")
        forward, calls = learner.forward, []

        def poisoned(images: Tensor, labels: Tensor) -> LearnerOutput:
            output = forward(images, labels)
            calls.append(labels)
            if len(calls) == 6:  # the second step of the second task
                output.logits.register_hook(lambda gradient: gradient * math.inf)
            return output

        learner.forward = poisoned
        run = new_run(learner, benchmark_of_three, log_every=100)
        message = r"the gradient is not finite in task 2, epoch 1, step 2: loss \d.*gradient_norm nan.*rows\) (.*)\. F"
        with pytest.raises(FloatingPointError, match=message) as caught:
            run.trainer.fit()
        rows = re.search(message, str(caught.value)).group(1)
        train = benchmark_of_three.datasets.train
        assert [train.labels[int(row)] for row in rows.split(", ")] == calls[5].tolist()
        assert run.store.tasks() == [0]

    @pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_fit__a_signal_stops_it_between_two_steps(
        self,
        benchmark_of_three: Benchmark,
        new_learner: NewLearner,
        new_run: NewRun,
        number: int,
        exit_code: int,
    ) -> None:
        learner = new_learner("finetune")
        forward, calls = learner.forward, []

        def asked_to_stop(images: Tensor, labels: Tensor) -> LearnerOutput:
            calls.append(len(learner.tasks))
            if calls.count(2) == 2:
                os.kill(os.getpid(), number)
            return forward(images, labels)

        learner.forward = asked_to_stop
        run = new_run(learner, benchmark_of_three, log_every=1)
        with run.stop.listening(), pytest.raises(TrainingInterrupted) as caught:
            run.trainer.fit()
        assert caught.value.exit_code == exit_code
        assert run.store.tasks() == [0]
        assert [step["step"] for step in run.events("step") if step["task"] == 1] == [0, 1]
        assert run.store.newest_first()[0].name == "last_000006"
        assert run.trainer.progress.describe() == "1 of 3 tasks are finished, task 2 after 2 of 4 steps"


class TestOptimization:
    def test_fit__clips_the_gradient(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        """One step of plain SGD moves all parameters together by rate x norm, and no further than the limit."""
        learner = new_learner("finetune")
        begun: list[list[Tensor]] = []
        forward = learner.forward

        def remembering(images: Tensor, labels: Tensor) -> LearnerOutput:
            begun.append([parameter.detach().clone() for parameter in learner.parameters()])
            return forward(images, labels)

        learner.forward = remembering
        run = new_run(
            learner,
            benchmark_of_three,
            max_steps_per_task=1,
            momentum=0.0,
            learning_rate=0.5,
            clip_gradient_norm=0.01,
            stop_after_task=1,
        )
        with pytest.raises(TrainingInterrupted):
            run.trainer.fit()
        moved = torch.cat(
            [(one - two).flatten() for one, two in zip(begun[0], learner.parameters(), strict=True)]
        )
        assert moved.norm().item() == pytest.approx(0.5 * 0.01, rel=1e-3)

    def test_fit__is_finished_where_it_is_to_stop_after_the_last_task(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        run = new_run(new_learner("nearest_mean"), benchmark_of_three, stop_after_task=3)
        run.trainer.fit()
        assert len(run.trainer.records) == 3

    def test_fit__starts_every_task_with_a_fresh_optimizer(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        """With a rate of almost nothing in task 1, momentum of task 0 would be the only thing that moves."""
        learner = new_learner("finetune")
        run = new_run(learner, benchmark_of_three, stop_after_task=1)
        with pytest.raises(TrainingInterrupted):
            run.trainer.fit()
        before = tensors_of(learner.backbone)
        recipe = run.trainer.recipe
        optimization = recipe.optimization.model_copy(update={"learning_rate": 1e-30})
        run.trainer.recipe = replace(recipe, optimization=optimization)
        run.stop.after_task = 2
        with pytest.raises(TrainingInterrupted):
            run.trainer.fit()
        assert are_equal(tensors_of(learner.backbone), before)


@pytest.mark.slow
class TestEveryLearner:
    @pytest.mark.parametrize("learner_name", list_learners())
    @pytest.mark.parametrize("scenario", ["unequal", "domains", "joint"])
    def test_fit__runs_every_learner_in_every_scenario(
        self,
        new_benchmark: NewBenchmark,
        new_learner: NewLearner,
        new_run: NewRun,
        learner_name: str,
        scenario: str,
    ) -> None:
        benchmarks: dict[str, Any] = {
            "unequal": lambda: new_benchmark([1, 2, 5, 3], task_sizes=(1, 2, 1)),
            "domains": lambda: new_benchmark([2, 3], kind="domain_incremental", domains=("a", "b", "c")),
            "joint": lambda: new_benchmark([2, 3, 2], kind="joint", num_tasks=3),
        }
        benchmark = benchmarks[scenario]()
        learner = new_learner(
            learner_name, num_tasks=len(benchmark.scenario.tasks), depth=depth_for(learner_name)
        )
        if scenario == "domains" and not learner.takes_domains:
            with pytest.raises(UsageError, match="domain_incremental"):
                new_run(learner, benchmark).trainer.fit()
            return
        modes: list[bool] = []
        end_task = learner.end_task

        def watched(task: Any, features: Any) -> None:
            modes.append(any(module.training for module in learner.modules()))
            values, labels, sample_ids = features()
            assert sample_ids.tolist() == benchmark.training_rows(task).tolist()
            assert set(labels.tolist()) == set(task.classes)
            assert values.shape[0] == len(labels)
            assert values.shape[1] % 48 == 0
            end_task(task, features)

        learner.end_task = watched
        run = new_run(learner, benchmark, num_views=2, epochs=2)
        run.trainer.fit()
        assert modes == [False] * len(benchmark.scenario.tasks)
        assert [len(row) for row in run.trainer.matrix.rows] == ([3] if scenario == "joint" else [1, 2, 3])
        total = sum(cell.total for cell in run.trainer.matrix.rows[-1])
        assert total == len(benchmark.datasets.test)
        for record in run.trainer.records:
            is_trained = learner.config.trains(record.task_index)
            assert (record.num_steps > 0) == is_trained
            assert (record.max_visits > 0) == is_trained
        if scenario == "joint" and learner.config.trains(0):
            (record,) = run.trainer.records
            assert record.num_samples == 7  # all tasks in one
            assert record.num_images == 2 * 7

    # LwF has no past image for a head that all classes share, A-GEM and FDR do not learn the labels of those that they
    # have: over all classes they stay near chance, as published for LwF and A-GEM, in so few steps.
    @pytest.mark.parametrize(
        "learner_name", sorted(set(list_learners()) - {"lwf", "lwf_mc", "agem", "agem_r", "fdr"})
    )
    def test_fit__every_learner_beats_chance(
        self, new_benchmark: NewBenchmark, new_learner: NewLearner, new_run: NewRun, learner_name: str
    ) -> None:
        benchmark = new_benchmark([6] * 8, test_sizes=[4] * 8, num_tasks=4)
        learner = new_learner(learner_name, num_tasks=4, depth=6)
        optimizer = "adam" if learner_name in PROMPT_LEARNERS else "sgd"
        run = new_run(learner, benchmark, num_views=2, epochs=6, learning_rate=0.01, optimizer=optimizer)
        run.trainer.fit()
        assert run.trainer.matrix.curve()[-1] > 1.5 * 100 / 8

    def test_fit__alignment_keeps_old_tasks_alive(
        self, new_benchmark: NewBenchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        """Alignment never reaches training, so both runs have the same backbone and the same features."""
        benchmark = new_benchmark([6] * 6, test_sizes=[6] * 6, num_tasks=3)
        correct, backbones = [], []
        for epochs in (0, 5):
            learner = new_learner("slca", alignment_epochs=epochs)
            run = new_run(learner, benchmark, epochs=6, learning_rate=0.01, name=str(epochs))
            run.trainer.fit()
            backbones.append(tensors_of(learner.backbone))
            correct.append(sum(cell.class_incremental_top1 for cell in run.trainer.matrix.rows[-1][:-1]))
        without, aligned = correct
        assert are_equal(*backbones)
        assert aligned > without
        assert aligned > 12

    @pytest.mark.parametrize("learner_name", list_learners())
    def test_parameter_counts__add_up(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, learner_name: str
    ) -> None:
        learner = new_learner(learner_name, depth=depth_for(learner_name))
        learner.begin_task(benchmark_of_three.scenario.tasks[0])
        counts = parameter_counts(learner)
        assert sum(counts.values()) == sum(parameter.numel() for parameter in learner.parameters())
        assert set(counts) == {"frozen", *(group.name for group in learner.parameter_groups())}


@pytest.mark.slow
class TestManyTasks:
    def test_fit__twenty_tasks_keep_nothing_of_the_ones_before(
        self, new_benchmark: NewBenchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        benchmark = new_benchmark([2] * 20, test_sizes=[0] * 20, num_tasks=20)
        run = new_run(
            *(new_learner("finetune", num_tasks=20), benchmark),
            epochs=1,
            batch_size=2,
            every="1 step",
            num_workers=1,
        )
        counts: list[tuple[int, ...]] = []
        save = run.store.save

        def counted(learner: Learner, state: Any) -> Any:
            gc.collect()
            objects = [type(thing) for thing in gc.get_objects()]
            accelerator = run.accelerator
            counts.append(
                (
                    len(accelerator._models) + len(accelerator._optimizers) + len(accelerator._dataloaders),
                    sum(issubclass(kind, torch.optim.Optimizer) for kind in objects),
                    sum(kind.__name__ == "_TrainingForward" for kind in objects),
                    sum(issubclass(kind, DataLoader) for kind in objects),
                    len(multiprocessing.active_children()),
                )
            )
            return save(learner, state)

        run.store.save = counted
        run.trainer.fit()
        assert len(counts) == 20
        assert counts[1] == counts[19]
        assert counts[19][0] == counts[19][-1] == 0
        assert run.trainer.matrix.curve()[-1] is None  # no test image anywhere


class TestReports:
    def test_fit__prints_a_line_per_epoch_and_task(
        self,
        benchmark_of_three: Benchmark,
        new_learner: NewLearner,
        new_run: NewRun,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        new_run(new_learner("finetune"), benchmark_of_three, num_views=2).trainer.fit()
        lines = capsys.readouterr().err.splitlines()
        assert re.fullmatch(
            r"parameters: trained [\d,]+ \(backbone [\d,]+, heads 98\); frozen 0", lines.pop(0)
        )
        assert len(lines) == 3 * (2 + 1)
        assert lines[0].startswith("task 1/3 · epoch 1/2 · loss ")
        assert "consistency" in lines[0]
        assert lines[2].startswith("task 1/3 done: 2 classes, 10 samples, 4 steps, 20 images, ")
        assert "1 visit of 2 views" in lines[2]

    def test_fit__tells_trackers_everything_in_rising_steps(
        self, benchmark_of_three: Benchmark, new_learner: NewLearner, new_run: NewRun
    ) -> None:
        """Some trackers drop what comes at a lower step than what they have."""

        class Recorder:
            name = "recorder"

            def __init__(self) -> None:
                self.lines: list[tuple[int, set[str]]] = []
                self.pictures: set[int] = set()

            def log(self, values: dict[str, float], step: int) -> None:
                self.lines.append((step, set(values)))

            def log_images(self, values: dict[str, Any], step: int) -> None:
                self.pictures.add(step)

        for name in ("finetune", "nearest_mean"):
            recorder = Recorder()
            run = new_run(new_learner(name), benchmark_of_three, log_every=3, name=name)
            run.accelerator.trackers = [recorder]
            run.trainer.fit()
            steps = [step for step, _ in recorder.lines]
            assert steps == sorted(set(steps))
            accuracies = [step for step, names in recorder.lines if names == {"accuracy_over_seen_classes"}]
            assert len(accuracies) == 3
            assert recorder.pictures == set(accuracies)
            assert len(steps) == (3 if name == "nearest_mean" else 3 * 3 + 3)
