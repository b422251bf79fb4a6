"""All commands by name, and what the user is told when one fails."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from vbm_ptm.cli import finished, inspection, reporting, studies, training, verification, views, watching
from vbm_ptm.cli.advice import messages
from vbm_ptm.cli.streams import outlast_readers
from vbm_ptm.errors import TrainingInterrupted, UsageError, describe_failure
from vbm_ptm.launch import (
    current_directory,
    follow_launcher,
    is_main_process,
    leave_group,
    rank_prefix,
    shadowed_libraries,
)
from vbm_ptm.version import __version__

# What files of the user's may be called like.
_LIBRARIES = (
    *(
        "accelerate",
        "datasets",
        "huggingface_hub",
        "numpy",
        "PIL",
        "pyarrow",
        "pydantic",
        "rich",
        "safetensors",
    ),
    *("sklearn", "timm", "torch", "torchvision", "typer", "yaml"),
)

_MAX_MESSAGES = 100

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Class- and domain-incremental learning on pre-trained vision transformers, with the view-batch model.",
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"vbm_ptm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", is_eager=True, callback=_show_version, help="Show the version."
        ),
    ] = False,
) -> None: ...


def _alone(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that one process works on, under a launcher too: the others would write and say the same."""

    @functools.wraps(command)
    def on_rank_0(*arguments: Any, **options: Any) -> None:
        if leave_group():
            command(*arguments, **options)

    return on_rank_0


app.command()(training.train)
app.command()(studies.study)
app.command()(_alone(watching.watch))
app.command()(finished.extend)
app.command()(_alone(finished.evaluate))
app.command()(_alone(finished.predict))
app.command()(_alone(finished.export))
app.command()(_alone(finished.diff))
app.command()(_alone(verification.verify))
app.command()(_alone(reporting.report))
app.command("list")(_alone(inspection.list_names))
app.command()(_alone(inspection.check))
app.command()(_alone(inspection.split))
app.command()(_alone(views.views))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_application(app, arguments)


def run_application(application: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; return the exit code.

    0 done, 2 wrong use or input, 1 failure, 128 + number of the signal (130, 143, …) interrupted and saved.
    """
    outlast_readers()
    follow_launcher()
    _configure_logging()
    here = current_directory()
    if here is not None and here not in sys.path:
        sys.path.append(here)  # where package.module:Class of an own learner is looked for last
    try:
        application(arguments)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    except UsageError as error:
        return _fail(2, *messages(error))
    except TrainingInterrupted as interruption:
        if is_main_process():  # all ranks have agreed on it
            sys.stderr.write(f"{interruption}\n")
        return interruption.exit_code
    except (ImportError, AttributeError):
        shadowed = shadowed_libraries(_LIBRARIES)
        if not shadowed:
            raise
        return _fail(2, *shadowed)
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    except Exception as error:
        failure = describe_failure(error)
        if here is None and isinstance(error, FileNotFoundError):
            failure = "the current directory has been removed: change to one that exists"
        if failure is None:
            raise
        return _fail(2 if isinstance(error, OSError) else 1, failure)
    return 0


def _fail(code: int, *messages: str) -> int:
    for message in messages[:_MAX_MESSAGES]:
        sys.stderr.write(f"{rank_prefix()}error: {message}\n")
    if len(messages) > _MAX_MESSAGES:
        sys.stderr.write(f"error: and {len(messages) - _MAX_MESSAGES} more; vbm-ptm check --json lists all\n")
    return code


def _configure_logging() -> None:
    import logging

    class Console(logging.Handler):
        """Writes through the console of the progress bar, which otherwise would be torn; loaded when needed."""

        def emit(self, record: logging.LogRecord) -> None:
            from vbm_ptm.engine.tracking import console

            prefix = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            console.print(rank_prefix() + prefix + record.getMessage(), markup=False, soft_wrap=True)

    logger = logging.getLogger("vbm_ptm")
    logger.handlers = [Console()]
    logger.setLevel(logging.INFO if is_main_process() else logging.WARNING)
    if not is_main_process():  # what all ranks meet, rank 0 says
        logger.handlers[0].addFilter(
            lambda record: record.levelno >= logging.ERROR or hasattr(record, "is_of_rank")
        )
    logger.propagate = False
