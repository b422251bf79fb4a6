"""Whether all ranks were started for the same run."""

from __future__ import annotations

import hashlib
import json

from vbm_ptm.building import Setup
from vbm_ptm.config.tree import is_within, leaves
from vbm_ptm.engine.acceleration import Accelerator
from vbm_ptm.engine.fingerprint import difference_between_ranks
from vbm_ptm.errors import UsageError
from vbm_ptm.runs.directory import LISTS, PLACES

# Settings that may differ between machines, besides the places of files: what images and weights are is compared.
_FREE = (
    *("data", "device", "scenario.extends"),
    *("dataset.name", "dataset.source", "dataset.config_name", "dataset.revision", "dataset.verify"),
)


def check_ranks_agree(setup: Setup, accelerator: Accelerator) -> None:
    """Refuse ranks that were started with other settings, images or weights; files may be in different places.

    Raises:
        UsageError: One rank differs from the others.
    """
    config, weights = setup.config, setup.learner.backbone.weights
    settings = {
        name: value
        for name, value in leaves(config.model_dump(mode="json"))
        if not is_within(name, (*PLACES, *LISTS, *_FREE))
    }
    facts = {
        **settings,
        "the images or their split": setup.benchmark.datasets.split_sha256,
        "the backbone's weights": weights.sha256 if weights else "",
    }
    prints = {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        for name, value in facts.items()
    }
    difference = difference_between_ranks(prints, accelerator)
    if difference:
        raise UsageError(f"{difference}. Start the same command on every machine, with the same data.")
