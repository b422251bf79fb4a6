"""One more task for a finished run, without the images of the tasks before.

The extended run lives in a directory of its own, with a copy of the first run's checkpoints and log: every earlier
learner that ``checkpoint.keep`` lets stay can still predict, the first run is untouched, and the new one needs neither
that run nor its data to be used, resumed or extended again. Its ``config.yaml`` names the first run and the new
images (``scenario.extends``, ``dataset``): trained once more, it extends that run once more, to the same bit. Learner,
backbone and transforms stay those of the first run; what else is not given anew does, too.

Measured after the new task are its own test images, among all classes seen. What is left of the earlier tasks cannot be
measured without their images, and every number that would need it is null; ``evaluate`` with a data set measures any
learner on it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vbm_ptm.config.run_config import ComposedConfig, RunConfig, dataset_spec, override
from vbm_ptm.config.tree import is_within
from vbm_ptm.errors import UsageError
from vbm_ptm.runs.directory import RunDirectory

# What may be another than in the run that is extended.
FREE_IN_EXTENSION = (
    *("dataset", "optimization", "view_batch", "objective", "trainer", "data", "checkpoint"),
    *("backbone.checkpoint", "device", "seed"),
)


def extension_config(
    run_directory: Path | str,
    *,
    dataset: str,
    is_more_data: bool = False,
    overrides: Sequence[str] = (),
) -> RunConfig:
    """Return the configuration that adds a data set to a finished run as one more task.

    Args:
        run_directory: What ``run`` wrote.
        dataset: As for ``compose``: a folder, a parquet file, a YAML file or a name.
        is_more_data: The data set may hold classes (or be a domain) that the run has learned before.
        overrides: Items ``path.to.setting=value`` for the new task.

    Raises:
        UsageError: The run is not finished or has no tasks to add to, or a setting cannot change any more.
    """
    directory = RunDirectory(Path(run_directory))
    tree = directory.config().model_dump(mode="json")
    result = directory.result()
    if result is None or not result.is_finished:
        raise UsageError(f"{directory.path} is not finished: resume it first.", advice="resume")
    kind = tree["scenario"]["kind"]
    if kind == "joint":
        raise UsageError(f"{directory.path} was trained jointly, as one task: train again on all images.")
    tree["dataset"] = dataset_spec(dataset).model_dump(mode="json") | {
        "transforms": tree["dataset"]["transforms"]
    }
    tree["scenario"] = {
        "kind": kind,
        "class_order": "natural",
        "extends": str(directory.path.absolute()),
        "num_earlier_tasks": len(result.tasks),
        "allow_known_classes": is_more_data,
    }
    composed = ComposedConfig()
    composed.merge(tree, f"{directory.path} and argument dataset={dataset}")
    for item in overrides:
        key = item.partition("=")[0].strip()
        if not is_within(key, FREE_IN_EXTENSION) or is_within(key, ["dataset.transforms"]):
            raise UsageError(
                f"{item}: an extension keeps the settings of the run. These may change: "
                f"{', '.join(FREE_IN_EXTENSION)}, but not dataset.transforms."
            )
        composed.merge(override(item), f"override {item}")
    return composed.validate()


def default_output(run_directory: Path, config: RunConfig) -> Path:
    """Return where an extended run lies if nothing is said: beside the run that it extends."""
    if run_directory.name in ("", ".."):  # it is called so from inside
        run_directory = Path(os.path.abspath(run_directory))
    name = f"{run_directory.name}+{config.dataset.name.replace('/', '_')}"
    return run_directory.with_name(name)
