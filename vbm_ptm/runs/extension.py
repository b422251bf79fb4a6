"""One more task for a finished run, without the images of earlier tasks.

The extended run has its own directory, with a copy of the first run's checkpoints and log: every earlier learner that
``checkpoint.keep`` has kept can still predict, the first run is untouched, and the new one needs neither that run nor
its data to be used, resumed or extended again. Its ``config.yaml`` names the first run and the new images
(``scenario.extends``, ``dataset``): when trained again, it extends that run again, to the same bit. Learner, backbone
and transforms stay those of the first run, and so does everything else that is not given anew.

After the new task, its own test images are measured, among all classes seen. How much is left of earlier tasks cannot
be measured without their images, and every number that would need it is null; ``evaluate`` with a data set measures any
learner on that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vbm_ptm.config.run_config import ComposedConfig, RunConfig, dataset_spec, override
from vbm_ptm.config.tree import is_within
from vbm_ptm.errors import UsageError
from vbm_ptm.runs.directory import RunDirectory

# Settings that may differ from those of the run that is extended.
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
        UsageError: The run is not finished or has no tasks to add to, or a setting can no longer change.
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
    """Return the default directory of an extended run: beside the run that it extends."""
    if run_directory.name in ("", ".."):  # that is its name from inside
        run_directory = Path(os.path.abspath(run_directory))
    name = f"{run_directory.name}+{config.dataset.name.replace('/', '_')}"
    return run_directory.with_name(name)
