"""What an own learner is told before the first step, and at the end of a task, when it breaks the contract."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.engine.contract import RESERVED_TERMS, broken_scores, check_finite, check_parameters
from vbm_ptm.errors import TrainingError, UsageError
from vbm_ptm.learners.base import Features, Learner, LearnerOutput, ParameterGroup, TaskStatistics
from vbm_ptm.learners.linear_probe import LinearProbe
from vbm_ptm.storage.log_reader import LogReader

NewRun = Callable[..., Any]
Refuse = Callable[..., str]


class Own(LinearProbe):
    """A linear probe whose faults are given as functions."""

    groups: Callable[[Own], list[ParameterGroup]] | None = None
    change: Callable[[Own, LearnerOutput], LearnerOutput] | None = None
    end: Callable[[Own], None] | None = None

    def parameter_groups(self) -> list[ParameterGroup]:
        return type(self).groups(self) if type(self).groups else super().parameter_groups()

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        output = super().forward(images, labels)
        return type(self).change(self, output) if type(self).change else output

    def end_task(self, task: Any, features: Features) -> None:
        if type(self).end:
            type(self).end(self)


@pytest.fixture
def own(new_learner: Callable[..., Learner]) -> Callable[..., Own]:
    def make(**faults: Any) -> Own:
        learner = new_learner("linear_probe")
        learner.__class__ = type("Own", (Own,), faults)
        assert isinstance(learner, Own)
        return learner

    return make


@pytest.fixture
def refuse(own: Callable[..., Own], benchmark_of_three: Benchmark, new_run: NewRun) -> Refuse:
    """Return a function that trains a faulty learner and returns the message; no step may have been taken."""

    def message(*, kind: type[Exception] = UsageError, learner: Own | None = None, **faults: Any) -> str:
        learner = learner or own(**faults)
        run = new_run(learner, benchmark_of_three, log_every=1)
        with pytest.raises(kind) as caught:
            run.trainer.fit()
        steps = [step for step in run.events("step") if step["task"] == learner.task.index]
        assert not steps
        return str(caught.value)

    return message


def heads_of(learner: Own) -> list[nn.Parameter]:
    return learner.heads.trainable_parameters()


class TestParameters:
    def test_check__names_a_parameter_that_no_group_has(self, refuse: Refuse) -> None:
        said = refuse(groups=lambda learner: [ParameterGroup("heads", heads_of(learner)[:1])])
        assert "'heads.tasks.0.bias'" in said
        assert "in no group" in said
        assert "weight" not in said

    def test_check__names_a_parameter_that_two_groups_have(self, refuse: Refuse) -> None:
        said = refuse(
            groups=lambda learner: [
                ParameterGroup("heads", heads_of(learner)),
                ParameterGroup("biases", heads_of(learner)[1:]),
            ]
        )
        assert "parameter 'heads.tasks.0.bias': in more than one group" in said

    def test_check__names_a_frozen_parameter_in_a_group(self, refuse: Refuse) -> None:
        said = refuse(
            groups=lambda learner: [
                ParameterGroup("heads", heads_of(learner)),
                ParameterGroup("norm", [learner.backbone.vit.norm.weight]),
            ]
        )
        assert "parameter 'backbone.vit.norm.weight': in a group but frozen" in said

    def test_check__names_a_group_of_strange_parameters_and_equal_names(self, refuse: Refuse) -> None:
        strange = nn.Parameter(torch.zeros(2))
        said = refuse(
            groups=lambda learner: [
                ParameterGroup("heads", heads_of(learner)[:1]),
                ParameterGroup("heads", heads_of(learner)[1:]),
                ParameterGroup("strange", [strange]),
            ]
        )
        assert "group 'strange': with parameters that are not the learner's own" in said
        assert "group 'heads': more than one" in said

    def test_check__says_all_faults_at_once(
        self, own: Callable[..., Own], benchmark_of_three: Benchmark
    ) -> None:
        learner = own(groups=lambda learner: [ParameterGroup("heads", heads_of(learner)[:1] * 2)])
        learner.begin_task(benchmark_of_three.scenario.tasks[0])
        with pytest.raises(UsageError) as caught:
            check_parameters(learner)
        assert len(caught.value.problems) == 2

    def test_check__names_a_parameter_that_is_registered_twice(
        self, own: Callable[..., Own], benchmark_of_three: Benchmark
    ) -> None:
        learner = own()
        learner.begin_task(benchmark_of_three.scenario.tasks[0])
        check_parameters(learner)
        learner.again = nn.ParameterList(heads_of(learner)[:1])
        with pytest.raises(
            UsageError, match=r"'heads\.tasks\.0\.weight = again\.0': one parameter under several"
        ):
            check_parameters(learner)


class TestTerms:
    @pytest.mark.parametrize(
        "name", ["cross_entropy", "consistency", "loss", "accuracy", "gradient_norm", "step"]
    )
    def test_check__refuses_a_name_that_is_taken(self, refuse: Refuse, name: str) -> None:
        said = refuse(change=lambda _, output: output._replace(auxiliary={name: output.logits.sum()}))
        assert f"'{name}'" in said.partition(",")[0]

    def test_reserved_terms__are_all_that_the_log_of_a_step_holds(
        self, own: Callable[..., Own], benchmark_of_three: Benchmark, new_run: NewRun
    ) -> None:
        learner = own(change=lambda _, output: output._replace(auxiliary={"mine": output.logits.sum() * 0}))
        run = new_run(learner, benchmark_of_three, num_views=2)
        run.trainer.fit()
        events = LogReader(run.log_path).read()
        keys = {key for event in events if event["event"] == "step" for key in event}
        # "supervised" takes the place of the cross-entropy where a learner brings a loss of its own.
        assert keys - {"mine"} | {"supervised"} == RESERVED_TERMS

    def test_check__refuses_a_name_that_comes_later(
        self, own: Callable[..., Own], benchmark_of_three: Benchmark, new_run: NewRun
    ) -> None:
        calls: list[int] = []

        def late(_: Own, output: LearnerOutput) -> LearnerOutput:
            calls.append(1)
            return output._replace(auxiliary={"loss": output.logits.sum()} if len(calls) > 1 else {})

        with pytest.raises(UsageError, match="'loss'"):
            new_run(own(change=late), benchmark_of_three).trainer.fit()


class TestOutput:
    def test_check__names_a_class_without_a_column(self, refuse: Refuse) -> None:
        def first_only(_: Own, output: LearnerOutput) -> LearnerOutput:
            return output._replace(logits=output.logits[:, :1], columns=output.columns[:1])

        said = refuse(change=first_only)
        assert re.search(r"no column for 'class \d', class index 1, of task 1", said)

    def test_check__compares_the_shape_of_logits(self, refuse: Refuse) -> None:
        said = refuse(change=lambda _, output: output._replace(logits=output.logits[:, :1]))
        assert "logits is (8, 1), but must be (8, 2)" in said

    def test_check__compares_the_shape_of_terms(self, refuse: Refuse) -> None:
        said = refuse(change=lambda _, output: output._replace(auxiliary={"pull": output.logits}))
        assert "'pull' is (8, 2), but must be (8,)" in said

    def test_check__refuses_two_columns_of_a_class(self, refuse: Refuse) -> None:
        def twice(_: Own, output: LearnerOutput) -> LearnerOutput:
            return LearnerOutput(output.logits.repeat(1, 2), output.columns.repeat(2), {})

        assert "more than one column for 'class" in refuse(change=twice)

    def test_check__blames_old_columns_that_are_set_to_minus_infinity(
        self, refuse: Refuse, benchmark_of_three: Benchmark
    ) -> None:
        def ruled_out(learner: Own, output: LearnerOutput) -> LearnerOutput:
            old = learner.num_seen_classes - len(learner.task.new_classes)
            rows = output.logits.new_full((len(output.logits), old), -torch.inf)
            columns = learner.columns(range(learner.num_seen_classes), output.columns.device)
            return LearnerOutput(torch.cat([rows, output.logits], dim=1), columns, {})

        said = refuse(kind=FloatingPointError, change=ruled_out)
        first = benchmark_of_three.scenario.class_names[0]
        newest = benchmark_of_three.scenario.class_names[benchmark_of_three.scenario.tasks[1].new_classes[0]]
        assert "first forward of task 2" in said
        assert f"'{first}'" in said
        assert f"'{newest}'" not in said
        assert "learning_rate" not in said

    def test_check__blames_a_term_that_is_not_finite(self, refuse: Refuse) -> None:
        def broken(_: Own, output: LearnerOutput) -> LearnerOutput:
            return output._replace(auxiliary={"good": output.logits.sum(), "pull": output.logits.sum() / 0})

        said = refuse(kind=FloatingPointError, change=broken)
        assert "the auxiliary term 'pull'" in said
        assert "columns of" not in said


class TestEndOfTask:
    @pytest.mark.parametrize(
        ("steepness", "where"),
        [
            (1e10, r"after training on task 1, .*'heads\.tasks\.0\.weight'"),
            (
                1.0,
                r"the scores of \d+ test images are NaN or infinite: 'test/",
            ),  # of weights that are finite
        ],
    )
    def test_fit__stops_where_the_last_step_has_diverged(
        self,
        own: Callable[..., Own],
        benchmark_of_three: Benchmark,
        new_run: NewRun,
        steepness: float,
        where: str,
    ) -> None:
        def steeper(_: Own, output: LearnerOutput) -> LearnerOutput:
            output.logits.register_hook(lambda gradient: gradient * steepness)
            return output

        run = new_run(own(change=steeper), benchmark_of_three, learning_rate=3e38, max_steps_per_task=1)
        with pytest.raises(FloatingPointError, match=where):
            run.trainer.fit()
        assert run.store.tasks() == []

    def test_fit__stops_where_the_end_of_the_task_leaves_no_numbers(
        self, own: Callable[..., Own], benchmark_of_three: Benchmark, new_run: NewRun
    ) -> None:
        def end(learner: Own) -> None:
            learner.statistics[str(learner.task.index)] = TaskStatistics(
                {"mean": torch.tensor([1.0, torch.nan])}
            )

        with pytest.raises(FloatingPointError, match=r"after the end of task 1, .*'statistics\.0\.mean'"):
            new_run(own(end=end), benchmark_of_three).trainer.fit()

    def test_fit__stops_where_statistics_of_an_earlier_task_change(
        self, own: Callable[..., Own], benchmark_of_three: Benchmark, new_run: NewRun
    ) -> None:
        def end(learner: Own) -> None:
            for earlier in learner.tasks[:-1]:
                learner.statistics_of(earlier)["mean"].add_(0.1)
            learner.statistics[str(learner.task.index)] = TaskStatistics({"mean": torch.zeros(2)})

        run = new_run(own(end=end), benchmark_of_three)
        with pytest.raises(TrainingError, match=r"end of task 2 has changed .*'statistics\.0\.mean'"):
            run.trainer.fit()
        assert run.store.tasks() == [0]

    def test_check_finite__takes_integers(self) -> None:
        check_finite({"count": torch.tensor([3]), "is_used": torch.tensor([True])}, when="now")


def test_broken_scores__let_classes_be_ruled_out() -> None:
    inf = torch.inf
    scores = torch.tensor([[0.0, -inf], [-inf, -inf], [0.0, inf], [torch.nan, 0.0]])
    assert broken_scores(scores).tolist() == [False, False, True, True]


def test_predict__of_too_few_classes_is_named(
    own: Callable[..., Own], benchmark_of_three: Benchmark, new_run: NewRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict = LinearProbe.predict
    monkeypatch.setattr(Own, "predict", lambda *arguments: predict(*arguments)[:, :1])
    with pytest.raises(UsageError, match=r"scores of shape \(\d+, 1\) for \d+ images and \d+ classes"):
        new_run(own(), benchmark_of_three).trainer.fit()
