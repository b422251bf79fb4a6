"""The commands that only look: at names, data and settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from vbm_ptm.cli.options import AsJson, ConfigFile, Dataset, LearnerName, Overrides, Preset, sources_of
from vbm_ptm.cli.printing import print_json, stdout


def list_names(
    kind: Annotated[Literal["learners", "datasets", "backbones"], typer.Argument(help="What to list.")],
    as_json: AsJson = False,
) -> None:
    """List the names that other commands take."""
    if kind == "learners":
        from vbm_ptm.learners.registry import list_learners

        names = list_learners()
    elif kind == "backbones":
        from vbm_ptm.backbones import list_backbones

        names = list_backbones()
    else:
        from vbm_ptm.config_tree import list_configs

        names = list_configs("datasets")
    if as_json:
        print_json(names)
    else:
        for name in names:
            typer.echo(name)


def check(
    dataset: Dataset = None,
    learner: LearnerName = None,
    preset: Preset = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    explain: Annotated[
        str | None, typer.Option(help="Say which source set this setting, or all below it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find everything that can be wrong before training, and say what a run will cost."""
    from vbm_ptm.config import compose
    from vbm_ptm.preflight import explain_setting, survey

    composed = compose(overrides=overrides or (), **sources_of(dataset, learner, preset, config))
    if explain is not None:
        lines: dict[str, Any] = explain_setting(explain, composed)
    else:
        lines = survey(composed)
    if as_json:
        print_json(lines)
    else:
        from rich.table import Table

        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for key, value in lines.items():
            table.add_row(key, str(value))
        stdout().print(table)
