"""The accuracy matrix against stored and hand-computed numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vbm_ptm.engine.counting import count_correct
from vbm_ptm.metrics import AccuracyCell, AccuracyMatrix
from vbm_ptm.storage.summary import summary

GOLDEN = Path(__file__).parent / "golden"
NO_IMAGES = AccuracyCell(0, 0, 0)


def matrix_of(*rows: list[int], totals: list[int] | None = None) -> AccuracyMatrix:
    """Build a matrix from top-1 counts; out of 100 images unless totals say otherwise."""
    totals = totals or [100] * len(rows[-1])
    return AccuracyMatrix(
        [AccuracyCell(total, correct, total) for correct, total in zip(row, totals, strict=False)]
        for row in rows
    )


@pytest.fixture(name="golden")
def golden_metrics() -> dict[str, Any]:
    values: dict[str, Any] = json.loads((GOLDEN / "metrics.json").read_text())
    return values


@pytest.fixture(name="golden_matrix")
def matrix_of_the_golden_counts(golden: dict[str, Any]) -> AccuracyMatrix:
    rows = [
        [count for count in row if count is not None] for row in golden["correct_rows_after_task_cols_task"]
    ]
    return matrix_of(*rows, totals=golden["test_samples_per_task"])


class TestAccuracyMatrix:
    def test_accuracy_matrix__equals_the_fixture(
        self, golden: dict[str, Any], golden_matrix: AccuracyMatrix
    ) -> None:
        numbers = summary(golden_matrix)["class_incremental"]["top1"]
        accuracies = golden["accuracy_percent_rows_after_task_cols_task"]
        assert numbers["matrix"] == [[value for value in row if value is not None] for row in accuracies]
        assert numbers["curve"] == pytest.approx(golden["accuracy_after_each_task_sample_weighted"])
        assert numbers["curve_task_mean"] == pytest.approx(golden["accuracy_after_each_task_task_mean"])
        expected_average = golden["average_incremental_accuracy"]
        assert numbers["average_incremental_accuracy"] == pytest.approx(expected_average)
        assert numbers["last_accuracy"] == pytest.approx(golden["last_accuracy"])
        assert numbers["forgetting"] == pytest.approx(golden["forgetting"])
        assert numbers["backward_transfer"] == pytest.approx(golden["backward_transfer"])

    def test_forgetting__takes_the_maximum_over_earlier_rows_only(self) -> None:
        """The usual errors give 15.0 (last row in the maximum) or 8.33 (divided by T)."""
        matrix = matrix_of([90], [70, 80], [60, 85, 50])
        assert matrix.forgetting() == pytest.approx(12.5)
        assert matrix.backward_transfer() == pytest.approx(-12.5)

    def test_forgetting__can_be_negative_for_a_task(self) -> None:
        """Rows [90], [80,85], [84,88,70]: (90 - 84 + 85 - 88) / 2."""
        assert matrix_of([90], [80, 85], [84, 88, 70]).forgetting() == pytest.approx(1.5)
        assert matrix_of([50], [60, 50]).forgetting() == pytest.approx(-10)

    def test_forgetting__is_none_for_one_task(self) -> None:
        matrix = matrix_of([90])
        assert matrix.forgetting() is None
        assert matrix.backward_transfer() is None
        assert matrix.last() == 90.0

    def test_backward_transfer__starts_at_the_tasks_own_row(self) -> None:
        """Unlike forgetting it ignores the better middle row: (60 - 70 + 85 - 80) / 2."""
        assert matrix_of([70], [90, 80], [60, 85, 50]).backward_transfer() == pytest.approx(-2.5)

    def test_curve__pools_images_or_averages_tasks(self) -> None:
        matrix = matrix_of([90], [90, 210], totals=[100, 300])
        assert matrix.curve() == (90.0, 75.0)
        assert matrix.curve(weighting="task_mean") == (90.0, 80.0)
        assert matrix.last() == 75.0
        assert matrix.average_incremental() == pytest.approx(82.5)
        assert matrix.average_incremental(weighting="task_mean") == pytest.approx(85.0)

    def test_curve__differs_by_hand_computable_amounts_for_test_sizes_4_4_40(self) -> None:
        matrix = matrix_of([4], [3, 4], [2, 3, 10], totals=[4, 4, 40])
        assert matrix.curve() == pytest.approx((100, 87.5, 31.25))
        assert matrix.curve(weighting="task_mean") == pytest.approx((100, 87.5, 50))

    def test_accuracy_matrix__leaves_tasks_without_test_images_out_and_says_so(self) -> None:
        matrix = AccuracyMatrix(
            [
                [NO_IMAGES],
                [NO_IMAGES, AccuracyCell(10, 9, 10)],
                [NO_IMAGES, AccuracyCell(10, 6, 10), AccuracyCell(30, 30, 30)],
            ]
        )
        named = summary(matrix)
        numbers = named["class_incremental"]["top1"]
        assert numbers["matrix"] == [[None], [None, 90.0], [None, 60.0, 100.0]]
        assert numbers["curve"] == [None, 90.0, 90.0]
        assert numbers["curve_task_mean"] == [None, 90.0, 80.0]
        assert numbers["average_incremental_accuracy"] == 90.0
        assert numbers["forgetting"] == pytest.approx(30)
        assert numbers["backward_transfer"] == pytest.approx(-30)
        assert named["tasks_without_test_images"] == [0]
        assert named["note"] == "without test images and left out of all means: task 1"

    def test_accuracy_matrix__without_any_test_image_has_no_numbers(self) -> None:
        numbers = summary(AccuracyMatrix([[NO_IMAGES], [NO_IMAGES, NO_IMAGES]]))["class_incremental"]["top1"]
        assert numbers["last_accuracy"] is None
        assert numbers["average_incremental_accuracy"] is None
        assert numbers["forgetting"] is None

    def test_accuracy_matrix__of_no_task_has_no_numbers(self) -> None:
        assert AccuracyMatrix().last() is None
        assert AccuracyMatrix().average_incremental() is None

    def test_accuracy_matrix__takes_one_row_of_all_tasks_for_joint_training(self) -> None:
        matrix = matrix_of([90, 60, 30], totals=[100, 100, 200])
        assert matrix.last() == pytest.approx(45)
        assert matrix.last(weighting="task_mean") == pytest.approx(55)
        assert matrix.average_incremental() == pytest.approx(45)
        assert matrix.forgetting() is None
        assert matrix.accuracy(0, 2) == pytest.approx(15)

    def test_accuracy_matrix__keeps_scopes_and_top_k_apart(self) -> None:
        cells = [AccuracyCell(10, 4, 8, 6, 10), AccuracyCell(10, 5, 9, 7, 10)]
        matrix = AccuracyMatrix([cells[:1], cells])
        assert matrix.last() == 45.0
        assert matrix.last(top=5) == 85.0
        assert matrix.last(scope="task_incremental") == 65.0
        assert matrix.last(top=5, scope="task_incremental") == 100.0
        assert summary(matrix)["task_incremental"]["top1"]["last_accuracy"] == 65.0

    def test_accuracy_matrix__has_no_task_incremental_numbers_where_tasks_share_classes(self) -> None:
        matrix = matrix_of([90], [80, 70])
        assert summary(matrix)["task_incremental"] is None
        assert matrix.last(scope="task_incremental") is None

    def test_accuracy_matrix__survives_json_exactly(self, golden_matrix: AccuracyMatrix) -> None:
        text = json.dumps(golden_matrix.to_dict())
        again = AccuracyMatrix.from_dict(json.loads(text))
        assert again.rows == golden_matrix.rows
        assert again.rows[3][2] == AccuracyCell(800, 728, 800)
        assert summary(again) == summary(golden_matrix)
        assert json.loads(json.dumps(summary(golden_matrix))) == summary(golden_matrix)

    def test_accuracy_matrix__does_not_round(self) -> None:
        assert matrix_of([1], totals=[3]).last() == 100 / 3

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([[]], "at least one"),
            ([[NO_IMAGES], [NO_IMAGES]], "row 1 has 1 tasks after a row of 1"),
            (
                [[AccuracyCell(4, 1, 2)], [AccuracyCell(5, 1, 2), NO_IMAGES]],
                "had 4 test images and now has 5",
            ),
        ],
    )
    def test_add_row__refuses_rows_that_do_not_follow(
        self, rows: list[list[AccuracyCell]], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            AccuracyMatrix(rows)


class TestAccuracyCell:
    @pytest.mark.parametrize(
        "counts", [(3, 4, 4), (3, 2, 1), (3, -1, 1), (3, 1, 2, 3, 2), (3, 1, 2, 1, None), (3, 1, 2, None, 1)]
    )
    def test_accuracy_cell__refuses_impossible_counts(self, counts: tuple[Any, ...]) -> None:
        with pytest.raises(ValueError, match="top-1"):
            AccuracyCell(*counts)

    def test_accuracy_cell__adds_up(self) -> None:
        assert AccuracyCell(3, 1, 2, 2, 3) + AccuracyCell(2, 1, 1, 1, 2) == AccuracyCell(5, 2, 3, 3, 5)
        assert AccuracyCell(3, 1, 2) + AccuracyCell(2, 1, 1) == AccuracyCell(5, 2, 3)


class TestCountCorrect:
    def test_count_correct__counts_both_scopes(self) -> None:
        scores = torch.tensor([[0.1, 0.2, 0.9], [0.8, 0.7, 0.1], [0.5, 0.6, 0.9], [0.9, 0.1, 0.3]])
        labels = torch.tensor([2, 1, 1, 0])
        assert count_correct(scores, labels, task_classes=(1, 2)) == AccuracyCell(4, 2, 4, 2, 3)

    def test_count_correct__counts_what_it_is_given_for_the_task(self) -> None:
        scores = torch.tensor([[0.9, 0.1, 0.2], [0.9, 0.3, 0.2]])
        labels, own, expert = torch.tensor([2, 1]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.eye(2)
        cell = count_correct(scores, labels, task_classes=(1, 2), expert_scores=expert)
        assert (cell.class_incremental_top1, cell.task_incremental_top1, cell.task_expert_top1) == (0, 2, 0)
        cell = count_correct(scores, labels, task_classes=(2, 1), own_scores=own.flip(1))
        assert (cell.class_incremental_top1, cell.task_incremental_top1, cell.task_expert_top1) == (
            0,
            2,
            None,
        )
        both = count_correct(scores, labels, task_classes=(1, 2), expert_scores=own)
        assert both + both == AccuracyCell(4, 0, 4, 4, 4, 4, 4)

    def test_count_correct__has_no_task_incremental_counts_without_own_classes(self) -> None:
        cell = count_correct(torch.eye(3), torch.arange(3), task_classes=None)
        assert cell == AccuracyCell(3, 3, 3)

    def test_count_correct__counts_the_five_best(self) -> None:
        scores = torch.arange(7.0).repeat(7, 1)
        cell = count_correct(scores, torch.arange(7), task_classes=range(7))
        assert cell == AccuracyCell(7, 1, 5, 1, 5)

    def test_count_correct__counts_everything_among_the_five_best_of_three(self) -> None:
        cell = count_correct(torch.randn(8, 3), torch.arange(8) % 3, task_classes=range(3))
        assert cell.class_incremental_top5 == 8

    def test_count_correct__never_counts_a_class_that_is_ruled_out(self) -> None:
        scores = torch.tensor([[1.0, -torch.inf, -torch.inf]]).repeat(3, 1)
        cell = count_correct(scores, torch.tensor([0, 1, 2]), task_classes=(1, 2))
        assert cell == AccuracyCell(3, 1, 1, 0, 0)

    def test_count_correct__never_counts_a_class_that_is_not_seen_yet_or_nan(self) -> None:
        scores = torch.tensor([[0.0, 1.0], [torch.nan, 1.0]])
        assert count_correct(scores, torch.tensor([5, 0]), task_classes=None) == AccuracyCell(2, 0, 0)

    def test_count_correct__gives_a_tie_to_the_lower_class(self) -> None:
        cell = count_correct(torch.zeros(3, 6), torch.tensor([0, 0, 5]), task_classes=None)
        assert cell == AccuracyCell(3, 2, 2)

    def test_count_correct__takes_no_images(self) -> None:
        cell = count_correct(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), task_classes=(0, 1))
        assert cell == AccuracyCell(0, 0, 0, 0, 0)


def test_matrix__a_gap_is_no_number_and_no_number_hides_it() -> None:
    """Row 2 measures its own task alone: what needs the other two is unknown, what does not stays."""
    full = [[AccuracyCell(4, 3, 4)], [AccuracyCell(4, 2, 4), AccuracyCell(4, 4, 4)]]
    matrix = AccuracyMatrix(full)
    matrix.add_row([AccuracyCell(8, 6, 8)], first_task=2)
    assert matrix.rows == (*AccuracyMatrix(full).rows, (None, None, AccuracyCell(8, 6, 8)))
    assert matrix.curve() == matrix.curve(weighting="task_mean") == (75.0, 75.0, None)
    assert matrix.accuracy(2, 2) == 75.0
    assert matrix.accuracy(2, 0) is None
    numbers = (matrix.last(), matrix.average_incremental(), matrix.forgetting(), matrix.backward_transfer())
    assert numbers == (None, None, None, None)
    assert AccuracyMatrix(full).average_incremental() == 75.0
    assert summary(matrix)["rows_with_gaps"] == [2]
    assert "not all tasks were measured after task 3: " in summary(matrix)["note"]
    assert AccuracyMatrix.from_dict(json.loads(json.dumps(matrix.to_dict()))).rows == matrix.rows


def test_matrix__of_its_last_row_alone_knows_nothing_of_the_rows_before() -> None:
    cells = [AccuracyCell(4, 1, 2), AccuracyCell(4, 3, 4)]
    matrix = AccuracyMatrix([[None], cells])
    assert matrix.rows == ((None,), tuple(cells))
    assert (matrix.curve(), matrix.last()) == ((None, 50.0), 50.0)
    assert (matrix.average_incremental(), matrix.forgetting()) == (None, None)
    own = AccuracyMatrix([[None]])
    own.add_row(cells[1:], first_task=1)
    assert (own.rows, own.last(), own.accuracy(1, 1)) == (((None,), (None, cells[1])), None, 75.0)


def test_matrix__a_gap_hides_only_what_needs_it() -> None:
    """Task 0 was not measured after task 1: its best earlier accuracy is not known, its first one is."""
    matrix = AccuracyMatrix(
        [[AccuracyCell(4, 4, 4)], [None, AccuracyCell(4, 2, 4)], [AccuracyCell(4, 1, 4)] * 3]
    )
    assert matrix.forgetting() is None
    assert matrix.backward_transfer() == -50.0  # (25 - 100 + 25 - 50) / 2


def test_matrix__a_task_without_images_is_left_out_beside_gaps() -> None:
    matrix = AccuracyMatrix([[NO_IMAGES], [None, AccuracyCell(4, 2, 4)]])
    assert matrix.forgetting() is None
    assert AccuracyMatrix([[None], [NO_IMAGES, AccuracyCell(4, 2, 4)]]).last() == 50.0
