"""What trackers get to see of the accuracies."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vbm_ptm.analysis.retention import matrix_figure
from vbm_ptm.engine.acceleration import build_accelerator, finish_trackers, start_trackers
from vbm_ptm.engine.tracker_figures import log_figures, pixels
from vbm_ptm.experiment import run
from vbm_ptm.metrics import AccuracyCell, AccuracyMatrix


def test_pixels__are_those_of_the_figure_on_white() -> None:
    figure = Figure(figsize=(1, 0.5), dpi=40, facecolor="none")
    figure.patches.append(Rectangle((0, 0), 0.5, 1, facecolor="#ff0000", transform=figure.transFigure))
    picture = pixels(figure)
    assert picture.shape == (20, 40, 3)
    assert picture[10, 5].tolist() == [255, 0, 0]
    assert picture[10, 35].tolist() == [255, 255, 255]


def test_log_figures__reach_tensorboard_as_drawn(tmp_path: Path) -> None:
    accelerator = build_accelerator(device="cpu", trackers=("tensorboard",), directory=tmp_path)
    start_trackers(accelerator, {"seed": 1})
    matrix = AccuracyMatrix()
    for number, step in enumerate((3, 9), start=1):
        matrix.add_row([AccuracyCell(4, 4 - task, 4) for task in range(number)])
        log_figures(accelerator, matrix, step=step)
    finish_trackers(accelerator)
    events = EventAccumulator(str(tmp_path / "vbm_ptm"), size_guidance={"images": 0})
    events.Reload()
    assert events.Tags()["images"] == ["accuracy matrix", "task evolution"]
    images = events.Images("accuracy matrix")
    assert [image.step for image in images] == [3, 9]
    shown = np.asarray(Image.open(io.BytesIO(images[1].encoded_image_string)).convert("RGB"))
    assert np.array_equal(shown, pixels(matrix_figure({"accuracy": [matrix]})))
    assert not np.array_equal(shown[: shown.shape[0] // 2], shown[shown.shape[0] // 2 :])


@pytest.mark.parametrize(
    "matrix",
    [
        AccuracyMatrix([[None], [None, AccuracyCell(4, 3, 4)]]),
        AccuracyMatrix([[AccuracyCell(4, 3, 4), AccuracyCell(4, 3, 4)]]),
        AccuracyMatrix([[AccuracyCell(0, 0, 0)], [AccuracyCell(0, 0, 0), AccuracyCell(4, 3, 4)]]),
        AccuracyMatrix([[AccuracyCell(0, 0, 0)]]),
    ],
    ids=["extension", "joint", "no test images of a task", "no test images"],
)
def test_log_figures__draw_whatever_a_run_may_have_measured(matrix: AccuracyMatrix, tmp_path: Path) -> None:
    accelerator = build_accelerator(device="cpu", trackers=("tensorboard",), directory=tmp_path)
    start_trackers(accelerator, {"seed": 1})
    log_figures(accelerator, matrix, step=1)
    finish_trackers(accelerator)


def test_log_figures__draw_nothing_without_trackers(tmp_path: Path) -> None:
    log_figures(build_accelerator(device="cpu"), AccuracyMatrix(), step=0)  # an empty matrix cannot be drawn


@pytest.mark.slow
def test_run__gives_figures_to_trackers_after_every_task(
    toy_tree: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    tree = toy_tree("nearest_mean")
    tree["trainer"] |= {"trackers": ["tensorboard"]}
    run(tree, output=tmp_path / "run", is_quiet=True)
    (folder,) = (tmp_path / "run").rglob("vbm_ptm")
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    for name in ("accuracy matrix", "task evolution"):
        assert [image.step for image in events.Images(name)] == [
            event.step for event in events.Scalars("accuracy_over_seen_classes")
        ]
        assert len(events.Images(name)) == 3
