"""Accuracy counts against scores that a test writes down.

Every test image shows its own row number, and the scripted learner looks its scores up by it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.loader_config import LoaderConfig
from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.acceleration import Precision, build_accelerator, loaders_for
from vbm_ptm.engine.confusion import confusion_facts
from vbm_ptm.engine.evaluator import Evaluation, Evaluator
from vbm_ptm.errors import TrainingError, UsageError
from vbm_ptm.learners.base import Learner, LearnerConfig
from vbm_ptm.metrics import AccuracyCell

RULED_OUT = -torch.inf


class Scripted(Learner):
    """Scores from a table (rows of the test split, classes), and what it was asked."""

    config_class = LearnerConfig

    # (rows of the test split, columns of the row's own task)
    experts: Tensor
    # (rows of the test split) whose expert has made the row of the table, if an expert has
    chosen: Tensor | None = None

    def __init__(self, backbone: PromptableViT, table: Tensor) -> None:
        super().__init__(backbone, LearnerConfig(name="scripted"), num_tasks=3)
        self.table = table
        self.asked: list[list[int]] = []
        self.asked_experts: list[int] = []
        self.modes: list[tuple[bool, bool, bool]] = []

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        rows = ((images[:, 0, 16, 16] * 0.25 + 0.5) * 255).round().long()
        self.asked.append(rows.tolist())
        self.modes.append((self.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return self.table[rows, : self.num_seen_classes]

    def predict_task(self, images: Tensor, task: Task) -> Tensor:
        rows = ((images[:, 0, 16, 16] * 0.25 + 0.5) * 255).round().long()
        self.asked_experts += rows.tolist()
        return self.experts[rows, : len(task.classes)]

    def query(self, images: Tensor) -> Tensor:
        return ((images[:, 0, 16, 16] * 0.25 + 0.5) * 255).round()[:, None]

    def chosen_tasks(self, query: Tensor) -> Tensor | None:
        return None if self.chosen is None else self.chosen[query[:, 0].long()]


@pytest.fixture
def judge(
    new_benchmark: Callable[..., Benchmark], tiny_backbones: dict[int, PromptableViT]
) -> Callable[..., tuple[list[AccuracyCell], Scripted]]:
    """Return a function that scores the test images of a benchmark by a table; what it measured, learner and tasks."""

    def run(
        test_sizes: Sequence[int],
        table: Tensor,
        *,
        after: int,
        batch_size: int = 3,
        mixed_precision: Precision = "no",
        experts: Tensor | None = None,
        chosen: Tensor | None = None,
        rules_out_classes: bool = False,
        learner_class: type[Scripted] = Scripted,
        change: Callable[[Task], Task] = lambda task: task,
        **scenario: Any,
    ) -> tuple[Evaluation, Scripted, list[Task]]:
        num_domains = len(scenario.get("domains", "x"))
        shades = [Image.new("RGB", (32, 32), (row,) * 3) for row in range(sum(test_sizes) * num_domains)]
        benchmark = new_benchmark(
            [1] * len(test_sizes), test_sizes=test_sizes, test_images=shades, **scenario
        )
        learner = learner_class(tiny_backbones[2], table)
        if experts is not None:
            learner.experts, learner.has_task_experts = experts, True  # type: ignore[misc]
            learner.chosen = chosen
        learner.rules_out_classes = rules_out_classes  # type: ignore[misc]
        for task in benchmark.scenario.tasks[: after + 1]:
            learner.begin_task(task)
        learner.train()
        accelerator = build_accelerator(device="cpu", mixed_precision=mixed_precision)
        loading = LoaderConfig(evaluation_batch_size=batch_size)
        evaluator = Evaluator(accelerator, loaders_for(accelerator, benchmark, loading))
        tasks = [change(task) for task in benchmark.scenario.seen_after(after)]
        return evaluator.judge(learner, tasks), learner, tasks

    return run


@pytest.fixture
def evaluate(judge: Callable[..., Any]) -> Callable[..., tuple[list[AccuracyCell], Scripted]]:
    """Return a function that scores the test images of a benchmark by a table and counts."""

    def run(*arguments: Any, **options: Any) -> tuple[list[AccuracyCell], Scripted]:
        judged, learner, _ = judge(*arguments, **options)
        return judged.cells, learner

    return run


def one_hot(predictions: Sequence[int], num_classes: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(predictions), num_classes).float()


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_evaluator__counts_each_test_image_once(evaluate: Callable[..., Any], batch_size: int) -> None:
    # Rows, class by class in turn: labels 0 1 2 3, 0 1 2, 0 2.
    predictions = [0, 0, 2, 3, 0, 1, 0, 3, 2]
    cells, learner = evaluate(
        [3, 2, 3, 1], one_hot(predictions, 4), after=1, batch_size=batch_size, num_tasks=2
    )
    assert sorted(row for batch in learner.asked for row in batch) == list(range(9))
    assert [(cell.total, cell.class_incremental_top1) for cell in cells] == [(5, 3), (4, 3)]


def test_confusion_facts__say_which_task_takes_over(judge: Callable[..., Any]) -> None:
    # Rows, class by class in turn: labels 0 1 2 3, 0 1 2, 0 2.
    predictions = [0, 0, 2, 3, 0, 1, 0, 3, 2]
    judged, _, tasks = judge([3, 2, 3, 1], one_hot(predictions, 4), after=1, num_tasks=2)
    assert judged.predictions.tolist() == [0, 0, 0, 1, 3, 2, 3, 0, 2]
    assert judged.labels.tolist() == [0, 1, 0, 1, 0, 2, 3, 2, 2]
    facts = confusion_facts(judged, seen=tasks, first_task=0)
    assert facts["task_confusion"] == [[4, 1], [1, 3]]
    assert facts["class_counts"] == [(2, 3), (1, 2), (2, 3), (1, 1)]


def test_confusion_facts__domains_share_their_classes(judge: Callable[..., Any]) -> None:
    table = one_hot([0, 0, 1, 0], 2)
    judged, _, tasks = judge([1, 1], table, after=1, domains=["a", "b"], kind="domain_incremental")
    facts = confusion_facts(judged, seen=tasks, first_task=0)
    assert facts == {"class_counts": [(2, 2), (1, 2)]}


def test_evaluator__looks_at_seen_tasks_only(evaluate: Callable[..., Any]) -> None:
    cells, learner = evaluate([1, 1, 1, 1], one_hot([0, 1, 2, 3], 4), after=0, num_tasks=2)
    assert sorted(row for batch in learner.asked for row in batch) == [0, 1]
    assert [cell.total for cell in cells] == [2]


def test_evaluator__measures_without_gradient_and_in_eval_mode(evaluate: Callable[..., Any]) -> None:
    _, learner = evaluate([1, 1], one_hot([0, 1], 2), after=0, num_tasks=1)
    assert learner.modes == [(False, False, False)]
    _, learner = evaluate([1, 1], one_hot([0, 1], 2).bfloat16(), after=0, num_tasks=1, mixed_precision="bf16")
    assert learner.modes == [(False, False, True)]


def test_evaluator__has_the_golden_accuracies_of_both_settings(evaluate: Callable[..., Any]) -> None:
    scores = torch.tensor(
        [[0.1, 0.9, 0.5, 0.4], [0.2, 0.1, 0.9, 0.3], [0.6, 0.1, 0.5, 0.2], [0.1, 0.2, 0.3, 0.4]]
    )
    cells, _ = evaluate([1, 1, 1, 1], scores, after=1, num_tasks=2)
    assert sum(cell.class_incremental_top1 for cell in cells) / 4 == 0.25
    assert sum(cell.task_incremental_top1 for cell in cells) / 4 == 0.5


def test_evaluator__task_incremental_is_the_best_of_the_own_columns(evaluate: Callable[..., Any]) -> None:
    scores = torch.tensor(
        [
            [1.0, 0.0, 5.0, 0.0],  # class 0: right among its own task's classes alone
            [9.0, 8.0, 0.0, 0.0],  # class 1: wrong in both ways
            [0.0, 0.0, 7.0, 6.0],  # class 2: right in both ways
            [9.0, 0.0, 1.0, 2.0],  # class 3: right among its own task's classes alone
        ]
    )
    cells, _ = evaluate([1, 1, 1, 1], scores, after=1, num_tasks=2)
    assert [cell.class_incremental_top1 for cell in cells] == [0, 1]
    assert [cell.task_incremental_top1 for cell in cells] == [1, 2]
    assert [cell.class_incremental_top5 for cell in cells] == [2, 2]


def test_evaluator__a_class_that_is_ruled_out_is_never_right(evaluate: Callable[..., Any]) -> None:
    scores = torch.tensor([[RULED_OUT, RULED_OUT, 0.0], [RULED_OUT, 1.0, 0.0], [RULED_OUT] * 3])
    cells, _ = evaluate([1, 1, 1], scores, after=1, task_sizes=(2, 1))
    first, second = cells
    assert (first.class_incremental_top1, first.class_incremental_top5) == (1, 1)
    assert (first.task_incremental_top1, first.task_incremental_top5) == (1, 1)
    assert (second.class_incremental_top5, second.task_incremental_top1) == (0, 0)


def test_evaluator__counts_the_expert_of_the_task_beside_the_usual_definition(
    evaluate: Callable[..., Any],
) -> None:
    scores = one_hot([0, 0, 2, 2], 4)  # by hand: classes 0 and 2 are right, 1 and 3 are taken for them
    experts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])  # by hand: 0, 1 and 3 are right
    options: dict[str, Any] = {"after": 1, "num_tasks": 2, "experts": experts}
    for batch_size in (1, 3):
        cells, _ = evaluate([1, 1, 1, 1], scores, batch_size=batch_size, **options)
        assert [cell.task_incremental_top1 for cell in cells] == [1, 1]
        assert [cell.task_expert_top1 for cell in cells] == [2, 1]
    cells, _ = evaluate([1, 0, 0, 0], scores, **options)
    assert [(cell.total, cell.task_expert_top1) for cell in cells] == [(1, 1), (0, 0)]


def test_evaluator__task_incremental_accuracy_is_the_expert_s_where_classes_are_ruled_out(
    evaluate: Callable[..., Any],
) -> None:
    """The session of rows 1 and 2 is guessed wrong, which task-incremental accuracy does not care for."""
    out = RULED_OUT
    scores = torch.tensor(
        [[1.0, 0.0, out, out], [out, out, 1.0, 0.0], [1.0, 0.0, out, out], [out, out, 1.0, 2.0]]
    )
    experts = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 2.0]])
    cells, _ = evaluate([1, 1, 1, 1], scores, after=1, num_tasks=2, experts=experts, rules_out_classes=True)
    assert [cell.class_incremental_top1 for cell in cells] == [1, 1]
    assert [cell.task_incremental_top1 for cell in cells] == [2, 1]
    assert [cell.task_expert_top1 for cell in cells] == [None, None]


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_evaluator__asks_no_expert_that_has_made_the_scores(
    evaluate: Callable[..., Any], batch_size: int
) -> None:
    """As above; the experts of rows 0 and 3, which were chosen, would answer NaN."""
    out, nan = RULED_OUT, torch.nan
    scores = torch.tensor(
        [[1.0, 0.0, out, out], [out, out, 1.0, 0.0], [1.0, 0.0, out, out], [out, out, 1.0, 2.0]]
    )
    experts = torch.tensor([[nan, nan], [0.0, 1.0], [0.0, 1.0], [nan, nan]])
    options = {"experts": experts, "chosen": torch.tensor([0, 1, 0, 1]), "batch_size": batch_size}
    cells, learner = evaluate([1, 1, 1, 1], scores, after=1, num_tasks=2, rules_out_classes=True, **options)
    assert [cell.class_incremental_top1 for cell in cells] == [1, 1]
    assert [cell.task_incremental_top1 for cell in cells] == [2, 1]
    assert sorted(learner.asked_experts) == [1, 2]


class Mixing(Scripted):
    """Its scores are no longer those of the chosen expert alone."""

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        return super().predict(images, query)


@pytest.mark.parametrize(("learner_class", "mixed_precision"), [(Mixing, "no"), (Scripted, "bf16")])
def test_evaluator__asks_all_experts_where_the_choice_does_not_tell(
    evaluate: Callable[..., Any], learner_class: type[Scripted], mixed_precision: Precision
) -> None:
    scores, experts = one_hot([0, 2, 2, 2], 4), one_hot([1, 1, 1, 1], 2)
    options = {"experts": experts, "chosen": torch.tensor([0, 1, 0, 1]), "learner_class": learner_class}
    cells, learner = evaluate(
        [1] * 4, scores, after=1, num_tasks=2, mixed_precision=mixed_precision, **options
    )
    assert sorted(learner.asked_experts) == [0, 1, 2, 3]
    assert [(cell.class_incremental_top1, cell.task_expert_top1) for cell in cells] == [(1, 1), (1, 1)]


@pytest.mark.parametrize("chosen", [None, torch.tensor([0, 0])])
def test_evaluator__names_the_method_that_returns_another_shape(
    evaluate: Callable[..., Any], chosen: Tensor | None
) -> None:
    options = {"experts": torch.zeros(2, 2), "chosen": chosen}
    with pytest.raises(UsageError, match=r"Learner.predict returned .*\(2, 1\) for 2 images and 2 classes"):
        evaluate([1, 1], torch.zeros(2, 1), after=0, num_tasks=1, **options)
    options["experts"] = torch.zeros(2, 1)
    with pytest.raises(UsageError, match=r"predict_task returned .*\(2, 1\) for 2 images and 2 classes"):
        evaluate([1, 1], torch.zeros(2, 2), after=0, num_tasks=1, **(options | {"chosen": None}))


def test_evaluator__joint_training_and_domains_ask_no_expert(evaluate: Callable[..., Any]) -> None:
    experts = torch.full((4, 4), torch.nan)
    cells, _ = evaluate(
        [1, 1, 2], one_hot([0, 0, 2, 2], 3), after=0, kind="joint", num_tasks=3, experts=experts
    )
    assert [(cell.task_incremental_top1, cell.task_expert_top1) for cell in cells] == [
        (1, None),
        (1, None),
        (2, None),
    ]
    cells, _ = evaluate(
        [1, 1], one_hot([0, 1, 1, 1], 2), after=1, kind="domain_incremental", domains=("photo", "sketch"),
        experts=experts,
    )  # fmt: skip
    assert [cell.task_expert_top1 for cell in cells] == [None, None]


def test_evaluator__tasks_without_test_images_have_empty_cells(evaluate: Callable[..., Any]) -> None:
    cells, _ = evaluate([2, 0, 1], one_hot([0, 2, 0], 3), after=2, num_tasks=3)
    assert [cell.total for cell in cells] == [2, 0, 1]
    assert [cell.class_incremental_top1 for cell in cells] == [2, 0, 1]
    cells, learner = evaluate([0, 0, 1], one_hot([0], 3), after=1, num_tasks=3)
    assert [cell.total for cell in cells] == [0, 0]
    assert learner.asked == []


def test_evaluator__refuses_to_report_images_that_were_not_counted_once(
    evaluate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts_of_rank = Loaders.parts_of_rank

    def padded(loaders: Loaders, rows: Any) -> Any:
        return parts_of_rank(loaders, np.append(rows, rows[:1]))

    monkeypatch.setattr(Loaders, "parts_of_rank", padded)
    with pytest.raises(
        TrainingError, match=r"\[3, 3\] test images .* over 1 ranks, but the data set holds \[2, 2\]"
    ):
        evaluate([1, 1, 1, 1], one_hot([0, 1, 2, 3], 4), after=1, num_tasks=2)


def test_evaluator__overwritten_task_numbers_change_nothing(evaluate: Callable[..., Any]) -> None:
    def forget(task: Task) -> Task:
        return replace(task, index=0)

    options: dict[str, Any] = {"after": 2, "num_tasks": 3}
    table = one_hot([0, 1, 1, 2, 0, 2], 3)
    assert evaluate([2, 2, 2], table, change=forget, **options)[0] == evaluate([2, 2, 2], table, **options)[0]


def test_evaluator__domains_share_classes_and_have_no_task_incremental_accuracy(
    evaluate: Callable[..., Any],
) -> None:
    # Rows: class 0 in both domains, class 1 in both domains.
    cells, learner = evaluate(
        [1, 1], one_hot([0, 1, 1, 1], 2), after=1, kind="domain_incremental", domains=("photo", "sketch")
    )
    assert [(cell.total, cell.class_incremental_top1) for cell in cells] == [(2, 2), (2, 1)]
    assert [cell.task_incremental_top1 for cell in cells] == [None, None]
    assert sorted(row for batch in learner.asked for row in batch) == [0, 1, 2, 3]


def test_evaluator__joint_training_is_measured_on_the_tasks_that_it_bounds(
    evaluate: Callable[..., Any],
) -> None:
    cells, _ = evaluate([1, 1, 2], one_hot([0, 0, 2, 2], 3), after=0, kind="joint", num_tasks=3)
    assert [(cell.total, cell.class_incremental_top1) for cell in cells] == [(1, 1), (1, 0), (2, 2)]
    assert [cell.task_incremental_top1 for cell in cells] == [1, 1, 2]


@pytest.mark.parametrize(("name", "num_loaded"), [("linear_probe", [4, 4, 4]), ("l2p", [4, 8, 12])])
def test_evaluator__computes_a_query_once_and_loads_no_image_for_nothing(
    new_learner: Callable[..., Learner],
    benchmark_of_three: Benchmark,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    num_loaded: list[int],
) -> None:
    """Three tasks of four test images: what an evaluation finds is what one without a past finds."""
    learner, accelerator = new_learner(name), build_accelerator(device="cpu")
    loaders = loaders_for(accelerator, benchmark_of_three, LoaderConfig(evaluation_batch_size=3))
    evaluator = Evaluator(accelerator, loaders)
    queries, images = [], []
    query, decode = learner.backbone.query, type(benchmark_of_three.datasets.test).image
    monkeypatch.setattr(
        learner.backbone, "query", lambda batch: (queries.append(len(batch)), query(batch))[1]
    )
    monkeypatch.setattr(
        type(benchmark_of_three.datasets.test),
        "image",
        lambda split, row: (images.append(row), decode(split, row))[1],
    )
    for task in benchmark_of_three.scenario.tasks:
        learner.begin_task(task)
        queries.clear(), images.clear()
        seen = benchmark_of_three.scenario.seen_after(task.index)
        cells = evaluator.judge(learner, seen).cells
        assert queries == [3, 1]
        assert len(images) == num_loaded[task.index]
        assert cells == Evaluator(accelerator, loaders).judge(learner, seen).cells


def test_evaluator__keeps_the_parts_of_a_query_that_grows(
    new_learner: Callable[..., Learner], benchmark_of_three: Benchmark, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EASE: of the subspaces of earlier tasks an image is encoded in each one once."""
    learner, accelerator = new_learner("ease"), build_accelerator(device="cpu")
    loaders = loaders_for(accelerator, benchmark_of_three, LoaderConfig(evaluation_batch_size=3))
    evaluator, encoded = Evaluator(accelerator, loaders), Counter[int]()
    query_part = learner.query_part

    def counted(images: torch.Tensor, number: int) -> torch.Tensor:
        encoded[number] += len(images)
        return query_part(images, number)

    monkeypatch.setattr(learner, "query_part", counted)
    for task, expected in zip(
        benchmark_of_three.scenario.tasks, ({0: 4}, {0: 4, 1: 8}, {0: 4, 1: 4, 2: 12}), strict=True
    ):
        learner.begin_task(task)
        learner._finish()
        for prototypes in learner.prototypes:
            nn.init.normal_(prototypes.of_classes)
        for parameter in learner.experts[-1].parameters():
            nn.init.normal_(parameter, std=0.1)
        encoded.clear()
        seen = benchmark_of_three.scenario.seen_after(task.index)
        cells = evaluator.judge(learner, seen).cells
        assert encoded == expected
        assert cells == Evaluator(accelerator, loaders).judge(learner, seen).cells
