"""The command that shows what the network sees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vbm_ptm.cli.options import ConfigFile, Dataset, LearnerName, Overrides, Preset, all_overrides, sources_of
from vbm_ptm.errors import UsageError


def views(
    dataset: Dataset = None,
    learner: LearnerName = None,
    preset: Preset = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Training seed.")] = None,
    task: Annotated[int | None, typer.Option(min=1, help="Number of the task; default: the first.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each class.")] = 2,
    classes: Annotated[int, typer.Option(min=1, help="Classes of the task.")] = 10,
    output: Annotated[
        Path, typer.Option(help="A page (.html) or a picture (.png); replaced if it exists.")
    ] = Path("views.html"),
) -> None:
    """Show what the network sees: the views of some samples as training draws them, and when each recurs."""
    from vbm_ptm.storage.durable_files import check_writable, write_file

    ending = output.suffix.lower()
    if ending not in (".html", ".png"):
        raise UsageError(f"--output {output}: give a name that ends in .html or .png.")
    check_writable(output)
    from vbm_ptm.config.run_config import compose
    from vbm_ptm.runs.views import draw_views

    composed = compose(
        overrides=all_overrides(overrides, seed=seed), **sources_of(dataset, learner, preset, config)
    )
    sheet = draw_views(
        composed.validate(),
        task=None if task is None else task - 1,
        samples_per_class=samples,
        num_classes=classes,
    )
    if ending == ".html":
        from vbm_ptm.report.view_page import html_page

        write_file(output, html_page(sheet).encode())
    else:
        from vbm_ptm.report.view_picture import png_picture

        write_file(output, png_picture(sheet))
    typer.echo(f"{len(sheet.samples)} samples of {len(sheet.by_class)} classes: {output}")
