"""What a finished task left behind, used again: measured on the test images, or to classify others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from PIL.Image import Image

from vbm_ptm.data.images import decode_image
from vbm_ptm.data.transforms import build_transforms
from vbm_ptm.engine.acceleration import Device, build_accelerator
from vbm_ptm.engine.checkpoint import restore
from vbm_ptm.engine.evaluator import Evaluator
from vbm_ptm.errors import UsageError
from vbm_ptm.experiment import build, build_learner, restore_checked
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.run_directory import RunDirectory


def evaluate(
    run_directory: Path | str, *, task: int | None = None, device: Device | None = None
) -> AccuracyMatrix:
    """Measure a stored learner again on the test images of all tasks that it had seen.

    Args:
        run_directory: What ``run`` wrote.
        task: Index of the task after which the learner is taken; None for the last finished one.
        device: Where to compute; None for the device of the run.

    Returns:
        A matrix whose only row is the new measurement.
    """
    directory = RunDirectory(Path(run_directory))
    config = directory.config()
    checkpoint = directory.checkpoint(task)
    accelerator = build_accelerator(
        device=device or config.device, mixed_precision=config.trainer.mixed_precision
    )
    setup = build(config)
    restore_checked(setup, checkpoint)
    setup.learner.to(accelerator.device)
    evaluator = Evaluator(accelerator, setup.benchmark, config.data.for_device(accelerator.device.type))
    tasks = setup.benchmark.scenario.seen_after(checkpoint.task_index)
    return AccuracyMatrix([evaluator.evaluate(setup.learner, tasks)])


@dataclass(frozen=True)
class Prediction:
    """The best classes of one image, best first."""

    path: Path
    class_names: tuple[str, ...]
    scores: tuple[float, ...]


def predict(
    run_directory: Path | str,
    images: Iterable[Path | str],
    *,
    top_k: int = 5,
    task: int | None = None,
    device: Device | None = None,
) -> Iterator[Prediction]:
    """Classify image files with a stored learner; needs neither the training nor the test data.

    Args:
        run_directory: What ``run`` wrote.
        images: Image files.
        top_k: Classes to name for each image; classes that the learner rules out are never named.
        task: Index of the task after which the learner is taken; None for the last finished one.
        device: Where to compute; None for the device of the run.

    Raises:
        UsageError: No learner is stored there; or, after all other images, some cannot be read.
    """
    directory = RunDirectory(Path(run_directory))
    config = directory.config()
    checkpoint = directory.checkpoint(task)
    accelerator = build_accelerator(
        device=device or config.device, mixed_precision=config.trainer.mixed_precision
    )
    learner = build_learner(config, num_tasks=len(checkpoint.state["tasks"]))
    restore(learner, checkpoint)
    learner.to(accelerator.device).eval()
    transforms = build_transforms(config.dataset.transforms, **asdict(learner.backbone.preprocessing))
    names = checkpoint.state["class_names"]
    problems: list[str] = []
    readable = _decoded(map(Path, images), problems)
    while batch := list(islice(readable, config.data.evaluation_batch_size)):
        pixels = torch.stack([transforms.evaluate(image) for _, image in batch])
        with torch.no_grad(), accelerator.autocast():
            scores = learner.predict(pixels.to(accelerator.device)).float().cpu()
        best = scores.topk(min(top_k, scores.shape[1]), dim=1)
        for (path, _), values, indices in zip(batch, best.values, best.indices, strict=True):
            finite = values.isfinite()
            chosen = tuple(names[index] for index in indices[finite].tolist())
            yield Prediction(path, chosen, tuple(values[finite].tolist()))
    if problems:
        raise UsageError(*problems)


def _decoded(paths: Iterable[Path], problems: list[str]) -> Iterator[tuple[Path, Image]]:
    """Yield the images that can be read; say of the others why not."""
    for path in paths:
        try:
            yield path, decode_image(path)
        except UsageError as error:
            problems += error.problems
