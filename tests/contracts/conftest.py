"""Every registered learner on a tiny real ViT; a learner added later is covered by its file name alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from small_runs import depth_for
from timm.models.vision_transformer import VisionTransformer

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.learners import create_learner, learner_class, list_learners
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded

Build = Callable[..., Learner]

# Defaults that do not fit a backbone of width 48, or take long.
SETTINGS: dict[str, dict[str, Any]] = {
    "coda_prompt": {"pool_size": 30},
    "expandable": {"balanced_epochs": 2},
    "hide_prompt": {"alignment_epochs": 2, "num_centroids": 2},
    "ran_pac": {"projection_width": 100},
    "slca": {"alignment_epochs": 2},
    "slca_pp": {"alignment_epochs": 2, "cross_entropy_weight": 0.5},
    "tuna": {"alignment_epochs": 2, "orthogonality_weight": 0.1},
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out domains of learners that refuse them, which a test of its own holds."""

    def is_refused(item: pytest.Item) -> bool:
        chosen = (
            item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        )
        name = chosen.get("learner_name")
        return chosen.get("scenario") == "domains" and bool(name) and not learner_class(name).takes_domains

    refused = [item for item in items if is_refused(item)]
    if refused:
        config.hook.pytest_deselected(items=refused)
        items[:] = [item for item in items if item not in refused]


@pytest.fixture(scope="session")
def tiny_backbone(learner_name: str) -> PromptableViT:
    with seeded(0):
        vit = VisionTransformer(
            img_size=32,
            patch_size=8,
            embed_dim=48,
            depth=depth_for(learner_name),
            num_heads=4,
            num_classes=0,
        )
    return PromptableViT(vit)


# Parts or variants of what agem, der_pp, dualprompt, expandable, icarl and lwf do: the full tier walks them too.
VARIANTS = ("agem_r", "bic", "dark_er", "er", "fdr", "lwf_mc", "s_prompt_pp", "tcil", "ucir", "wa")


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in list_learners()
    ],
)
def learner_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def build(learner_name: str, tiny_backbone: PromptableViT) -> Build:
    """Return a function that makes a fresh learner with its default settings."""

    def make(*, num_tasks: int = 3, seed: int = 0) -> Learner:
        with seeded(seed):
            return create_learner(
                learner_name,
                backbone=copy.deepcopy(tiny_backbone),
                num_tasks=num_tasks,
                settings=SETTINGS.get(learner_name),
            )

    return make
