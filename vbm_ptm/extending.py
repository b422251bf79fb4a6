"""One more task for a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vbm_ptm.experiment import run
from vbm_ptm.runs.extension import default_output, extension_config


def extend(
    run_directory: Path | str,
    *,
    dataset: str,
    output: Path | str | None = None,
    is_more_data: bool = False,
    overrides: Sequence[str] = (),
    resume: bool = False,
    skip_damaged: bool = False,
    is_quiet: bool = False,
) -> dict[str, Any]:
    """Add a data set to a finished run as one more task, without the earlier images; return the new result.

    Args:
        run_directory: What ``run`` wrote.
        dataset: As for ``compose``: a folder, a parquet file, a YAML file or a name.
        output: Directory of the extended run; None for the one beside the run that carries both names.
        is_more_data: The data set may hold classes (or be a domain) that the run has learned before.
        overrides: Items ``path.to.setting=value`` for the new task.
        resume: Resume an extension that was stopped.
        skip_damaged: As for ``run``.
        is_quiet: As for ``run``.

    Raises:
        UsageError: The run is not finished or has no tasks to add to, or a setting cannot change any more.
        TrainingInterrupted: The extension was stopped and can be resumed.
    """
    config = extension_config(run_directory, dataset=dataset, is_more_data=is_more_data, overrides=overrides)
    folder = output or default_output(Path(run_directory), config)
    return run(config, output=folder, resume=resume, skip_damaged=skip_damaged, is_quiet=is_quiet)
