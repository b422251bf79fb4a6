"""The commands that only look: at names, data and settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vbm_ptm.cli.advice import with_advice
from vbm_ptm.cli.options import AsJson, ConfigFile, Dataset, LearnerName, Overrides, Preset, sources_of
from vbm_ptm.cli.printing import print_json, stdout
from vbm_ptm.errors import UsageError

if TYPE_CHECKING:
    from vbm_ptm.check.preflight import ExplainedSetting


def list_names(
    kind: Annotated[Literal["learners", "datasets", "backbones"], typer.Argument(help="What to list.")],
    as_json: AsJson = False,
) -> None:
    """List the names that other commands accept; for learners, also what they need and train."""
    if kind == "learners":
        _list_learners(as_json=as_json)
        return
    if kind == "backbones":
        from vbm_ptm.backbones import list_backbones

        names = list_backbones()
    else:
        from vbm_ptm.config.tree import list_configs

        names = list_configs("datasets")
    if as_json:
        print_json(names)
    else:
        for name in names:
            typer.echo(name)


def _list_learners(*, as_json: bool) -> None:
    from vbm_ptm.learners.registry import learner_facts, list_learners

    facts = {name: learner_facts(name) for name in list_learners()}
    if as_json:
        print_json({name: found._asdict() for name, found in facts.items()})
        return
    from rich.table import Table

    table = Table("learner", "backbone", "buffer", "trains", "domains", box=None, padding=(0, 2, 0, 0))
    for name, found in facts.items():
        domains = "yes" if found.domains else "no"
        table.add_row(name, found.backbone, found.buffer, found.trains, domains)
    stdout().print(table)


def check(
    dataset: Dataset = None,
    learner: LearnerName = None,
    preset: Preset = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    explain: Annotated[
        str | None,
        typer.Option(
            help="Explain a setting, or all settings of a section: meaning, value, and which source set it."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find problems before training, and show what a run will cost."""
    from dataclasses import asdict

    from vbm_ptm.check.preflight import Survey, explain_setting, survey
    from vbm_ptm.config.run_config import compose

    sources = sources_of(dataset, learner, preset, config)
    if explain is not None:
        explained = explain_setting(explain, compose(overrides=overrides or (), **sources))
        if as_json:
            print_json({path: asdict(setting) for path, setting in explained.items()})
        else:
            _print_explained(explained)
        return
    try:
        found = survey(compose(overrides=overrides or (), **sources))
    except UsageError as error:
        if not as_json:
            raise
        found = Survey(faults=list(error.problems))
    if as_json:
        print_json(asdict(found) | {"faults": [with_advice(fault) for fault in found.faults]})
    elif not found.faults:
        _print_facts(found.facts)
    if found.faults:
        raise typer.Exit(2) if as_json else UsageError(*found.faults)


def split(
    output: Annotated[Path, typer.Option(help="CSV file to write, for dataset.split_file.")],
    dataset: Dataset = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    test_fraction: Annotated[
        float | None, typer.Option(help="Part of every class to hold out; default: 0.2.")
    ] = None,
) -> None:
    """Write the split into training and test images to a file, so that others can use the same."""
    from vbm_ptm.config.run_config import compose
    from vbm_ptm.data.reading.datasets import load_image_dataset, write_split

    given = [
        *(overrides or ()),
        *([] if test_fraction is None else [f"dataset.test_fraction={test_fraction}"]),
    ]
    spec = compose(dataset=dataset, config_file=config, overrides=given).validate_dataset()
    found = load_image_dataset(spec)
    if test_fraction is not None and found.record.held_out is None:
        raise UsageError(
            "--test-fraction holds images out, but this data set has a test split: leave the option out."
        )
    write_split(found, output)
    numbers = {"training images": len(found.train), "test images": len(found.test)}
    _print_facts({**numbers, "split SHA-256": found.split_sha256})


def _print_facts(facts: Mapping[str, Any]) -> None:
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in facts.items():
        table.add_row(key, str(value))
    stdout().print(table)


def _print_explained(explained: Mapping[str, ExplainedSetting]) -> None:
    from rich.table import Table

    from vbm_ptm.config.tree import as_yaml

    table = Table("setting", "value", "set by", "meaning")
    for path, setting in explained.items():
        table.add_row(path, as_yaml(setting.value), setting.source, setting.meaning)
    stdout().print(table)
