"""A tiny real ViT, tensors as tasks, and the features that a trainer hands to ``end_task``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.optimization import OptimizationConfig, build_optimizer
from vbm_ptm.learners import create_learner
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded


@pytest.fixture(scope="session")
def tiny_backbone() -> PromptableViT:
    with seeded(0):
        return PromptableViT(
            VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=0)
        )


@pytest.fixture
def build(tiny_backbone: PromptableViT) -> Callable[..., Learner]:
    """Return a function that makes a fresh learner on its own copy of the backbone."""

    def make(name: str, *, num_tasks: int = 3, **settings: Any) -> Learner:
        with seeded(0):
            return create_learner(
                name, backbone=copy.deepcopy(tiny_backbone), num_tasks=num_tasks, settings=settings
            )

    return make


class GivenFeatures:
    """Features (n, D) and class indices (n,) that are what the test says they are."""

    def __init__(self, values: Tensor, labels: Sequence[int]) -> None:
        self.values = values
        self.labels = torch.tensor(labels)
        self.transforms: list[str] = []

    def __call__(
        self, rows: Sequence[int] | None = None, transform: Literal["eval", "weak"] = "eval"
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.transforms.append(transform)
        return self.values, self.labels, torch.arange(len(self.labels))


@pytest.fixture
def given_features() -> type[GivenFeatures]:
    return GivenFeatures


@pytest.fixture
def train() -> Callable[..., Learner]:
    """Return a function that begins a task, unless that is done, and takes steps with strong weight decay."""

    def steps(
        learner: Learner, task: Task, *, optimizer: Literal["sgd", "adam"] = "adam", num_steps: int = 3
    ) -> Learner:
        if len(learner.tasks) == task.index:
            with seeded(task.index):
                learner.begin_task(task)
        learner.train()
        config = OptimizationConfig(optimizer=optimizer, learning_rate=0.02, weight_decay=0.1)
        stepper = build_optimizer(config, learner.parameter_groups())
        generator = torch.Generator().manual_seed(task.index)
        images = torch.randn(6, 3, 32, 32, generator=generator)
        columns = torch.arange(6) % len(task.classes)
        for _ in range(num_steps):
            output = learner(images, torch.tensor(task.classes)[columns])
            assert output.columns.tolist() == list(task.classes)
            loss = F.cross_entropy(output.logits, columns)
            loss = loss + sum(term.mean() for term in output.auxiliary.values())
            stepper.zero_grad()
            loss.backward()
            stepper.step()
        return learner.eval()

    return steps


@pytest.fixture(autouse=True)
def _log_reaches_the_tests() -> Iterator[None]:
    """The command line keeps the package's log to itself."""
    logger = logging.getLogger("vbm_ptm")
    before = logger.propagate
    logger.propagate = True
    yield
    logger.propagate = before
