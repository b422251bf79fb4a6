"""The commands that train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from vbm_ptm.cli.options import (
    ConfigFile,
    Dataset,
    DeviceName,
    DryRun,
    ImagesPerSecond,
    LearnerName,
    Overrides,
    Preset,
    Shard,
    SkipDamaged,
    all_overrides,
    integers,
    sources_of,
)
from vbm_ptm.cli.printing import how_to_go_on, show_plan, stdout
from vbm_ptm.errors import UsageError
from vbm_ptm.launch import is_main_process


def train(
    dataset: Dataset = None,
    learner: LearnerName = None,
    preset: Preset = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Training seed.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Training seeds of several runs: 1,2,3.")] = None,
    class_order_seed: Annotated[int | None, typer.Option(help="Seed of the class order alone.")] = None,
    class_order_seeds: Annotated[str | None, typer.Option(help="Class-order seeds of several runs.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Run directory; runs/DATASET-LEARNER-vVIEWS without it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    skip_damaged: SkipDamaged = False,
    stop_after_task: Annotated[
        int | None, typer.Option(min=1, help="Stop, saved, after so many tasks.")
    ] = None,
    device: DeviceName = None,
) -> None:
    """Train a learner task by task and evaluate it after each."""
    from vbm_ptm.study import execute, plan_runs

    if skip_damaged and not resume:
        raise UsageError("--skip-damaged is of use with --resume only.")
    sources = sources_of(dataset, learner, preset, config)
    chosen = all_overrides(overrides, seed=seed, class_order_seed=class_order_seed, device=device)
    several = {
        "seeds": integers("--seeds", seeds),
        "class_order_seeds": integers("--class-order-seeds", class_order_seeds),
    }
    if any(several.values()):
        if (seed is not None and seeds) or (class_order_seed is not None and class_order_seeds):
            raise UsageError("give one seed or a list of seeds, not both.")
        if stop_after_task:
            raise UsageError("--stop-after-task is for a single run.")
        first = plan_runs("", output=Path(), overrides=chosen, **sources)[0].config
        folder = output or _default_output(first, ending="-seeds")
        if folder.exists() and not resume:
            raise UsageError(
                f"--output {folder} exists already. Go on with it by --resume, or give another folder."
            )
        label = f"{first.learner.name}-v{first.view_batch.num_views}"
        planned_runs = plan_runs(label, output=folder, overrides=chosen, **several, **sources)
        with how_to_go_on("Go on with the same command and --resume."):
            collected = execute(planned_runs, output=folder, skip_damaged=skip_damaged)
        _show_study(collected)
        return

    from vbm_ptm.experiment import run
    from vbm_ptm.storage.run_result import RunResult
    from vbm_ptm.study import collect

    (planned,) = plan_runs("", output=Path(), overrides=chosen, **sources)
    folder = output or _default_output(planned.config)
    without = ", without --stop-after-task or with a later one" if stop_after_task else ""
    with how_to_go_on(f"Go on with the same command and --resume{without}."):
        result = run(
            planned.config,
            output=folder,
            resume=resume,
            skip_damaged=skip_damaged,
            stop_after_task=stop_after_task,
        )
    label = f"{planned.config.learner.name}-v{planned.config.view_batch.num_views}"
    _show_study(collect([replace(planned, label=label, output=folder)], [RunResult.model_validate(result)]))


def study(
    file: Annotated[Path, typer.Argument(help="A study file, looked for as given and in configs/.")],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of all run directories; runs/NAME without it.")
    ] = None,
    shard: Shard = None,
    skip_damaged: SkipDamaged = False,
    dry_run: DryRun = False,
    images_per_second: ImagesPerSecond = 300.0,
    collect: Annotated[bool, typer.Option("--collect", help="Run nothing: show what is finished.")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Show means over tasks and top-5 accuracy as well.")
    ] = False,
    device: DeviceName = None,
) -> None:
    """Run what is not finished of a study and collect it; repeat the command to go on."""
    from vbm_ptm.config.tree import find_config
    from vbm_ptm.study import collect_finished, execute, finished_runs, parse_shard, plan_study, read_study
    from vbm_ptm.study import shard as part_of

    folder = output or Path("runs") / file.stem
    planned = plan_study(
        read_study(find_config(str(file))), output=folder, overrides=all_overrides(overrides, device=device)
    )
    if collect:
        _show_study(collect_finished(planned), details=details)
        return
    part = planned
    if dry_run or shard is not None:
        from vbm_ptm.check.estimates import estimate_all

        estimates = estimate_all(item.config for item in planned)
        if shard is not None:
            index, count = parse_shard(shard)
            costs = [estimate.hours(1) for estimate in estimates]
            part = part_of(planned, index=index, count=count, costs=costs)
        if dry_run:
            chosen, finished = (
                {item.output for item in some} for some in (part, dict(finished_runs(planned)))
            )
            show_plan(planned, estimates, images_per_second=images_per_second, part=chosen, finished=finished)
            return
    with how_to_go_on("Repeat the command to go on."):
        collected = execute(part, output=folder, study=planned, skip_damaged=skip_damaged)
    _show_study(collected, details=details)


def _default_output(config: Any, *, ending: str = "") -> Path:
    name = f"{config.dataset.name}-{config.learner.name}-v{config.view_batch.num_views}{ending}"
    return Path("runs") / name.replace("/", "_")


def _show_study(collected: dict[str, Any], *, details: bool = False) -> None:
    """Print the tables of a study; leave with exit code 1 if a run of it failed."""
    if is_main_process():
        from vbm_ptm.report.tables import effect_lines, missing_lines, study_table

        console = stdout()
        console.print(study_table(collected, details=details))
        for line in effect_lines(collected):
            console.print(line, soft_wrap=True)
        console.print("run directories:")
        for row in collected["rows"]:
            for directory in row["directories"]:
                console.print(f"  {directory}", soft_wrap=True)
        for line in missing_lines(collected):
            console.print(line, soft_wrap=True)
    if collected.get("failed"):
        raise typer.Exit(1)
