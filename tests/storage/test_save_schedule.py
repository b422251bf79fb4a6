"""When a run saves itself, by a clock that is told."""

from __future__ import annotations

import pytest

from vbm_ptm.storage.save_schedule import SaveSchedule, check_interval


@pytest.mark.parametrize(
    "text", ["", "tasks", "0 steps", "10", "minutes", "1.5 minutes", "-3 steps", "5 hours"]
)
def test_check_interval__refuses_what_it_cannot_read(text: str) -> None:
    with pytest.raises(ValueError, match="is not one of: task, epoch, '10 minutes', '50 steps'"):
        check_interval(text)


def due(schedule: SaveSchedule, *, until: int, epoch: int = 4) -> list[int]:
    """Return the steps, one a second, at which a save is due; each takes a tenth of a second."""
    schedule.begin(num_steps=0, now=0.0)
    steps = []
    for step in range(1, until + 1):
        if schedule.is_due(num_steps=step, is_epoch_over=step % epoch == 0, now=float(step)):
            schedule.saved(num_steps=step, began=float(step), ended=step + 0.1)
            steps.append(step)
    return steps


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        ("task", []),
        ("3 steps", [3, 6, 9, 12, 15, 18]),
        ("1 step", list(range(1, 20))),
        ("epoch", [4, 12]),  # the first cost 0.1 s, so that 5 s must pass: not in step 8, and not in step 16
    ],
)
def test_schedule__saves_when_it_is_time(every: str, steps: list[int]) -> None:
    assert due(SaveSchedule(every), until=19) == steps


def test_schedule__counts_minutes() -> None:
    assert due(SaveSchedule("1 minute"), until=200) == [60, 121, 182]
    assert due(SaveSchedule("2 minutes"), until=200) == [120]


def test_schedule__goes_on_counting_where_the_task_stands() -> None:
    schedule = SaveSchedule("5 steps")
    schedule.begin(num_steps=7, now=0.0)
    assert not schedule.is_due(num_steps=11, is_epoch_over=True, now=1.0)
    assert schedule.is_due(num_steps=12, is_epoch_over=False, now=1.0)
