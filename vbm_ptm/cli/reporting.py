"""The command that writes a page on runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vbm_ptm.cli.printing import stdout


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders of studies.")],
    output: Annotated[
        Path | None,
        typer.Option(help="The page, or a folder for report.html; default: the first of the runs."),
    ] = None,
    pdf: Annotated[
        bool, typer.Option("--pdf", metavar="", help="Write the figures as PDF, too, with their fonts.")
    ] = False,
) -> None:
    """Write one HTML page on runs, finished or not, and its figures to figures/ as SVG."""
    from vbm_ptm.reporting import write_report

    page, *figures = write_report(runs, output=page_at(output or runs[0]), pdf=pdf)
    console = stdout()
    console.print(f"report: {page}", soft_wrap=True)
    if figures:
        console.print(f"{len(figures)} figures: {figures[0].parent}", soft_wrap=True)


def page_at(place: Path) -> Path:
    """Return the page that is meant: the place itself, or report.html in it."""
    return place if place.suffix in (".html", ".htm") else place / "report.html"
