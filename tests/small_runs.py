"""Tiny benchmarks, learners and runs as fixtures: the conftest.py of tests/engine and tests/storage takes them all."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from images import encoded, pattern
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from vbm_ptm.backbones import BackboneConfig, PromptableViT, load_backbone
from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.image_split import ImageDatasets, ImageSplit
from vbm_ptm.data.loader_config import LoaderConfig
from vbm_ptm.data.record import DataRecord
from vbm_ptm.data.task_division import ScenarioConfig, build_scenario
from vbm_ptm.data.transforms import TransformsConfig, build_transforms
from vbm_ptm.data.view_batch_config import ViewBatchConfig
from vbm_ptm.data.view_transforms import ViewTransforms
from vbm_ptm.engine.acceleration import Precision, build_accelerator, loaders_for
from vbm_ptm.engine.interruption import StopRequest
from vbm_ptm.engine.objective import ObjectiveConfig, ViewBatchObjective
from vbm_ptm.engine.optimization import OptimizationConfig
from vbm_ptm.engine.recipe import Recipe
from vbm_ptm.engine.tracking import RunLog
from vbm_ptm.engine.trainer import Trainer
from vbm_ptm.engine.trainer_config import TrainerConfig
from vbm_ptm.learners import create_learner
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.registry import learner_class
from vbm_ptm.randomness import seeded
from vbm_ptm.storage.checkpoint import CheckpointStore, read_checkpoint, restore
from vbm_ptm.storage.save_schedule import SaveSchedule

__all__ = [
    "benchmark_of_three",
    "new_benchmark",
    "new_learner",
    "new_run",
    "tiny_backbones",
    "transforms",
]

# Defaults that do not fit a backbone of this width, or take long.
SETTINGS: dict[str, dict[str, Any]] = {
    "coda_prompt": {"pool_size": 12},
    "expandable": {"balanced_epochs": 2},
    "hide_prompt": {"alignment_epochs": 3, "num_centroids": 2},
    "ran_pac": {"projection_width": 60},
    "slca_pp": {"drift": "linear"},
    "tuna": {"alignment_epochs": 5},
}


def depth_for(learner: str) -> int:
    """Return how many blocks a learner's defaults need: six where one names blocks behind the second, else two."""
    fields = learner_class(learner).config_class.model_fields
    named = [field.default for name, field in fields.items() if name.endswith("blocks")]
    return 6 if any(isinstance(blocks, tuple) and max(blocks) > 1 for blocks in named) else 2


@pytest.fixture(scope="session")
def transforms() -> ViewTransforms:
    return build_transforms(
        TransformsConfig(crop_scale=(0.6, 1.0), horizontal_flip=0.0, strong="affine"),
        image_size=32,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        interpolation="bilinear",
        crop_fraction=1.0,
    )


def split_of(
    name: Any, labels: Sequence[int], images: Sequence[Image.Image], domains: Sequence[str] | None
) -> ImageSplit:
    rows = []
    for image in images:
        rows.append({"bytes": encoded(image), "path": None})
    return ImageSplit(
        rows=Dataset.from_dict({"image": rows}),
        labels=np.array(labels, dtype=np.int64),
        domains=None if domains is None else np.array(domains),
        name=name,
        source_names=pa.array([f"{name}/{row}.png" for row in range(len(rows))]),
    )


@pytest.fixture(scope="session")
def new_benchmark(transforms: ViewTransforms) -> Callable[..., Benchmark]:
    """Return a function that draws a benchmark; with domains, every class occurs in each of them."""

    def make(
        train_sizes: Sequence[int],
        *,
        test_sizes: Sequence[int] | None = None,
        domains: Sequence[str] = (),
        test_images: Sequence[Image.Image] | None = None,
        **scenario: Any,
    ) -> Benchmark:
        if test_sizes is None:
            test_sizes = [2] * len(train_sizes)
        splits = {}
        for first, (name, sizes) in enumerate((("train", train_sizes), ("test", test_sizes))):
            rows = [
                (label, number, domain)
                for number in range(max(sizes, default=0))
                for label, size in enumerate(sizes)
                if number < size
                for domain in range(max(len(domains), 1))
            ]
            images = [pattern(label, number + 1000 * first, domain) for label, number, domain in rows]
            if name == "test" and test_images is not None:
                images = list(test_images)
            names = [domains[domain] for _, _, domain in rows] if domains else None
            splits[name] = split_of(name, [label for label, _, _ in rows], images, names)
        class_names = tuple(f"class {label}" for label in range(len(train_sizes)))
        built = build_scenario(
            ScenarioConfig(**{"class_order": "natural", **scenario}),
            class_names=class_names,
            labels=splits["train"].labels,
            domains=splits["train"].domains,
        )
        datasets = ImageDatasets(
            **splits,
            class_names=class_names,
            split_sha256="",
            record=DataRecord.model_construct(held_out=None),
        )
        return Benchmark(datasets, built, transforms)

    return make


@pytest.fixture(scope="session")
def benchmark_of_three(new_benchmark: Callable[..., Benchmark]) -> Benchmark:
    """Three tasks of two classes with five training images each."""
    return new_benchmark([5] * 6, num_tasks=3)


@pytest.fixture(scope="session")
def tiny_backbones() -> dict[int, PromptableViT]:
    """By depth; prompts need blocks 0 to 4 by default."""
    backbones = {}
    for depth in (2, 6):
        with seeded(0):
            vit = VisionTransformer(
                img_size=32, patch_size=8, embed_dim=48, depth=depth, num_heads=4, num_classes=0
            )
        with torch.no_grad():  # weights as drawn hardly let the patches reach the class token
            for block in vit.blocks:
                for parameter in block.parameters():
                    parameter.mul_(4 if parameter.ndim > 1 else 1)
        backbones[depth] = PromptableViT(vit)
    return backbones


@pytest.fixture(scope="session")
def new_learner(tiny_backbones: dict[int, PromptableViT]) -> Callable[..., Learner]:
    """Return a function that makes a fresh learner on a ViT of some depth, or on a narrow ResNet-18."""

    def make(
        name: str, *, num_tasks: int = 3, depth: int = 2, on_resnet: bool = False, **settings: Any
    ) -> Learner:
        backbone = (
            load_backbone(BackboneConfig(name="resnet18_cifar", channels=2), seed=0)
            if on_resnet
            else copy.deepcopy(tiny_backbones[depth])
        )
        with seeded(0):
            return create_learner(
                name,
                backbone=backbone,
                num_tasks=num_tasks,
                settings=SETTINGS.get(name, {}) | settings,
            )

    return make


@dataclass
class Run:
    """A trainer and what stands around it."""

    trainer: Trainer
    accelerator: Accelerator
    stop: StopRequest
    log: RunLog
    log_path: Path
    store: CheckpointStore

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of one kind that the log holds, without what no second run would repeat."""
        lines = [json.loads(line) for line in self.log_path.read_text().splitlines()]
        for line in lines:
            if line["event"] == "step":
                del line["data_seconds"]
        return [line for line in lines if line["event"] == name]


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Return a function that builds a trainer: 2 epochs of SGD, 8 images a step, one view.

    With ``goes_on`` the learner goes on from the newest checkpoint of an earlier run of that name.
    """

    logs: list[RunLog] = []

    def make(
        learner: Learner,
        benchmark: Benchmark,
        *,
        num_views: int = 1,
        seed: int = 0,
        name: str = "run",
        log_every: int = 10,
        num_workers: int = 0,
        max_steps_per_task: int | None = None,
        mixed_precision: Precision = "no",
        stop_after_task: int | None = None,
        every: str = "task",
        goes_on: bool = False,
        view_batch: Mapping[str, Any] | None = None,
        trainer: Mapping[str, Any] | None = None,
        **optimization: Any,
    ) -> Run:
        directory = tmp_path / name
        directory.mkdir(exist_ok=goes_on)
        accelerator = build_accelerator(device="cpu", mixed_precision=mixed_precision)
        stop = StopRequest(stop_after_task)
        store = CheckpointStore(directory / "checkpoints", fresh=learner)
        checkpoint = read_checkpoint(store.newest_first()[0]) if goes_on else None
        if checkpoint:
            restore(learner, checkpoint)
            store.go_on_from(checkpoint)
        log = RunLog(directory / "log.jsonl", position=checkpoint.state.log_position if checkpoint else 0)
        logs.append(log)
        built = Trainer(
            learner,
            recipe=Recipe(
                ViewBatchObjective(ObjectiveConfig()),
                OptimizationConfig(**{"epochs": 2, "batch_size": 8, "learning_rate": 0.05, **optimization}),
                view_batch=ViewBatchConfig(num_views=num_views, **(view_batch or {})),
                seed=seed,
                max_steps=max_steps_per_task,
            ),
            loaders=loaders_for(
                accelerator,
                benchmark,
                LoaderConfig(evaluation_batch_size=5, num_workers=num_workers),
                seed=seed,
            ),
            config=TrainerConfig(
                log_every=log_every,
                max_steps_per_task=max_steps_per_task,
                mixed_precision=mixed_precision,
                **(trainer or {}),
            ),
            accelerator=accelerator,
            log=log,
            store=store,
            schedule=SaveSchedule(every),
            stop=stop,
        )
        if checkpoint:
            built.progress.load_state(checkpoint.state, checkpoint.optimizer_tensors())
        return Run(built, accelerator, stop, log, directory / "log.jsonl", store)

    yield make
    for log in logs:
        log.close()
