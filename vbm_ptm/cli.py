"""The command line: thin, and without heavy imports until a command needs them."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vbm_ptm.errors import TrainingInterrupted, UsageError
from vbm_ptm.launch import is_main_process

if TYPE_CHECKING:
    from rich.console import Console

# What the user can do about a file that cannot be read or written; any other OSError is a failure of the program.
_ADVICE = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT), "Free some space or give another --output; --resume goes on."
    ),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), "Change its permissions or give another place."
    ),
    errno.ENAMETOOLONG: "Give a shorter name.",
}

# What the user can do about a computation that failed, by a part of torch's message.
_SMALLER = "Take smaller batches (optimization.batch_size, data.evaluation_batch_size)."
_FAILURES = {
    "out of memory": _SMALLER,
    "can't allocate memory": _SMALLER,
    "DataLoader worker": "Most often memory was short: take fewer data.num_workers, or 0.",
}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Class- and domain-incremental learning on pre-trained vision transformers, with the view-batch model.",
)

Dataset = Annotated[
    str | None,
    typer.Option(help="Name ('vbm-ptm list datasets'), a YAML file, a folder of images, or a parquet file."),
]
LearnerName = Annotated[
    str | None, typer.Option(help="Name ('vbm-ptm list learners') or package.module:Class of your own.")
]
Preset = Annotated[
    str | None,
    typer.Option(help="Preset of the learner's file: official, paper, embedded; none for plain defaults."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file that wins over data set and learner files.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="path.to.setting=value; repeat it for more. Wins over all files."),
]
DeviceName = Annotated[
    Literal["cpu", "cuda", "mps"] | None, typer.Option(help="Where to compute; the best device without it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Run = Annotated[Path, typer.Argument(help="A run directory.")]
TaskNumber = Annotated[
    int | None,
    typer.Option("--task", min=1, help="Number of the task after which the learner is taken; the last one."),
]


@app.command()
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
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the last finished task.")] = False,
    stop_after_task: Annotated[
        int | None, typer.Option(min=1, help="Stop, saved, after so many tasks.")
    ] = None,
    device: DeviceName = None,
) -> None:
    """Train a learner task by task and evaluate it after each."""
    from vbm_ptm.study import execute, plan_runs

    sources = _sources(dataset, learner, preset, config)
    chosen = _overrides(overrides, seed=seed, class_order_seed=class_order_seed, device=device)
    several = {
        "seeds": _integers("--seeds", seeds),
        "class_order_seeds": _integers("--class-order-seeds", class_order_seeds),
    }
    if any(several.values()):
        if (seed is not None and seeds) or (class_order_seed is not None and class_order_seeds):
            raise UsageError("give one seed or a list of seeds, not both.")
        if stop_after_task:
            raise UsageError("--stop-after-task is for a single run.")
        first = plan_runs("", output=Path(), overrides=chosen, **sources)[0].config
        folder = output or _default_output(first)
        if folder.exists() and not resume:
            raise UsageError(
                f"--output {folder} exists already. Go on with it by --resume, or give another folder."
            )
        label = f"{first.learner.name}-v{first.view_batch.num_views}"
        planned_runs = plan_runs(label, output=folder, overrides=chosen, **several, **sources)
        with _advice("Go on with the same command and --resume."):
            collected = execute(planned_runs, output=folder)
        _show_study(collected, folder)
        return

    from vbm_ptm.experiment import run
    from vbm_ptm.study import collect

    (planned,) = plan_runs("", output=Path(), overrides=chosen, **sources)
    folder = output or _default_output(planned.config)
    with _advice("Go on with the same command and --resume."):
        result = run(planned.config, output=folder, resume=resume, stop_after_task=stop_after_task)
    label = f"{planned.config.learner.name}-v{planned.config.view_batch.num_views}"
    _show_study(collect([replace(planned, label=label, output=folder)], [result]), folder)


@app.command()
def study(
    file: Annotated[Path, typer.Argument(help="A study file, looked for as given and in configs/.")],
    overrides: Overrides = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of all run directories; runs/NAME without it.")
    ] = None,
    device: DeviceName = None,
) -> None:
    """Run what is not finished of a study and collect it; repeat the command to go on."""
    from vbm_ptm.config_tree import find_config
    from vbm_ptm.study import execute, plan_study, read_study

    folder = output or Path("runs") / file.stem
    planned = plan_study(
        read_study(find_config(str(file))), output=folder, overrides=_overrides(overrides, device=device)
    )
    with _advice("Repeat the command to go on."):
        collected = execute(planned, output=folder)
    _show_study(collected, folder)


@app.command()
def evaluate(run: Run, task: TaskNumber = None, device: DeviceName = None, as_json: AsJson = False) -> None:
    """Measure a stored learner again on the test images of all tasks it had seen."""
    from vbm_ptm.experiment import evaluate as measure
    from vbm_ptm.metrics import AccuracyMatrix
    from vbm_ptm.report.tables import task_table
    from vbm_ptm.run_directory import RunDirectory

    index = None if task is None else task - 1
    state = RunDirectory(run).checkpoint(index).state
    measured, trained = measure(run, task=index, device=device), AccuracyMatrix.from_dict(state["matrix"])
    is_equal = measured.rows[0] == trained.rows[state["task_index"]]
    if as_json:
        _print_json({"metrics": measured.summary(), "equals_training": is_equal})
        return
    names = [
        values["domain"] or ", ".join(state["class_names"][index] for index in values["classes"])
        for values in state["evaluation_tasks"]
    ]
    _stdout().print(task_table(measured, names[: len(measured.rows[0])], after=0))
    verdict = "the same counts as" if is_equal else "OTHER counts than"
    _stdout().print(f"after task {state['task_index'] + 1}: {verdict} training measured")


@app.command()
def predict(
    run: Run,
    paths: Annotated[list[Path], typer.Argument(help="Image files or folders with images.")],
    top_k: Annotated[int, typer.Option(min=1, help="Classes to name per image.")] = 5,
    task: TaskNumber = None,
    device: DeviceName = None,
    as_json: AsJson = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
) -> None:
    """Name the classes of your own images, best first."""
    from vbm_ptm.data.folders import find_images
    from vbm_ptm.experiment import predict as classify

    if as_json and csv:
        raise UsageError("give --json or --csv, not both.")
    images = find_images(paths)
    predictions = classify(run, images, top_k=top_k, task=None if task is None else task - 1, device=device)
    rows: list[tuple[str, list[tuple[str, float]]]] = []
    broken: UsageError | None = None
    try:
        for item in predictions:
            rows.append((str(item.path), list(zip(item.class_names, item.scores, strict=True))))
    except UsageError as error:
        if not rows:
            raise
        broken = error  # what could be classified is shown first
    if as_json:
        _print_json(
            [{"path": path, "classes": [{"name": n, "score": s} for n, s in best]} for path, best in rows]
        )
    elif csv:
        import csv as writer

        lines = writer.writer(sys.stdout)
        lines.writerow(["path", "rank", "class", "score"])
        lines.writerows(
            (path, rank, *best) for path, ranked in rows for rank, best in enumerate(ranked, start=1)
        )
    else:
        from rich.table import Column, Table

        table = Table(Column("image", overflow="fold"), "class", "score", "then")
        for path, ((name, score), *others) in rows:
            table.add_row(path, name, f"{score:.3f}", ", ".join(f"{n} {s:.3f}" for n, s in others))
        _stdout().print(table)
    if broken:
        raise broken


@app.command("list")
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
        _print_json(names)
    else:
        for name in names:
            typer.echo(name)


@app.command()
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

    composed = compose(overrides=overrides or (), **_sources(dataset, learner, preset, config))
    if explain is not None:
        lines: dict[str, Any] = explain_setting(explain, composed)
    else:
        lines = survey(composed)
    if as_json:
        _print_json(lines)
    else:
        from rich.table import Table

        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for key, value in lines.items():
            table.add_row(key, str(value))
        _stdout().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    0 done, 2 wrong use or input, 1 failure, 130 or 143 interrupted and saved.
    """
    _configure_logging()
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where package.module:Class of an own learner is looked for last
    try:
        app(arguments)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    except UsageError as error:
        return _fail(2, *error.problems)
    except TrainingInterrupted as interruption:
        sys.stderr.write(f"{interruption}\n")
        return interruption.exit_code
    except FloatingPointError as error:
        return _fail(1, str(error))
    except RuntimeError as error:
        known = [advice for part, advice in _FAILURES.items() if part in str(error)]
        if not known:
            raise
        return _fail(1, f"{str(error).splitlines()[0]} {known[0]}")
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        if advice is None:
            raise
        return _fail(2, f"{error.filename or 'while writing'}: {error.strerror}. {advice}")
    return 0


@contextmanager
def _advice(text: str) -> Iterator[None]:
    """Say how to go on after an interruption."""
    try:
        yield
    except TrainingInterrupted as interruption:
        raise TrainingInterrupted(interruption.exit_code, f"{interruption}. {text}") from None


def _fail(code: int, *messages: str) -> int:
    for message in messages:
        sys.stderr.write(f"error: {message}\n")
    return code


def _configure_logging() -> None:
    import logging

    class Console(logging.Handler):
        """Writes through the console of the progress bar, which otherwise would be torn; loaded when needed."""

        def emit(self, record: logging.LogRecord) -> None:
            from vbm_ptm.engine.tracking import console

            prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            console.print(prefix + record.getMessage(), markup=False, soft_wrap=True)

    logger = logging.getLogger("vbm_ptm")
    logger.handlers = [Console()]
    logger.setLevel(logging.INFO if is_main_process() else logging.ERROR)
    logger.propagate = False


def _sources(
    dataset: str | None, learner: str | None, preset: str | None, config: Path | None
) -> dict[str, Any]:
    return {"dataset": dataset, "learner": learner, "preset": preset, "config_file": config}


def _overrides(
    given: list[str] | None,
    *,
    seed: int | None = None,
    class_order_seed: int | None = None,
    device: str | None = None,
) -> list[str]:
    named = {"seed": seed, "scenario.class_order_seed": class_order_seed, "device": device}
    return [*(given or ()), *(f"{key}={value}" for key, value in named.items() if value is not None)]


def _integers(option: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} '{text}' is not a list of whole numbers such as 1993,1996,1997."
        ) from None


def _default_output(config: Any) -> Path:
    name = f"{config.dataset.name}-{config.learner.name}-v{config.view_batch.num_views}"
    return Path("runs") / name.replace("/", "_")


def _show_study(collected: dict[str, Any], folder: Path) -> None:
    if not is_main_process():
        return
    from vbm_ptm.report.tables import effect_lines, study_table

    console = _stdout()
    console.print(study_table(collected))
    for line in effect_lines(collected):
        console.print(line, soft_wrap=True)
    console.print("run directories:")
    for row in collected["rows"]:
        for directory in row["directories"]:
            console.print(f"  {directory}", soft_wrap=True)


def _stdout() -> Console:
    """Return a console that shows names as they are and does not cut tables where there is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 160
    return console


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False))
