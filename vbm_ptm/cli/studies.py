"""The command that runs several configurations and collects them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vbm_ptm.cli.options import (
    DeviceName,
    DryRun,
    ImagesPerSecond,
    Overrides,
    Shard,
    SkipDamaged,
    WritesPage,
    all_overrides,
    parse_shard,
)
from vbm_ptm.cli.printing import how_to_go_on, show_plan, show_study, stdout
from vbm_ptm.errors import UsageError
from vbm_ptm.launch import is_main_process

if TYPE_CHECKING:
    from vbm_ptm.check.estimates import DataOutline, Estimate
    from vbm_ptm.data.reading.datasets import DatasetSpec
    from vbm_ptm.report.published import PublishedTable
    from vbm_ptm.study import PlannedRun


def study(
    file: Annotated[Path, typer.Argument(help="A study file, looked for as given and in configs/.")],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=PATH of one of its data sets, or NAME.SETTING=VALUE (imagenet_r.split_file=split.csv)."
        ),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Folder with <timm tag>.safetensors (or .npz, .pth) of each backbone.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for all run directories; default: runs/NAME.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only these lines or seeds: 'imagenet_r-slca*', '*/seed_1993-*'; may be repeated."),
    ] = None,
    shard: Shard = None,
    budget_hours: Annotated[
        float | None,
        typer.Option(min=0, help="Only the runs that are estimated to fit, in the order of the file."),
    ] = None,
    images_per_second: ImagesPerSecond = 300.0,
    skip_damaged: SkipDamaged = False,
    dry_run: DryRun = False,
    collect: Annotated[
        bool, typer.Option("--collect", metavar="", help="Run nothing; show what is finished.")
    ] = False,
    published: Annotated[
        Path | None,
        typer.Option(help="File of published numbers, looked up like FILE; written beside ours as Markdown."),
    ] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            metavar="",
            help="Also show means over tasks, top-5 accuracy and what was measured in training.",
        ),
    ] = False,
    report: WritesPage = False,
    device: DeviceName = None,
) -> None:
    """Run the unfinished runs of a study and collect the results; repeat the command to continue."""
    from vbm_ptm.config.study_config import read_study
    from vbm_ptm.config.tree import find_config
    from vbm_ptm.runs.places import Places
    from vbm_ptm.study import collect_finished, execute, plan_study

    folder, read = output or Path("runs") / file.stem, read_study(find_config(str(file)))
    table = None if published is None else _read_published(published)
    planned = plan_study(
        read,
        output=folder,
        overrides=all_overrides(overrides, device=device),
        places=Places(_data_settings(data or ()), weights),
        only=only or (),
    )
    if collect:
        collected = collect_finished(planned)
    else:
        part = _part(planned, table, shard=shard, budget_hours=budget_hours, rate=images_per_second)
        if dry_run:
            _show_dry_run(planned, table, part=part, rate=images_per_second)
            return
        _check_files(part)
        with how_to_go_on("Repeat the command to continue."):
            collected = execute(part, output=folder, study=planned, skip_damaged=skip_damaged)
    if table is not None and is_main_process():
        protocol = plan_study(read, output=folder, only=only or ())
        _show_published(table, planned, protocol=protocol, folder=folder)
    show_study(collected, folder=folder, writes_page=report, details=details)


def _data_settings(items: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read NAME=PATH and NAME.SETTING=VALUE; return the settings of each data set."""
    from vbm_ptm.config.run_config import override
    from vbm_ptm.config.tree import merge

    settings: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not (key and equals and value):
            raise UsageError(f"--data '{item}' is not of the form NAME=PATH or NAME.SETTING=VALUE.")
        merge(settings, override(item) if "." in key else {key: {"path": value}})
    return settings


def _read_published(file: Path) -> PublishedTable:
    from pydantic import ValidationError

    from vbm_ptm.config.problems import problem_messages
    from vbm_ptm.config.tree import find_config, read_yaml
    from vbm_ptm.report.published import PublishedTable

    found = find_config(str(file))
    try:
        return PublishedTable.model_validate(read_yaml(found))
    except ValidationError as error:
        problems = problem_messages(PublishedTable, error, origin=lambda _: str(found))
        raise UsageError(*(f"published table: {problem}" for problem in problems)) from error


def _is_at_hand(spec: DatasetSpec) -> bool:
    """Return whether images are here; those of the hub are never fetched to be counted."""
    return spec.path is not None and spec.path.exists()


def _estimates(
    planned: Sequence[PlannedRun], table: PublishedTable | None, *, prefers_published: bool = False
) -> list[Estimate]:
    """Return what each run takes, by the images that are there or the published counts."""
    from vbm_ptm.check.estimates import estimate_all, even_outline, read_outline

    known = {} if table is None else table.benchmarks

    def outline_of(spec: DatasetSpec) -> DataOutline:
        if spec.name not in known or (_is_at_hand(spec) and not prefers_published):
            return read_outline(spec)
        counts = {"num_classes", "num_train", "num_test", "domains"}
        return even_outline(**known[spec.name].model_dump(include=counts), spec=spec)

    return estimate_all((run.config for run in planned), outline_of=outline_of)


def _not_finished(planned: Sequence[PlannedRun]) -> set[Path]:
    from vbm_ptm.study import finished_runs

    return {run.output for run in planned} - {run.output for run, _ in finished_runs(planned)}


def _part(
    planned: Sequence[PlannedRun],
    table: PublishedTable | None,
    *,
    shard: str | None,
    budget_hours: float | None,
    rate: float,
) -> list[PlannedRun]:
    """Return the runs of one part, and of these what is not finished and fits into the budget."""
    from vbm_ptm.study import fitting
    from vbm_ptm.study import shard as part_of

    part = list(planned)
    if shard is not None:
        index, count = parse_shard(shard)
        # By published counts, where there are some: every machine must cut the list alike.
        costs = [each.hours(1) for each in _estimates(planned, table, prefers_published=True)]
        part = part_of(planned, index=index, count=count, costs=costs)
    if budget_hours is not None:
        remaining = _not_finished(planned)
        part = [run for run in part if run.output in remaining]
        part = fitting(
            part, costs=[each.hours(rate) for each in _estimates(part, table)], budget=budget_hours
        )
    return part


def _show_dry_run(
    planned: Sequence[PlannedRun],
    table: PublishedTable | None,
    *,
    part: Sequence[PlannedRun],
    rate: float,
) -> None:
    show_plan(
        planned,
        _estimates(planned, table),
        images_per_second=rate,
        part={run.output for run in part},
        finished={run.output for run in planned} - _not_finished(planned),
    )
    _show_assumed(planned, table)


def _check_files(part: Sequence[PlannedRun]) -> None:
    from vbm_ptm.runs.places import check_files

    remaining = _not_finished(part)
    try:
        check_files(run.config for run in part if run.output in remaining)
    except UsageError as error:
        advice = "Give their places with --data NAME=PATH, --data NAME.SETTING=VALUE and --weights FOLDER."
        raise UsageError(*error.problems, advice) from error


def _show_assumed(planned: Sequence[PlannedRun], table: PublishedTable | None) -> None:
    """Say of which data sets the counts are the published ones."""
    specs = {run.config.dataset.name: run.config.dataset for run in planned}
    for name, spec in specs.items():
        if table is not None and name in table.benchmarks and not _is_at_hand(spec):
            known = table.benchmarks[name]
            stdout().print(
                f"{name}: the images are not available (--data NAME=PATH); assumed: {known.origin}, "
                f"{known.num_train:,} for training, {known.num_test:,} for testing, before what its settings leave out "
                "or hold out.",
                soft_wrap=True,
            )


def _show_published(
    table: PublishedTable, planned: Sequence[PlannedRun], *, protocol: Sequence[PlannedRun], folder: Path
) -> None:
    """Print the comparison, and keep it as ``published.md`` and ``published.json``."""
    from vbm_ptm.report.published import TableRun, compare_with_published, markdown
    from vbm_ptm.storage.durable_files import write_json
    from vbm_ptm.study import changed_settings, exclusively, finished_runs

    results = {run.output: result for run, result in finished_runs(planned)}
    runs = [
        TableRun(
            row=run.line,
            benchmark=run.config.dataset.name,
            seeds=run.seeds,
            directory=str(run.output),
            changed=changed_settings(run, plain),
            result=results.get(run.output),
        )
        for run, plain in zip(planned, protocol, strict=True)
    ]
    compared = compare_with_published(table, runs)
    page = markdown(compared)
    with exclusively(folder):
        write_json(folder / "published.json", compared.to_json())
        (folder / "published.md").write_text(page, encoding="utf-8")
    typer.echo(page)
