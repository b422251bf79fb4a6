"""What is drawn of a run that is followed."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from vbm_ptm.report.live_view import Snapshot, duration, live_view, sparkline
from vbm_ptm.report.run_progress import RunProgress


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 5, ""),
        ([1.0], 5, "▁"),
        ([3.0, 3.0], 5, "▁▁"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 0, 7, 7], 2, "▁█"),
        ([7, 6, 5, 4, 3, 2, 1, 0], 4, "█▆▃▁"),
    ],
)
def test_sparkline(values: list[float], width: int, expected: str) -> None:
    assert sparkline(values, width=width) == expected


def test_sparkline__in_ascii() -> None:
    assert sparkline(list(range(8)), width=8, is_plain=True).isascii()


@pytest.mark.parametrize(("seconds", "expected"), [(3.2, "3 s"), (180, "3 min"), (5400, "1.5 h")])
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected


def test_live_view__shows_a_run_in_progress() -> None:
    progress = RunProgress()
    progress.add([{"event": "plan", "first_task": 0, "epochs": 2, "steps": [2, 4]}])
    progress.add([{"event": "begin_task", "task": 0}])
    step = {"event": "step", "epoch": 0, "images": 8, "learning_rates": {"head": 0.01}, "data_seconds": 0.025}
    progress.add([{**step, "task": 0, "step": number, "loss": 2.0 - number} for number in range(2)])
    assert progress.is_between_steps
    seconds = {"training_seconds": 2.0, "end_task_seconds": 1.0, "evaluation_seconds": 1.0}
    done = {"event": "task", "task_index": 0, "accuracy": 87.5, "num_steps": 2, "num_images": 16}
    progress.add(
        [{**done, **seconds}, {"event": "begin_task", "task": 1}, {**step, "task": 1, "step": 0, "loss": 0.5}]
    )
    assert progress.images_per_second == 8.0
    assert progress.total_steps == 6
    # Three steps of 8 images at 8 images a second, and the end of the task.
    assert progress.seconds_left() == pytest.approx(3.0 + 2.0)
    assert progress.seconds_left(24.0) == pytest.approx(1.0 + 2.0)
    console = Console(file=io.StringIO(), width=100)
    console.print(live_view(Snapshot("runs/x", progress, "running", "", 8.0, 3.0)))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for text in (
        "runs/x · running",
        "tasks done",
        "1/2",
        "task 2, epoch",
        "1/4",
        "3/6",
        "87.50 %",
        "8 images/s",
        "25 ms a step for images",
        "5 s left",
    ):
        assert text in shown
