"""Class- and domain-incremental learning on pre-trained vision transformers, with the view-batch model.

What most programs need is named here. Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vbm_ptm.version import __version__

if TYPE_CHECKING:
    from vbm_ptm.config.run_config import compose
    from vbm_ptm.experiment import run
    from vbm_ptm.extending import extend
    from vbm_ptm.learners.registry import list_learners
    from vbm_ptm.runs.export import export
    from vbm_ptm.runs.stored_learner import evaluate, predict

__all__ = ["__version__", "compose", "evaluate", "export", "extend", "list_learners", "predict", "run"]

_HOMES = {
    "compose": "vbm_ptm.config.run_config",
    "evaluate": "vbm_ptm.runs.stored_learner",
    "export": "vbm_ptm.runs.export",
    "extend": "vbm_ptm.extending",
    "list_learners": "vbm_ptm.learners.registry",
    "predict": "vbm_ptm.runs.stored_learner",
    "run": "vbm_ptm.experiment",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vbm_ptm' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
