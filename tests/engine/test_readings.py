"""Losses that are read late: what stops the run and what does not."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from vbm_ptm.engine.acceleration import build_accelerator
from vbm_ptm.engine.readings import Readings
from vbm_ptm.engine.tracking import RunLog


@pytest.fixture(name="log")
def run_log(tmp_path: Path) -> Iterator[RunLog]:
    log = RunLog(tmp_path / "log.jsonl")
    yield log
    log.close()


def add(readings: Readings, step: int, loss: float, norm: float, *, is_skipped: bool = False) -> None:
    parts = {"loss": torch.tensor(loss), "gradient_norm": torch.tensor(norm)}
    readings.add(parts, sample_ids=np.array([step, 70 + step]), is_skipped=is_skipped, epoch=0, step=step)


@pytest.mark.parametrize(("loss", "norm", "what"), [(math.nan, 1.0, "loss"), (1.0, math.inf, "gradient")])
def test_read__names_the_first_step_that_is_not_finite(
    log: RunLog, tmp_path: Path, loss: float, norm: float, what: str
) -> None:
    readings = Readings(build_accelerator(device="cpu"), log, task_index=2, first_step=0)
    for step in range(5):
        add(readings, step, *((loss, norm) if step >= 3 else (0.5, 1.0)))
    with pytest.raises(
        FloatingPointError, match=rf"the {what} is not .* task 3, epoch 1, step 4: .* 3, 73\."
    ):
        readings.read()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_read__counts_a_part_that_a_step_does_not_have_as_nothing(
    log: RunLog, tmp_path: Path, order: tuple[int, ...]
) -> None:
    readings = Readings(build_accelerator(device="cpu"), log, task_index=0, first_step=0)
    steps = [{"loss": 1.0, "consistency": 0.5}, {"loss": 2.0}, {"loss": 3.0, "dark": 0.75}]
    for number, step in enumerate(order):
        parts = {name: torch.tensor(value) for name, value in steps[step].items()}
        readings.add(parts, sample_ids=np.array([0]), epoch=0, step=number)
        if number == 1:
            readings.read()
    assert readings.end_epoch() == pytest.approx({"loss": 2.0, "consistency": 0.5 / 3, "dark": 0.25})
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sum(line.get("consistency", 0) for line in lines) == 0.5


def test_read__counts_steps_that_the_scaler_has_skipped(log: RunLog, tmp_path: Path) -> None:
    readings = Readings(build_accelerator(device="cpu"), log, task_index=0, first_step=0)
    add(readings, 0, 0.5, math.inf, is_skipped=True)
    add(readings, 1, 0.5, 2.0)
    assert readings.read() == {"loss": 0.5, "gradient_norm": 1.0}
    assert readings.num_skipped == 1
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["gradient_norm"] for line in lines] == [0.0, 2.0]


def test_read__blames_the_term_and_not_the_sum(log: RunLog) -> None:
    readings = Readings(build_accelerator(device="cpu"), log, task_index=0, first_step=0)
    parts = {"loss": math.nan, "cross_entropy": 0.7, "pull": math.nan, "gradient_norm": 1.0}
    readings.add(
        {name: torch.tensor(value) for name, value in parts.items()},
        sample_ids=np.array([1]),
        epoch=0,
        step=0,
    )
    with pytest.raises(FloatingPointError, match="It comes from pull\\."):
        readings.read()
