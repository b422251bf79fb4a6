"""The commands for what is done with a finished run."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vbm_ptm.cli.options import (
    AsJson,
    Changes,
    DeviceInUse,
    DeviceName,
    Overrides,
    Run,
    SkipDamaged,
    TaskNumber,
    all_overrides,
)
from vbm_ptm.cli.printing import how_to_go_on, print_json, stdout
from vbm_ptm.errors import UsageError
from vbm_ptm.launch import is_main_process

if TYPE_CHECKING:
    from vbm_ptm.metrics import AccuracyCell, AccuracyMatrix
    from vbm_ptm.runs.measurement import ClassCount
    from vbm_ptm.storage.checkpoint_state import CheckpointState


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run directory; with --dataset also an exported folder.")],
    task: TaskNumber = None,
    dataset: Annotated[
        str | None, typer.Option(help="Measure on this data set instead of the run's own test images.")
    ] = None,
    per_class: Annotated[
        bool, typer.Option("--per-class", metavar="", help="Show the accuracy on each class, too.")
    ] = False,
    predictions: Annotated[
        Path | None,
        typer.Option(
            help="File to write (.csv or .jsonl), with a line for every test image; replaced if it exists."
        ),
    ] = None,
    changes: Changes = None,
    device: DeviceInUse = None,
    as_json: AsJson = False,
) -> None:
    """Measure a stored learner again on the test images of all tasks it had seen, or on another data set."""
    from vbm_ptm.report.tables import task_table
    from vbm_ptm.runs.measurement import check_prediction_file, write_predictions
    from vbm_ptm.runs.stored_learner import measure, measure_on
    from vbm_ptm.storage.summary import summary

    index = None if task is None else task - 1
    if predictions is not None:
        check_prediction_file(predictions)
    if dataset is None:
        measured = measure(run, task=index, device=device, overrides=changes or ())
    else:
        measured = measure_on(run, dataset, task=index, device=device, overrides=changes or ())
    if predictions is not None:
        write_predictions(predictions, measured.images)
    classes = measured.per_class() if per_class else []
    more = {"classes": [asdict(each) | {"accuracy": each.accuracy} for each in classes]} if per_class else {}
    if dataset is None:
        _compare_with_training(run, index, measured.matrix, classes=classes, more=more, as_json=as_json)
    elif as_json:
        print_json({"metrics": summary(measured.matrix), **more})
    else:
        stdout().print(task_table(measured.matrix, [dataset], after=0))
        _show_classes(classes)


def _show_classes(classes: Sequence[ClassCount]) -> None:
    """Print a line for each class, if any are to be shown."""
    if classes:
        from vbm_ptm.report.tables import class_table

        rows = [
            (each.name, each.tasks, each.num_correct, each.num_images, each.taken_for) for each in classes
        ]
        stdout().print(class_table(rows))


def agree(one: AccuracyCell | None, other: AccuracyCell | None) -> bool:
    """Return whether all counts that both have are the same; earlier versions did not take all of them."""
    if not one or not other:
        return one is other
    pairs = zip(astuple(one), astuple(other), strict=True)
    return all(first == second for first, second in pairs if first is not None and second is not None)


def _compare_with_training(
    run: Path,
    index: int | None,
    measured: AccuracyMatrix,
    *,
    classes: Sequence[ClassCount],
    more: Mapping[str, Any],
    as_json: bool,
) -> None:
    from vbm_ptm.runs.directory import RunDirectory
    from vbm_ptm.storage.summary import summary

    state = RunDirectory(run).checkpoint(index).state
    now, then = measured.rows[-1], state.accuracies.rows[state.task_index]
    is_equal = all(agree(one, other) for one, other in zip(now, then, strict=True))
    if as_json:
        print_json({"metrics": summary(measured), "equals_training": is_equal, **more})
    else:
        _show_comparison(state, measured, is_equal=is_equal)
        _show_classes(classes)
    if not is_equal and [cell and cell.total for cell in now] == [cell and cell.total for cell in then]:
        # Other test images may give other counts; the same ones may not.
        raise typer.Exit(1)


def _show_comparison(state: CheckpointState, measured: AccuracyMatrix, *, is_equal: bool) -> None:
    from vbm_ptm.report.tables import task_table

    names = [
        task.domain or ", ".join(state.class_names[index] for index in task.classes)
        for task in state.evaluation_tasks
    ]
    stdout().print(task_table(measured, names[: len(measured.rows[-1])], after=-1))
    verdict = "the same counts as" if is_equal else "OTHER counts than"
    stdout().print(f"after task {state.task_index + 1}: {verdict} training measured")


def predict(
    run: Annotated[Path, typer.Argument(help="A run directory, or a folder made by 'vbm-ptm export'.")],
    paths: Annotated[list[Path], typer.Argument(help="Image files or folders with images.")],
    top_k: Annotated[int, typer.Option(min=1, help="Classes to name per image.")] = 5,
    task: TaskNumber = None,
    changes: Changes = None,
    device: DeviceInUse = None,
    as_json: AsJson = False,
    csv: Annotated[bool, typer.Option("--csv", metavar="", help="Print CSV instead of a table.")] = False,
) -> None:
    """Name the classes of your own images, best first."""
    from vbm_ptm.data.reading.folders import find_images
    from vbm_ptm.runs.stored_learner import predict as classify

    if as_json and csv:
        raise UsageError("give --json or --csv, not both.")
    images = find_images(paths)
    index = None if task is None else task - 1
    predictions = classify(run, images, top_k=top_k, task=index, device=device, overrides=changes or ())
    rows: list[tuple[str, list[tuple[str, float, float]]]] = []
    broken: UsageError | None = None
    try:
        for item in predictions:
            ranked = zip(item.class_names, item.scores, item.probabilities, strict=True)
            rows.append((str(item.path), list(ranked)))
    except UsageError as error:
        if not rows:
            raise
        broken = error  # what could be classified is shown first
    if as_json:
        print_json(
            [
                {"path": path, "classes": [{"name": n, "score": s, "probability": p} for n, s, p in best]}
                for path, best in rows
            ]
        )
    elif csv:
        import csv as writer

        lines = writer.writer(sys.stdout)
        lines.writerow(["path", "rank", "class", "score", "probability"])
        for path, best in rows:
            numbered = [(path, rank, *each) for rank, each in enumerate(best, start=1)]
            lines.writerows(numbered or [(path, "", "", "", "")])  # empty where all classes are ruled out
    else:
        from rich.table import Column, Table

        table = Table(Column("image", overflow="fold"), "class", "score", "probability", "then")
        for path, best in rows:
            if not best:
                table.add_row(path, "(none: all are ruled out)")
                continue
            (name, score, probability), *others = best
            then = ", ".join(f"{n}: {s:.3f} ({p:.1%})" for n, s, p in others)
            table.add_row(path, name, f"{score:.3f}", f"{probability:.1%}", then)
        stdout().print(table)
    if broken:
        raise broken


def export(
    run: Annotated[Path, typer.Argument(help="A run directory; with --push also an exported folder.")],
    output: Annotated[
        Path | None, typer.Option(help="Folder that does not exist yet; default: 'exported' in the run.")
    ] = None,
    task: TaskNumber = None,
    half: Annotated[
        bool,
        typer.Option(
            "--half", metavar="", help="Store weights in half precision; scores differ in their last digits."
        ),
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(help="Upload it to this repository of the Hugging Face Hub; created as private."),
    ] = None,
    changes: Changes = None,
) -> None:
    """Make a folder with everything that 'predict' needs, and a model card."""
    from vbm_ptm.runs.export import export as write
    from vbm_ptm.runs.export import push as upload
    from vbm_ptm.storage.portable import is_portable

    folder = run
    if not (push and is_portable(run)):
        folder = write(
            run,
            output=output,
            task=None if task is None else task - 1,
            is_half=half,
            overrides=changes or (),
        )
        typer.echo(f"exported: {folder}")
    if push:
        typer.echo(f"pushed: {upload(folder, push)}")


def extend(
    run: Run,
    dataset: Annotated[
        str, typer.Option(help="The new images: a folder, a parquet file, a YAML file, or a name.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Directory of the extended run; default: RUN+DATASET.")
    ] = None,
    more_data: Annotated[
        bool,
        typer.Option(
            "--more-data", metavar="", help="The images may be of classes that were learned before."
        ),
    ] = False,
    overrides: Overrides = None,
    resume: Annotated[
        bool, typer.Option("--resume", metavar="", help="Resume an extension that was stopped.")
    ] = False,
    skip_damaged: SkipDamaged = False,
    device: DeviceName = None,
) -> None:
    """Add the classes of a data set to a finished run, as one more task, without the earlier images."""
    from vbm_ptm.experiment import run as train
    from vbm_ptm.report.tables import percent
    from vbm_ptm.runs.extension import default_output, extension_config
    from vbm_ptm.storage.run_result import RunResult

    if skip_damaged and not resume:
        raise UsageError("--skip-damaged needs --resume.")
    config = extension_config(
        run,
        dataset=dataset,
        is_more_data=more_data,
        overrides=all_overrides(overrides, device=device),
    )
    folder = output or default_output(run, config)
    with how_to_go_on("Continue with the same command and --resume."):
        result = RunResult.model_validate(
            train(config, output=folder, resume=resume, skip_damaged=skip_damaged)
        )
    if is_main_process():
        own = percent(result.matrix.accuracy(-1, -1))
        new = ", ".join(result.tasks[-1]) or "no new class"
        typer.echo(f"task {len(result.tasks)}: {new}")
        typer.echo(
            f"accuracy on its test images, over all {len(result.class_names)} classes, in percent: {own}"
        )
        typer.echo(
            "earlier tasks: not measured; 'vbm-ptm evaluate RUN --dataset FOLDER' measures their images"
        )
        typer.echo(f"run directory: {folder}")


def diff(
    one: Annotated[Path, typer.Argument(help="A run directory.")],
    two: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Show the settings, versions, images and weights in which two runs differ."""
    from vbm_ptm.config.tree import as_yaml
    from vbm_ptm.runs.comparison import compare_runs

    compared = compare_runs(one, two)
    if as_json:
        print_json(compared)
        return
    from rich.table import Column, Table

    table = Table("", "what", Column(str(one), overflow="fold"), Column(str(two), overflow="fold"))
    for section, changes in compared.items():
        for number, (name, values) in enumerate(changes.items()):
            table.add_row("" if number else section, name, *map(as_yaml, values))
    if table.row_count:
        stdout().print(table)
    else:
        stdout().print("no difference")
