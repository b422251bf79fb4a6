"""The learner of a finished task, used again: measured on the test images, or classifying other images.

It is in a run directory, or in a folder that ``vbm_ptm.runs.export`` made from one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL.Image import Image

from vbm_ptm.building import build, build_learner, transforms_for
from vbm_ptm.config.run_config import dataset_spec
from vbm_ptm.config.tree import is_within
from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.images import decode_image
from vbm_ptm.data.loader_config import LoaderConfig
from vbm_ptm.data.names import form
from vbm_ptm.data.reading.datasets import load_image_dataset
from vbm_ptm.data.scenario import Scenario, Task
from vbm_ptm.data.view_transforms import ViewTransforms
from vbm_ptm.engine.acceleration import Accelerator, Device, build_accelerator, loaders_for
from vbm_ptm.engine.contract import broken_scores
from vbm_ptm.engine.counting import probabilities
from vbm_ptm.engine.evaluator import Evaluator
from vbm_ptm.errors import UsageError, some_names
from vbm_ptm.learners.base import Learner
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.runs.measurement import Measurement
from vbm_ptm.runs.resuming import restore_checked
from vbm_ptm.storage.checkpoint import Checkpoint, restore
from vbm_ptm.storage.portable import is_portable, read_portable


def evaluate(
    run_directory: Path | str,
    *,
    task: int | None = None,
    device: Device | None = None,
    overrides: Sequence[str] = (),
) -> AccuracyMatrix:
    """Return only the accuracies that ``measure`` returns; the arguments are the same."""
    return measure(run_directory, task=task, device=device, overrides=overrides).matrix


def measure(
    run_directory: Path | str,
    *,
    task: int | None = None,
    device: Device | None = None,
    overrides: Sequence[str] = (),
) -> Measurement:
    """Measure a stored learner again on the test images of all tasks that it had seen.

    Args:
        run_directory: What ``run`` wrote.
        task: Index of the task after which the learner is taken; None for the last finished one.
        device: Where to compute; None for the device of the run.
        overrides: Items ``path.to.setting=value`` for what has moved since, such as ``dataset.path``.

    Returns:
        The prediction for every image, and a matrix whose last row is the new measurement; earlier rows are gaps, since
        those learners were not measured.
    """
    directory = RunDirectory(Path(run_directory))
    config = directory.config(overrides)
    checkpoint = directory.checkpoint(task)
    accelerator = build_accelerator(
        device=device or config.device, mixed_precision=config.trainer.mixed_precision
    )
    setup = build(config, earlier=checkpoint.state)
    num_gaps = setup.benchmark.first_task
    if checkpoint.task_index < num_gaps:
        raise UsageError(
            f"task {checkpoint.task_index + 1} is one of {config.scenario.extends}, and its images are not part of "
            f"{directory.path}: evaluate that run, or measure on a given data set."
        )
    restore_checked(setup, checkpoint)
    setup.learner.to(accelerator.device)
    evaluator = Evaluator(accelerator, loaders_for(accelerator, setup.benchmark, config.data))
    tasks = setup.benchmark.scenario.seen_after(checkpoint.task_index)[num_gaps:]
    judged = evaluator.judge(setup.learner, tasks)
    matrix = AccuracyMatrix(
        [None] * (after + 1) for after in range(checkpoint.task_index)
    )  # not measured now
    matrix.add_row(judged.cells, first_task=num_gaps)
    return Measurement.of(judged, matrix, benchmark=setup.benchmark, tasks=tasks)


def evaluate_on(
    path: Path | str,
    dataset: str,
    *,
    task: int | None = None,
    device: Device | None = None,
    overrides: Sequence[str] = (),
) -> AccuracyMatrix:
    """Return only the accuracies that ``measure_on`` returns; the arguments are the same."""
    return measure_on(path, dataset, task=task, device=device, overrides=overrides).matrix


def measure_on(
    path: Path | str,
    dataset: str,
    *,
    task: int | None = None,
    device: Device | None = None,
    overrides: Sequence[str] = (),
) -> Measurement:
    """Measure a stored learner on the test images of any data set whose classes it knows by name.

    Args:
        path: As for ``load``.
        dataset: As for ``compose``: a folder, a parquet file, a YAML file or a name.
        task: As for ``load``.
        device: As for ``load``.
        overrides: As for ``load``; items that begin with ``dataset.`` apply to this data set.

    Returns:
        The prediction for every image, and a matrix with a single cell: among all classes that the learner has seen,
        and among those of the data set.

    Raises:
        UsageError: The learner has not learned a class of that name.
    """
    of_dataset = [item for item in overrides if is_within(item.partition("=")[0].strip(), ["dataset"])]
    for item in of_dataset:
        if is_within(item.partition("=")[0].strip(), ["dataset.transforms"]):
            raise UsageError(f"{item}: images are prepared as they were for training the learner.")
    stored = load(
        path, task=task, device=device, overrides=[item for item in overrides if item not in of_dataset]
    )
    datasets = load_image_dataset(dataset_spec(dataset, overrides=of_dataset))
    known = {form(name): index for index, name in enumerate(stored.class_names)}
    unknown = [name for name in datasets.class_names if form(name) not in known]
    if unknown:
        raise UsageError(
            f"data set {dataset}: {len(unknown)} of {len(datasets.class_names)} classes are not among those that the "
            f"learner knows: {some_names(unknown)}. It knows {some_names(stored.class_names)}."
        )
    indices = np.array([known[form(name)] for name in datasets.class_names], dtype=np.int64)
    everything = Task(0, tuple(sorted(indices.tolist())), (), len(known))
    scenario = Scenario("class_incremental", stored.class_names, (), (everything,), indices)
    benchmark = Benchmark(datasets, scenario, stored.transforms)
    evaluator = Evaluator(stored.accelerator, loaders_for(stored.accelerator, benchmark, stored.loading))
    judged = evaluator.judge(stored.learner, [everything])
    matrix = AccuracyMatrix([judged.cells])
    return Measurement.of(judged, matrix, benchmark=benchmark, tasks=[everything], has_tasks=False)


@dataclass(frozen=True)
class Prediction:
    """The best classes of one image, best first.

    Attributes:
        path: The image.
        class_names: Names of the classes.
        scores: Their scores by the learner.
        probabilities: Softmax of the scores of all seen classes, for these classes; see
            ``vbm_ptm.engine.evaluator.probabilities``.
    """

    path: Path
    class_names: tuple[str, ...]
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class StoredLearner:
    """A learner ready for use.

    Attributes:
        learner: The learner, on the accelerator's device.
        class_names: Names by class index.
        transforms: What images go through.
        accelerator: Device and precision.
        loading: How many images are classified at once, and which processes read them.
    """

    learner: Learner
    class_names: tuple[str, ...]
    transforms: ViewTransforms
    accelerator: Accelerator
    loading: LoaderConfig


def restore_run(
    directory: RunDirectory, *, task: int | None = None, overrides: Sequence[str] = ()
) -> tuple[Learner, Checkpoint]:
    """Rebuild the learner of a run as it was after a task (None: the last finished one), on the CPU, without data."""
    checkpoint = directory.checkpoint(task)
    learner = build_learner(directory.config(overrides), num_tasks=checkpoint.state.num_planned_tasks)
    restore(learner, checkpoint)
    return learner.eval(), checkpoint


def load(
    path: Path | str,
    *,
    task: int | None = None,
    device: Device | None = None,
    overrides: Sequence[str] = (),
) -> StoredLearner:
    """Load a learner from a run directory, or from an exported folder; needs neither training nor test data.

    Args:
        path: What ``run`` or ``export`` wrote.
        task: Index of the task after which the learner is taken; None for the last finished one.
        device: Where to compute; None for the device of the run, and the best one for an exported learner.
        overrides: Items ``path.to.setting=value`` for what has moved since, such as ``backbone.checkpoint``.

    Raises:
        UsageError: No learner is stored there, it is damaged, or an exported one is asked for another task.
    """
    path = Path(path)
    if is_portable(path):
        if task is not None or overrides:
            raise UsageError(
                f"{path} is an exported learner: only a run directory has other tasks, and settings."
            )
        learner, portable = read_portable(path)
        transforms, preprocessing = portable.transforms, portable.preprocessing
        names = portable.class_names
        loading = LoaderConfig(evaluation_batch_size=portable.evaluation_batch_size)
        accelerator = build_accelerator(device=device or "auto", mixed_precision=portable.mixed_precision)
    elif not (path / "config.yaml").is_file():
        raise UsageError(
            f"{path} is neither a run directory (config.yaml) nor an exported learner (config.json)."
        )
    else:
        directory = RunDirectory(path)
        config = directory.config(overrides)
        learner, checkpoint = restore_run(directory, task=task, overrides=overrides)
        transforms, preprocessing = config.dataset.transforms, learner.backbone.preprocessing
        names, loading = checkpoint.state.class_names, config.data
        accelerator = build_accelerator(
            device=device or config.device, mixed_precision=config.trainer.mixed_precision
        )
    learner.to(accelerator.device).eval()
    return StoredLearner(
        learner,
        names[: learner.num_seen_classes],
        transforms_for(transforms, preprocessing),
        accelerator,
        loading.for_device(accelerator.device.type),
    )


def predict(
    path: Path | str,
    images: Iterable[Path | str],
    *,
    top_k: int = 5,
    task: int | None = None,
    device: Device | None = None,
    overrides: Sequence[str] = (),
) -> Iterator[Prediction]:
    """Classify image files with a stored learner; needs neither the training nor the test data.

    Args:
        path: What ``run`` or ``export`` wrote.
        images: Image files.
        top_k: Number of classes to name for each image; classes that the learner rules out are never named.
        task: As for ``load``.
        device: As for ``load``.
        overrides: As for ``load``.

    Raises:
        UsageError: No learner is stored there; or, after all other images, some cannot be read.
        FloatingPointError: A score is not finite, except -inf for a class that is ruled out.
    """
    stored = load(path, task=task, device=device, overrides=overrides)
    accelerator = stored.accelerator
    problems: list[str] = []
    readable = _decoded(map(Path, images), problems, draft_size=stored.transforms.draft_size)
    while batch := list(islice(readable, stored.loading.evaluation_batch_size)):
        pixels = torch.stack([stored.transforms.evaluate(image) for _, image in batch])
        with torch.no_grad(), accelerator.autocast():
            here = stored.transforms.to_input(pixels, accelerator.device)
            scores = stored.learner.predict(here).float().cpu()
        broken = broken_scores(scores)
        if bool(broken.any()):
            names = [
                str(file) for (file, _), is_broken in zip(batch, broken.tolist(), strict=True) if is_broken
            ]
            raise FloatingPointError(
                f"the scores of {some_names(names)} are NaN or infinite: {path} cannot be used."
            )
        best = scores.topk(min(top_k, scores.shape[1]), dim=1)
        shares = probabilities(scores).gather(1, best.indices)
        for (file, _), values, indices, own in zip(batch, best.values, best.indices, shares, strict=True):
            finite = values.isfinite()
            chosen = tuple(stored.class_names[index] for index in indices[finite].tolist())
            yield Prediction(file, chosen, tuple(values[finite].tolist()), tuple(own[finite].tolist()))
    if problems:
        raise UsageError(*problems)


def _decoded(
    paths: Iterable[Path], problems: list[str], *, draft_size: int | None
) -> Iterator[tuple[Path, Image]]:
    """Yield the images that can be read; record why the others cannot."""
    for path in paths:
        try:
            yield path, decode_image(path, draft_size=draft_size)
        except UsageError as error:
            problems += error.problems
