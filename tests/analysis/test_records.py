"""Arrays made of the records of small runs that a test writes down, and the figures drawn of them."""

from __future__ import annotations

import html
import io
from typing import Any

import numpy as np
import pytest

from vbm_ptm.analysis import confusion, prompts, recall, retention, training
from vbm_ptm.analysis.drawing import styled
from vbm_ptm.metrics import AccuracyCell, AccuracyMatrix
from vbm_ptm.storage.task_record import TaskFacts, TaskTimings

MATRIX = AccuracyMatrix([AccuracyCell(10, count, 10) for count in row] for row in [[9], [5, 8], [6, 2, 10]])


def facts(index: int, **values: Any) -> TaskFacts:
    required = {
        "num_samples": 10,
        "num_views": 2,
        "num_steps": 4,
        "num_images": 40,
        "min_visits": 1,
        "max_visits": 2,
    }
    return TaskFacts(**{"task_index": index, "learner_report": {}, "parameters": {}, **required, **values})


RECORDS = [
    facts(
        0,
        task_confusion=[[10]],
        class_counts=[(4, 5), (5, 5)],
        recall_interval={"mean": 20.0, "std": 5.0},
        degree_of_forgetting={"train": 2.0},
        sample_forgetting=3.0,
        learner_report={"prompt_selections": [4, 0, 0, 0]},
    ),
    facts(
        1,
        task_confusion=[[6, 4], [1, 9]],
        class_counts=[(5, 5), (0, 5), (8, 10)],
        recall_interval={"mean": 30.0, "std": 1.0},
        degree_of_forgetting={"train": 4.0},
        sample_forgetting=None,
        feature_drift=0.25,
        learner_report={"prompt_selections": [1, 1, 1, 1]},
    ),
]


def test_retention__shifts_every_task_to_its_beginning() -> None:
    table = retention.retention(MATRIX)
    assert np.array_equal(table, [[90, 50, 60], [80, 20, np.nan], [100, np.nan, np.nan]], equal_nan=True)
    assert retention.mean_retention(MATRIX).tolist() == [90, 35, 60]
    assert retention.forgetting_of_tasks(MATRIX).tolist() == [30, 60]
    assert retention.forgetting_of_tasks(MATRIX).mean() == MATRIX.forgetting()
    assert retention.evolution(MATRIX).tolist() == list(MATRIX.curve())


def test_confusion__says_which_task_takes_over() -> None:
    table = confusion.task_confusion(RECORDS)
    assert table is not None
    assert table.tolist() == [[60, 40], [10, 90]]
    taken = confusion.taken_over(RECORDS)
    assert taken is not None
    assert taken.tolist() == [40, 0]
    assert confusion.task_confusion([facts(0)]) is None
    unmeasured = confusion.task_confusion([facts(1, task_confusion=[None, [1, 3]])])
    assert np.array_equal(unmeasured, [[np.nan, np.nan], [25, 75]], equal_nan=True)  # type: ignore[arg-type]


def test_class_forgetting__leaves_the_newest_classes_out() -> None:
    forgotten = confusion.class_forgetting(RECORDS)
    assert np.array_equal(forgotten, [-20, 100, np.nan], equal_nan=True)


def test_prompts__shares_and_entropy() -> None:
    shares, entropy = prompts.prompt_selections(RECORDS), prompts.selection_entropy(RECORDS)
    assert shares is not None
    assert entropy is not None
    assert shares.tolist() == [[100, 0, 0, 0], [25, 25, 25, 25]]
    assert entropy.tolist() == pytest.approx([0, 1])
    assert prompts.prompt_selections([facts(0)]) is None


def test_recall__takes_what_was_measured() -> None:
    assert recall.observed_intervals(RECORDS).mean.tolist() == [2, 3]
    assert recall.degrees_of_forgetting(RECORDS).tolist() == [2, 4]
    assert np.array_equal(recall.lost_between_recalls(RECORDS), [3, np.nan], equal_nan=True)
    assert np.array_equal(recall.feature_drift(RECORDS), [np.nan, 0.25], equal_nan=True)
    assert recall.interval_points([RECORDS, [facts(0)]]) == [(2.5, 3.0), (None, None)]


def test_read_log__keeps_readings_and_skips_a_torn_line() -> None:
    step = '{"event": "step", "task": %d, "epoch": 0, "step": 0, "images": 8, "groups": 4, "views": 2, '
    step += '"data_seconds": 1, "learning_rates": {"heads": 0.1}, "loss": %d}'
    lines = [step % (0, 4), step % (0, 2), '{"event": "evaluation", "task": 0, "predictions": [1, 0]}']
    log = training.read_log([*lines, '{"event": "task"}', step % (1, 1), '{"event": "st'])
    assert log.readings["loss"] == ([0, 1, 2], [4, 2, 1])
    assert log.predictions == {0: [1, 0]}
    assert (log.num_tasks, log.num_torn) == (1, 1)
    assert training.task_means(log, "loss") == {0: 3, 1: 1}
    assert training.reading_names({"a": [log]}) == ["loss", "learning rate: heads"]
    assert training.thinned([0, 1, 4], [4, 2, 1], width=2) == {0: 3, 2: 1}


def test_readings_figure__averages_runs_of_different_length_over_the_same_steps() -> None:
    """Every reading is its step, and the losses of a second task begin later in one of the runs."""

    def log(num_steps: int, second_task: int) -> training.TrainingLog:
        steps = list(range(num_steps))
        later = steps[second_task:]
        readings = {
            "loss": (steps, [float(step) for step in steps]),
            "pull": (later, [float(step) for step in later]),
        }
        return training.TrainingLog(readings, task_of_step=[int(step >= second_task) for step in steps])

    most = 2 * training.MAX_POINTS
    for axes in training.readings_figure({"a": [log(most, 10), log(most + 1, 61)]}).axes[:2]:
        (line,) = axes.lines
        places, means = np.array(line.get_data())
        assert len(places) <= training.MAX_POINTS
        width = places[1] - places[0]
        inside = (places >= 61 + width) & (places <= most - width)
        assert inside.sum() > 50
        assert means[inside].tolist() == places[inside].tolist()


def test_figures__draw_each_line() -> None:
    lines = {"one": [RECORDS, RECORDS], "two": [RECORDS]}
    matrices = {"one": [MATRIX, MATRIX], "two": [MATRIX]}
    timings = [TaskTimings(training_seconds=3, end_task_seconds=2, evaluation_seconds=1)]
    (evolution,) = retention.evolution_figure(matrices).axes
    assert [line.get_label() for line in evolution.lines] == ["one", "two"]
    assert evolution.lines[0].get_ydata().tolist() == list(MATRIX.curve())  # type: ignore[union-attr]
    assert len(retention.retention_figure(matrices).axes) == 2
    assert len(retention.matrix_figure(matrices).axes[0].patches) == 6
    assert [text.get_text() for text in confusion.confusion_figure(lines).axes[0].texts] == [
        "60",
        "40",
        "10",
        "90",
    ]
    assert [axes.get_title("left") for axes in recall.measures_figure(lines).axes] == list(recall.MEASURES)
    (against,) = recall.interval_figure(lines).axes
    assert against.lines[0].get_xdata().tolist() == [2.5, 2.5]  # type: ignore[union-attr]
    (time,) = training.time_figure({"one": [timings]}).axes
    assert [patch.get_width() for patch in time.patches] == [3, 2, 1]  # type: ignore[attr-defined]


def test_figures__have_legends_of_all_lines_whatever_these_are_called() -> None:
    names = ["_mine", "other", "_third"]
    timings = [TaskTimings(training_seconds=3, end_task_seconds=2, evaluation_seconds=1)]
    for figure, shown in (
        (retention.evolution_figure({name: [MATRIX] for name in names}), names),
        (recall.interval_figure({name: [RECORDS, RECORDS] for name in names}), names),
        (training.time_figure({name: [timings] for name in names}), list(training.PARTS)),
    ):
        (legend,) = figure.legends
        assert [text.get_text() for text in legend.get_texts()] == shown
        with styled():
            figure.savefig(io.StringIO(), format="svg")
    assert retention.evolution_figure({"_mine": [MATRIX]}).legends == []


def test_figures__take_names_as_they_are() -> None:
    name = r"a$\frac{x$ & <b>"
    written = io.StringIO()
    with styled():
        retention.evolution_figure({name: [MATRIX], "other": [MATRIX]}).savefig(written, format="svg")
    assert html.escape(name, quote=False) in written.getvalue()
