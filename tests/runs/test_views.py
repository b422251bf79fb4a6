"""Views that are shown against those that training gets."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vbm_ptm.building import build, build_recipe
from vbm_ptm.cli import main
from vbm_ptm.config.run_config import compose
from vbm_ptm.engine.task_training import TaskTraining
from vbm_ptm.errors import TrainingInterrupted, UsageError
from vbm_ptm.experiment import run
from vbm_ptm.report.view_page import html_page
from vbm_ptm.report.view_picture import png_picture
from vbm_ptm.runs.views import draw_views

Tree = dict[str, Any]


@pytest.fixture
def seen_in_training(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the steps of runs inside the test get, in order: task, epoch, step, batch."""
    seen: list[Any] = []
    take = TaskTraining._take_step

    def watched(training: TaskTraining, step: Any, positions: Any, batch: Any, waited: float) -> None:
        seen.append((training.task.index, training.epoch, training.step, batch))
        take(training, step, positions, batch, waited)

    monkeypatch.setattr(TaskTraining, "_take_step", watched)
    return seen


@pytest.mark.parametrize(
    ("task", "view_batch"),
    [
        (0, {"num_views": 2}),
        (1, {"num_views": 2}),
        pytest.param(0, {"num_views": 1, "strong_share": 0.5}, marks=pytest.mark.slow),
        pytest.param(0, {"num_views": 2, "order": "class"}, marks=pytest.mark.slow),
    ],
)
def test_draw_views__shows_what_the_first_steps_of_a_run_get(
    task: int, view_batch: Tree, toy_tree: Callable[..., Tree], tmp_path: Path, seen_in_training: list[Any]
) -> None:
    tree = toy_tree("linear_probe") | {"view_batch": view_batch, "seed": 5}
    config = compose(tree=tree).validate()
    with pytest.raises(TrainingInterrupted):
        run(config, output=tmp_path / "run", is_quiet=True, stop_after_task=task + 1)
    sheet = draw_views(config, task=task, samples_per_class=2, num_classes=3)
    assert len(sheet.samples) == 6
    benchmark = build(config).benchmark
    names = [benchmark.datasets.train.source_name(row) for row in range(len(benchmark.datasets.train))]
    of_task = [(epoch, step, batch) for index, epoch, step, batch in seen_in_training if index == task]
    assert sheet.num_steps == len(of_task)
    for sample in sheet.samples:
        row = names.index(sample.name)
        holding = [number for number, (_, _, batch) in enumerate(of_task) if row in batch.sample_ids]
        assert [visit.task_step for visit in sample.visits] == holding
        epoch, step, batch = of_task[holding[0]]
        assert sample.visits[0][:2] == (epoch, step)
        got = batch.images[batch.sample_ids.tolist().index(row)]
        assert len(got) == len(sample.views)
        for tensor, view in zip(got, sample.views, strict=True):
            assert np.array_equal(tensor.permute(1, 2, 0).numpy(), view.pixels)
        if len(got) == 2:
            assert [view.kind for view in sample.views] == ["weak", "strong"]
    assert {view.pixels.shape for sample in sheet.samples for view in sample.views} == {(32, 32, 3)}


def test_draw_views__takes_the_samples_that_come_first(toy_tree: Callable[..., Tree]) -> None:
    config = compose(tree=toy_tree("linear_probe")).validate()
    every = draw_views(config, samples_per_class=99, num_classes=99)
    some = draw_views(config, samples_per_class=1, num_classes=2)
    assert len(every.samples) == 24
    assert list(some.by_class) == list(every.by_class)[:2]
    for name, (sample,) in some.by_class.items():
        first = [each.visits[0].task_step for each in every.by_class[name]]
        assert sample.visits[0].task_step == min(first)
        assert first == sorted(first)
    assert {len(sample.visits) for sample in every.samples} == {1}  # two epochs are one cycle of two views


def test_pages__draw_epochs_and_visits_on_one_scale(toy_tree: Callable[..., Tree]) -> None:
    tree = toy_tree("linear_probe") | {"view_batch": {"num_views": 1}}
    tree["optimization"]["epochs"] = 3
    whole = draw_views(compose(tree=tree).validate(), samples_per_class=1, num_classes=1)
    each = whole.num_steps // 3
    assert whole.epoch_starts == (0, each, 2 * each)
    tree["trainer"] |= {"max_steps_per_task": each + 1}
    sheet = draw_views(compose(tree=tree).validate(), samples_per_class=1, num_classes=1)
    assert (sheet.epoch_starts, sheet.num_steps) == ((0, each), each + 1)
    (line,) = re.findall(r'<i style="left:([\d.]+)%', html_page(sheet))
    assert float(line) == pytest.approx(100 * each / (each + 1), abs=1e-3)
    rules = (np.asarray(Image.open(io.BytesIO(png_picture(sheet)))) == (209, 217, 224)).all(axis=2)
    left, middle, right = np.flatnonzero(rules[np.flatnonzero(rules.sum(axis=1) == 3)[0]]).tolist()
    assert (middle - left) / (right - left) == pytest.approx(each / (each + 1), abs=2e-3)


def test_draw_views__stops_where_training_stops(toy_tree: Callable[..., Tree]) -> None:
    tree = toy_tree("linear_probe")
    tree["trainer"] |= {"max_steps_per_task": 2}
    sheet = draw_views(compose(tree=tree).validate(), samples_per_class=99)
    assert (sheet.num_steps, sheet.epochs) == (2, 1)
    assert {visit.task_step for sample in sheet.samples for visit in sample.visits} == {0, 1}
    assert len(sheet.samples) == build_recipe(compose(tree=tree).validate()).optimization.batch_size // 2 * 2


@pytest.mark.parametrize(
    ("learner", "task", "message"),
    [
        ("linear_probe", 3, "allowed: 1 to 3"),
        ("nearest_mean", 0, "no training step"),
        ("icarl", 1, "Choose task 1"),
    ],
)
def test_draw_views__refuses_what_training_does_not_show(
    learner: str, task: int, message: str, toy_tree: Callable[..., Tree]
) -> None:
    with pytest.raises(UsageError, match=message):
        draw_views(compose(tree=toy_tree(learner)).validate(), task=task)


def test_pages__hold_every_view_without_loss(toy_tree: Callable[..., Tree]) -> None:
    tree = toy_tree("linear_probe")
    tree["optimization"]["epochs"] = 6
    sheet = draw_views(compose(tree=tree).validate(), samples_per_class=2, num_classes=2)
    page = html_page(sheet)
    assert not re.findall(r"(?:src|href)=\"(?!data:)|https?:|<script", page)
    images = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)">', page)
    assert len(images) == page.count("<img") == 4 * (1 + 2)
    shown = [np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))) for content, _ in images]
    expected = [view.pixels for sample in sheet.samples for view in sample.views]
    for number, pixels in enumerate(expected):
        assert np.array_equal(shown[number // 2 * 3 + 1 + number % 2], pixels)
    assert "view 2 of 2, strong, epoch 1 step" in images[2][1]
    assert page.count("<b style=") == sum(len(sample.visits) for sample in sheet.samples) == 12
    picture = Image.open(io.BytesIO(png_picture(sheet)))
    assert picture.width >= 900
    wide = np.asarray(picture.convert("RGB"))
    view = expected[0]
    enlarged = np.asarray(Image.fromarray(view).resize((108, 108), Image.Resampling.NEAREST))
    corners = np.argwhere((wide == enlarged[0, 0]).all(axis=2))
    assert any(
        np.array_equal(wide[y : y + 108, x : x + 108][4:-4, 4:-4], enlarged[4:-4, 4:-4]) for y, x in corners
    )


def test_views__command(
    toy_folder: Path, tiny_weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("name=test_vit.r160_in1k", f"checkpoint={tiny_weights}", "image_size=32")
    tiny = [part for setting in settings for part in ("--set", f"backbone.{setting}")]
    command = [
        "views",
        "--dataset",
        str(toy_folder),
        "--learner",
        "slca",
        *tiny,
        "--set",
        "scenario.num_tasks=3",
    ]
    for name in ("views.html", "deep/views.png"):
        assert main([*command, "--output", str(tmp_path / name), "--classes", "2", "--samples", "1"]) == 0
        assert f"2 samples of 2 classes: {tmp_path / name}" in capsys.readouterr().out
        assert (tmp_path / name).stat().st_size > 5000
    (tmp_path / "folder.html").mkdir()
    for name, message in (
        ("views.pdf", ".html or .png"),
        ("folder.html", "is a directory"),
        ("views.html/a.png", "is a file"),
    ):
        assert main([*command, "--output", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
