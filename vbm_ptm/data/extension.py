"""The data and the tasks of a run that is extended by one task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vbm_ptm.data.image_split import ImageDatasets
from vbm_ptm.data.scenario import Scenario, Task
from vbm_ptm.data.task_division import ScenarioConfig, extend_scenario
from vbm_ptm.errors import UsageError


def extended(
    config: ScenarioConfig,
    datasets: ImageDatasets,
    *,
    name: str,
    tasks: Sequence[Task],
    class_names: Sequence[str],
) -> tuple[ImageDatasets, Scenario]:
    """Return the data of the new task, and the tasks of the run with the new one at the end.

    Args:
        config: The settings, with the number of earlier tasks.
        datasets: The new images.
        name: Their name, which is also the name of their domain if they have none.
        tasks: Tasks of the run that is extended, or of the extension itself.
        class_names: Class names of that run by class index.

    Raises:
        UsageError: The images are of several domains, or were learned before.
    """
    domain, train, test = name, datasets.train, datasets.test
    if config.kind == "domain_incremental" and train.domains is None:
        train = replace(train, domains=np.full(len(train), domain))
        test = replace(test, domains=np.full(len(test), domain))
        datasets = replace(datasets, train=train, test=test)
    if config.kind == "domain_incremental" and train.domains is not None:
        names = sorted(set(train.domains.tolist()))
        if len(names) > 1:
            raise UsageError(
                f"an extension adds one task, but the data set has {len(names)} domains: {', '.join(names)}. "
                "Extend by one domain at a time."
            )
        (domain,) = names
    earlier = tasks[: config.num_earlier_tasks]
    scenario = extend_scenario(
        config,
        earlier=earlier,
        known_names=class_names[: earlier[-1].num_seen_classes],
        class_names=datasets.class_names,
        labels=datasets.train.labels,
        domain=domain,
    )
    return datasets, scenario
