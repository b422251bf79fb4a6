"""What commands say: on standard output, and where they are interrupted."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vbm_ptm.cli.advice import with_advice
from vbm_ptm.errors import TrainingInterrupted
from vbm_ptm.launch import is_main_process

if TYPE_CHECKING:
    from rich.console import Console

    from vbm_ptm.check.estimates import Estimate
    from vbm_ptm.report.collect import Collected
    from vbm_ptm.study import PlannedRun


def stdout() -> Console:
    """Return a console that shows names as they are and does not cut tables where there is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    return console


def print_json(value: Any) -> None:
    """Print a value as JSON that people can read."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))


@contextmanager
def how_to_go_on(text: str) -> Iterator[None]:
    """Say how to continue after an interruption."""
    try:
        yield
    except TrainingInterrupted as interruption:
        raise TrainingInterrupted(interruption.exit_code, f"{interruption}. {text}") from None


def show_plan(
    runs: Sequence[PlannedRun],
    estimates: Sequence[Estimate],
    *,
    images_per_second: float,
    part: Container[Path],
    finished: Container[Path],
) -> None:
    """Print every run of a study with its costs, and what all of them take.

    Args:
        runs: All runs.
        estimates: What each of them takes.
        images_per_second: Rate of training.
        part: Directories of the runs that would be done.
        finished: Directories of those that are done.
    """
    from vbm_ptm.report.tables import plan_table, plan_totals

    def state(folder: Path) -> str:
        return "finished" if folder in finished else "to run" if folder in part else "not in this part"

    lines = [
        {
            "label": planned.label,
            "seeds": planned.seeds,
            **estimate._asdict(),
            "hours": estimate.hours(images_per_second),
            "state": state(planned.output),
        }
        for planned, estimate in zip(runs, estimates, strict=True)
    ]
    console = stdout()
    console.print(plan_table(lines))
    console.print(f"all: {plan_totals(lines)}")
    console.print(f"to run here: {plan_totals([line for line in lines if line['state'] == 'to run'])}")
    console.print(
        f"Hours are estimated at {images_per_second:g} images a second (--images-per-second), each with one forward "
        "and one backward pass; any other forward pass (query, teacher, features, test) counts as a third.",
        soft_wrap=True,
    )


def show_study(
    collected: Collected, *, folder: Path, writes_page: bool = False, details: bool = False
) -> None:
    """Print the tables of a study; leave with exit code 1 if a run of it failed.

    Args:
        collected: What it has measured.
        folder: Where its runs lie.
        writes_page: Write a report on it.
        details: Show the other numbers too.
    """
    if is_main_process():
        from vbm_ptm.report.tables import (
            costs_table,
            effect_lines,
            measures_table,
            missing_lines,
            study_table,
        )

        console = stdout()
        console.print(study_table(collected))
        if details:
            console.print(study_table(collected, details=True))
            console.print(measures_table(collected))
            console.print(costs_table(collected))
        for line in effect_lines(collected):
            console.print(line, soft_wrap=True)
        console.print("run directories:")
        for row in collected.rows:
            for directory in row.directories:
                console.print(f"  {directory}", soft_wrap=True)
        for line in missing_lines([*collected.failed, *collected.missing]):
            console.print(with_advice(line), soft_wrap=True)
        if writes_page:
            from vbm_ptm.reporting import write_report

            page, *_ = write_report([folder], output=folder / "report.html")
        console.print(f"report: {page if writes_page else f'vbm-ptm report {folder}'}", soft_wrap=True)
    if collected.failed:
        raise typer.Exit(1)
