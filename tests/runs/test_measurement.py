"""Predictions for every test image, against the counts of training."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from vbm_ptm.cli import main
from vbm_ptm.runs.measurement import Measurement
from vbm_ptm.runs.stored_learner import measure, predict

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def measured(two_runs: tuple[Path, Path]) -> Measurement:
    return measure(two_runs[0])


def test_images__add_up_to_what_training_counted(two_runs: tuple[Path, Path], measured: Measurement) -> None:
    result = json.loads((two_runs[0] / "result.json").read_text())
    assert len(measured.images) == len({image.row for image in measured.images}) == 48
    for task, cell in enumerate(result["accuracy_counts"]["rows"][-1], start=1):
        own = [image for image in measured.images if image.task == task]
        assert len(own) == cell["total"]
        assert sum(image.is_correct for image in own) == cell["class_incremental_top1"]
        assert {image.label for image in own} == set(result["tasks"][task - 1])
    assert {image.image.split("/")[1] == image.label for image in measured.images} == {True}
    counts = {each.name: each for each in measured.per_class()}
    assert list(counts) == list(dict.fromkeys(image.label for image in measured.images))
    assert sum(each.num_correct for each in counts.values()) == sum(
        each.is_correct for each in measured.images
    )
    assert {each.num_images for each in counts.values()} == {4}
    for each in counts.values():
        wrong = [
            image.prediction for image in measured.images if image.label == each.name and not image.is_correct
        ]
        assert each.taken_for == (None if not wrong else (each.taken_for[0], wrong.count(each.taken_for[0])))
        assert len(wrong) == each.num_images - each.num_correct


def test_images__say_what_predict_says(
    two_runs: tuple[Path, Path], toy_folder: Path, measured: Measurement
) -> None:
    images = measured.images[::7]
    predictions = list(predict(two_runs[0], [toy_folder / image.image for image in images], top_k=99))
    for image, prediction in zip(images, predictions, strict=True):
        assert prediction.class_names[0] == image.prediction
        assert prediction.scores[0] == pytest.approx(image.score, abs=1e-5)
        assert prediction.probabilities[0] == pytest.approx(image.probability, abs=1e-5)
        assert sum(prediction.probabilities) == pytest.approx(1.0, abs=1e-5)
        assert list(prediction.probabilities) == sorted(prediction.probabilities, reverse=True)


def test_evaluate__writes_predictions_and_shows_classes(
    two_runs: tuple[Path, Path], measured: Measurement, tmp_path: Path, capsys: Capture
) -> None:
    table, lines = tmp_path / "deep/predictions.csv", tmp_path / "predictions.jsonl"
    assert main(["evaluate", str(two_runs[0]), "--per-class", "--predictions", str(table)]) == 0
    shown = capsys.readouterr().out
    assert "most often confused with" in shown
    assert all(name.name in shown for name in measured.per_class())
    command = ["evaluate", str(two_runs[0]), "--per-class", "--json", "--predictions", str(lines)]
    assert main(command) == 0
    classes = json.loads(capsys.readouterr().out)["classes"]
    assert [each["num_correct"] for each in classes] == [each.num_correct for each in measured.per_class()]
    with table.open(newline="") as file:
        from_table = list(csv.DictReader(file))
    from_lines = [json.loads(line) for line in lines.read_text().splitlines()]
    assert len(from_table) == len(from_lines) == 48
    for one, two, image in zip(from_table, from_lines, measured.images, strict=True):
        assert one == {key: str(value) for key, value in two.items()}
        assert (two["image"], two["row"], two["task"]) == (image.image, image.row, image.task)
        assert (two["label"], two["prediction"]) == (image.label, image.prediction)


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.xlsx", ".csv or .jsonl"), ("folder.csv", "is a directory"), ("file/b.csv", "is a file")],
)
def test_evaluate__refuses_files_before_it_measures(
    name: str, message: str, two_runs: tuple[Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "file").write_text("")
    assert main(["evaluate", str(two_runs[0]), "--predictions", str(tmp_path / name)]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_evaluate__on_another_data_set_knows_no_task(
    two_runs: tuple[Path, Path], toy_folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "predictions.jsonl"
    command = ["evaluate", str(two_runs[0]), "--dataset", str(toy_folder), "--predictions", str(file)]
    assert main(command) == 0
    capsys.readouterr()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 48
    assert {line["task"] for line in lines} == {None}
