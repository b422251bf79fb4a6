"""The command that trains one configuration, with one seed or several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from vbm_ptm.cli.options import (
    ConfigFile,
    Dataset,
    DeviceName,
    LearnerName,
    Overrides,
    Preset,
    SkipDamaged,
    all_overrides,
    integers,
    sources_of,
)
from vbm_ptm.cli.printing import how_to_go_on, show_study
from vbm_ptm.errors import UsageError


def train(
    dataset: Dataset = None,
    learner: LearnerName = None,
    preset: Preset = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Training seed.")] = None,
    seeds: Annotated[str | None, typer.Option(help="Training seeds of several runs: 1,2,3.")] = None,
    class_order_seed: Annotated[int | None, typer.Option(help="Seed of the class order only.")] = None,
    class_order_seeds: Annotated[str | None, typer.Option(help="Class-order seeds of several runs.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Run directory; default: runs/DATASET-LEARNER-vVIEWS.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Continue from the newest checkpoint.")
    ] = False,
    skip_damaged: SkipDamaged = False,
    stop_after_task: Annotated[
        int | None, typer.Option(min=1, help="Save and stop after this many tasks.")
    ] = None,
    device: DeviceName = None,
) -> None:
    """Train a learner task by task and evaluate it after each."""
    from vbm_ptm.study import execute, plan_runs

    if skip_damaged and not resume:
        raise UsageError("--skip-damaged needs --resume.")
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
                f"--output {folder} exists already. Continue it with --resume, or give another folder."
            )
        label = f"{first.learner.name}-v{first.view_batch.num_views}"
        planned_runs = plan_runs(label, line=label, output=folder, overrides=chosen, **several, **sources)
        with how_to_go_on("Continue with the same command and --resume."):
            collected = execute(planned_runs, output=folder, skip_damaged=skip_damaged)
        show_study(collected, folder=folder)
        return

    from vbm_ptm.experiment import run
    from vbm_ptm.report.collect import collect
    from vbm_ptm.storage.run_result import RunResult
    from vbm_ptm.study import measured_run

    (planned,) = plan_runs("", output=Path(), overrides=chosen, **sources)
    folder = output or _default_output(planned.config)
    without = ", without --stop-after-task or with a later one" if stop_after_task else ""
    with how_to_go_on(f"Continue with the same command and --resume{without}."):
        result = run(
            planned.config,
            output=folder,
            resume=resume,
            skip_damaged=skip_damaged,
            stop_after_task=stop_after_task,
        )
    label = f"{planned.config.learner.name}-v{planned.config.view_batch.num_views}"
    shown = replace(planned, label=label, output=folder)
    show_study(collect([measured_run(shown, RunResult.model_validate(result))]), folder=folder)


def _default_output(config: Any, *, ending: str = "") -> Path:
    name = f"{config.dataset.name}-{config.learner.name}-v{config.view_batch.num_views}{ending}"
    return Path("runs") / name.replace("/", "_")
