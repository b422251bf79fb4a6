"""Whether all ranks were started for the same run."""

from __future__ import annotations

import hashlib
import json

from vbm_ptm.building import Setup
from vbm_ptm.engine.acceleration import Accelerator
from vbm_ptm.engine.fingerprint import difference_between_ranks
from vbm_ptm.errors import UsageError


def check_ranks_agree(setup: Setup, accelerator: Accelerator) -> None:
    """Refuse ranks that were started with other settings, images or weights; files may be in different places.

    Raises:
        UsageError: One rank differs from the others.
    """
    config, weights = setup.config, setup.learner.backbone.weights
    settings = config.model_dump(mode="json", exclude={"dataset", "backbone", "data", "device"})
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
