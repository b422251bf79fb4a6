"""What tests of several areas share: a tiny real ViT in a local file, coloured images, benchmarks in small.

The process that hands the tests out to others reads this file too: libraries that take seconds are imported where they
are used.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

gc.disable()  # until everything is imported

TINY_VIT = "test_vit.r160_in1k"
SHORT: dict[str, dict[str, Any]] = {"slca": {"alignment_epochs": 1, "alignment_samples_per_class": 8}}


# The longest tests, which begin first, so that none of them is alone at the end.
LONGEST = (
    "test_lowest_versions.py",
    "test_fault_drill.py",
    "test_ranks.py",
    "test_studies.py",
    "test_end_to_end.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let slow tests begin before quick ones."""

    def rank(item: pytest.Item) -> int:
        if not (item.get_closest_marker("slow") or item.get_closest_marker("distributed")):
            return len(LONGEST) + 1
        name = item.path.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=rank)


@pytest.fixture(scope="session", autouse=True)
def _same_everywhere() -> Iterator[None]:
    """Nothing reaches for the network, and runs that leave the precision open compute in fp32 on any machine."""
    import typer.main

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_HUB_OFFLINE", "1")
        patched.setattr("vbm_ptm.engine.precision.has_fast_bf16", lambda device_type: False)
        # Typer reads the signatures of all commands again for each call.
        patched.setattr("typer.main.get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    """Commands set handlers of their own, which would outlive a test."""
    logger = logging.getLogger("vbm_ptm")
    before = logger.handlers, logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with random weights of timm's ``test_vit`` (6 blocks, width 64) for images of 32 pixels."""
    import safetensors.torch
    import timm

    from vbm_ptm.randomness import seeded

    file = tmp_path_factory.mktemp("weights") / "test_vit.safetensors"
    with seeded(0):
        vit = timm.create_model("test_vit", img_size=32, num_classes=7)
    safetensors.torch.save_file(vit.state_dict(), file)
    return file


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 classes "class_00".. with 6 training and 4 test images each."""
    import miniatures

    return miniatures.write_toy_folder(
        tmp_path_factory.mktemp("toy"), [f"class_{index:02d}" for index in range(12)]
    )


@pytest.fixture(scope="session")
def cifar100_arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """``--dataset cifar100 --set dataset.path=...`` of a miniature that no test may change."""
    import miniatures

    return miniatures.cifar100_miniature(tmp_path_factory.mktemp("miniature"))


@pytest.fixture(scope="session")
def imagenet_r_arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """``--dataset imagenet_r --set dataset.path=...`` of a miniature that no test may change."""
    import miniatures

    return miniatures.imagenet_r_miniature(tmp_path_factory.mktemp("miniature"))


@pytest.fixture(scope="session")
def domainnet_arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """``--dataset domainnet --set dataset.path=...`` of a miniature that no test may change."""
    import miniatures

    return miniatures.domainnet_miniature(tmp_path_factory.mktemp("miniature"))


@pytest.fixture
def toy_tree(toy_folder: Path, tiny_weights: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a small, complete configuration: 3 tasks of 4 classes, 2 epochs, 2 views."""

    def make(learner: str = "slca", **learner_settings: Any) -> dict[str, Any]:
        return {
            "dataset": {"name": "toy", "path": str(toy_folder), "transforms": {"crop_scale": [0.5, 1.0]}},
            "scenario": {"num_tasks": 3},
            "backbone": {"name": TINY_VIT, "checkpoint": str(tiny_weights), "image_size": 32},
            "learner": {"name": learner, **SHORT.get(learner, {}), **learner_settings},
            "view_batch": {"num_views": 2},
            "optimization": {"epochs": 2, "batch_size": 8, "learning_rate": 0.01},
            "trainer": {"mixed_precision": "no"},
            "preset": "none",
        }

    return make


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _quick_garbage_collection() -> None:
    """Search nothing of what was imported: Accelerate collects after every task, pytest five times at the end."""
    if gc.isenabled():  # not at the beginning, when there is nothing but imports
        gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """No power is cut while tests run; those of what is written in which order put calls of their own there."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def free_port() -> int:
    """A port on which ranks can meet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port
