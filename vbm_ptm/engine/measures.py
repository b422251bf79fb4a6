"""What the paper explains its gain with, measured while a task is trained: retention by epoch, and how features move.

View-Batch Model (CVPR 2025), section "Empirical Evidence" and the appendix on the degree of forgetting. Nothing here
touches generators, buffers or batch statistics: a run that is measured ends with the same weights as one that is not.
Shapes: n samples of the task, N test images, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch import Tensor

from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.data.view_batch import chunk
from vbm_ptm.engine.features import TaskFeatures
from vbm_ptm.engine.query_cache import QueriedImages
from vbm_ptm.engine.task_training import TaskTraining
from vbm_ptm.engine.tracking import RunLog
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded
from vbm_ptm.storage.task_position import RetentionPosition

logger = logging.getLogger(__name__)

Flags = npt.NDArray[np.bool_]

_PREFIX = "measures/"


def degree_of_forgetting(retention: Sequence[float], *, first: int) -> float | None:
    """Return the population variance of the retention over the epochs from ``first`` on; None without any.

    The appendix sums to E with the divisor E - first; r_E does not exist, so that the sum ends at E - 1.

    Args:
        retention: Accuracy on the current task after each epoch, in percent.
        first: The saturated epoch, counted from 0.
    """
    saturated = retention[first:]
    return float(np.var(saturated)) if len(saturated) else None


class Retention:
    """Accuracy on the current task after every epoch, and what its samples lose before they come back.

    The class with the best score of all seen classes is compared with the label, under the evaluation transform. A
    learner that rules classes out is asked for the task's own expert, as it cannot choose the session it is in.

    Args:
        learner: In training on the task.
        task: The task.
        accelerator: Devices, ranks and precision.
        loaders: Bring the images.
        images: The images with what is known of them.
        measures_test: Measure the test images, too.
    """

    def __init__(
        self,
        learner: Learner,
        task: Task,
        *,
        accelerator: Accelerator,
        loaders: Loaders,
        images: QueriedImages,
        measures_test: bool = True,
    ) -> None:
        self._learner, self._task, self._accelerator, self._loaders = learner, task, accelerator, loaders
        self._images = images
        self._test_rows = loaders.benchmark.test_rows(task)[: None if measures_test else 0]
        self.train: list[float] = []
        self.test: list[float] = []
        num_samples = len(loaders.benchmark.training_rows(task))
        self._now = np.zeros(num_samples, dtype=bool)
        self._after_visit = np.zeros(num_samples, dtype=bool)
        self._is_visited = np.zeros(num_samples, dtype=bool)
        self._num_lost = self._num_rests = 0

    def measure(self, visited: npt.NDArray[np.int64]) -> dict[str, float]:
        """Measure after an epoch; return the accuracies in percent.

        Args:
            visited: (m,) rows of the training split that the epoch has visited; those that are not the task's, as
                exemplars, are left out.
        """
        benchmark = self._loaders.benchmark
        before, rows = self._now, benchmark.training_rows(self._task)
        self._now = self._correct(benchmark.datasets.train, rows)
        chosen = np.isin(rows, visited).nonzero()[0]
        rested = chosen[self._is_visited[chosen]]
        self._num_rests += len(rested)
        self._num_lost += int(self._after_visit[rested].sum()) - int(before[rested].sum())
        self._after_visit[chosen] = self._now[chosen]
        self._is_visited[chosen] = True
        found = {"train_accuracy": 100 * float(self._now.mean())}
        self.train.append(found["train_accuracy"])
        if len(self._test_rows):
            test = self._correct(benchmark.datasets.test, self._test_rows)
            found["test_accuracy"] = 100 * float(test.mean())
            self.test.append(found["test_accuracy"])
        return found

    def facts(self) -> dict[str, Any]:
        """Return what a task's record keeps.

        The second half of the epochs counts as saturated. ``sample_forgetting`` is the drop of accuracy on a sample
        from the end of the epoch that visits it to the end of the epoch before its next visit, in points: 0 by
        definition where every epoch visits it.
        """
        known = {"train": self.train, "test": self.test}
        degrees = {
            name: degree_of_forgetting(values, first=len(values) // 2) for name, values in known.items()
        }
        return {
            "epoch_accuracy": {name: [round(value, 4) for value in values] for name, values in known.items()},
            "degree_of_forgetting": {name: value for name, value in degrees.items() if value is not None},
            "sample_forgetting": 100 * self._num_lost / self._num_rests if self._num_rests else None,
        }

    def position(self) -> RetentionPosition:
        """Return what ``load_position`` needs."""
        return RetentionPosition(
            train=tuple(self.train),
            test=tuple(self.test),
            num_lost=self._num_lost,
            num_rests=self._num_rests,
            now=_packed(self._now),
            after_visit=_packed(self._after_visit),
            is_visited=_packed(self._is_visited),
        )

    def load_position(self, position: RetentionPosition) -> None:
        """Continue in the middle of a task."""
        size = len(self._now)
        self.train, self.test = list(position.train), list(position.test)
        self._num_lost, self._num_rests = position.num_lost, position.num_rests
        self._now = _unpacked(position.now, size)
        self._after_visit = _unpacked(position.after_visit, size)
        self._is_visited = _unpacked(position.is_visited, size)

    @torch.no_grad()
    def _correct(self, split: ImageSplit, rows: npt.NDArray[np.int64]) -> Flags:
        """Return for each row whether it is classified correctly; the same on every rank."""
        learner, accelerator = self._learner, self._accelerator
        labels = torch.from_numpy(self._loaders.benchmark.class_indices(split))
        found = torch.zeros(len(rows), dtype=torch.int64, device=accelerator.device)
        position, _ = chunk(len(rows), accelerator.process_index, accelerator.num_processes)
        classes = learner.columns(self._task.classes, accelerator.device)
        was_training = learner.training
        learner.eval()
        with seeded(0):
            parts = self._loaders.parts_of_rank(rows)
            needs_images = [learner.rules_out_classes] * len(parts)
            for part, images, query in self._images.batches(learner, split, parts, needs_images=needs_images):
                with accelerator.autocast():
                    if learner.rules_out_classes:
                        best = classes[learner.predict_task(images, self._task).argmax(1)]
                    else:
                        best = learner.predict(images, query).argmax(1)
                found[position : position + len(best)] = best == labels[part].to(accelerator.device)
                position += len(best)
        learner.train(was_training)
        if accelerator.num_processes > 1:
            found = accelerator.reduce(found, reduction="sum")
        flags: Flags = found.cpu().numpy().astype(bool)
        return flags


class FeatureDrift:
    """How far training on a task moves the query features of the test images seen so far.

    Args:
        features: Computes features, on all ranks.
        rows: (N,) rows of the test split.
    """

    def __init__(self, features: TaskFeatures, rows: npt.NDArray[np.int64]) -> None:
        self._features, self._rows = features, rows
        self.before: Tensor | None = None

    def begin(self) -> None:
        """Remember the current features."""
        self.before = self._look()

    def change(self) -> float | None:
        """Return |now - before| / |before| over all images (Frobenius norms); None without images."""
        if self.before is None or not len(self.before):
            return None
        return float((self._look() - self.before).norm() / self.before.norm())

    def _look(self) -> Tensor:
        was_training = self._features.learner.training
        self._features.learner.eval()
        with seeded(0):
            table = self._features.of_test(self._rows)
        self._features.learner.train(was_training)
        return table.double()


class TaskMeasures:
    """What is measured during one task, as requested.

    Args:
        learner: Has begun the task, and is on its device.
        task: The task.
        accelerator: Devices, ranks and precision.
        images: The images with what is known of them.
        every_epoch: Measure retention; "train": on training images alone.
        feature_drift: Measure how features move.

    Attributes:
        is_up_to_date: Whether every epoch that is over has been measured; not while one is.
    """

    def __init__(
        self,
        learner: Learner,
        task: Task,
        *,
        accelerator: Accelerator,
        images: QueriedImages,
        every_epoch: Literal[False, True, "train"],
        feature_drift: bool,
    ) -> None:
        self._task = task
        self._retention: Retention | None = None
        self._drift: FeatureDrift | None = None
        self._change: float | None = None
        self.is_up_to_date = True
        if every_epoch and not learner.predicts_while_training:
            if task.index == images.loaders.benchmark.first_task:
                logger.warning(
                    "trainer.evaluate_every_epoch measures nothing here: learner '%s' has no scores for a task's "
                    "classes before its end",
                    learner.config.name,
                )
        elif every_epoch:
            self._retention = Retention(
                learner,
                task,
                accelerator=accelerator,
                loaders=images.loaders,
                images=images,
                measures_test=every_epoch is True,
            )
        if feature_drift:
            benchmark = images.loaders.benchmark
            seen = benchmark.scenario.seen_after(task.index)[benchmark.first_task :]
            rows = np.concatenate([benchmark.test_rows(each) for each in seen])
            features = TaskFeatures(learner, task, accelerator=accelerator, loaders=images.loaders)
            self._drift = FeatureDrift(features, rows)

    def begin(self) -> None:
        """Measure what training will change."""
        if self._drift:
            self._drift.begin()

    def after_epoch(self, training: TaskTraining, epoch: int, log: RunLog) -> None:
        """Measure after an epoch."""
        if self._retention:
            training.sampler.set_epoch(epoch)
            visited = sorted(set().union(*training.sampler.steps()))
            self.is_up_to_date = False
            found = self._retention.measure(training.rows[visited])
            self.is_up_to_date = True
            log.write("epoch", task=self._task.index, epoch=epoch, **found)

    def end(self) -> None:
        """Measure what training has changed."""
        if self._drift:
            self._change = self._drift.change()

    def facts(self) -> dict[str, Any]:
        """Return what a task's record keeps."""
        return (self._retention.facts() if self._retention else {}) | {"feature_drift": self._change}

    def state(self) -> dict[str, RetentionPosition | None]:
        """Return what ``load_state`` needs, by kind."""
        return {"retention": self._retention.position() if self._retention else None}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that it needs, by name."""
        before = self._drift.before if self._drift else None
        return {} if before is None else {f"{_PREFIX}features": before}

    def load_state(
        self, state: Mapping[str, RetentionPosition | None], tensors: Mapping[str, Tensor]
    ) -> None:
        """Continue in the middle of a task.

        Args:
            state: What ``state`` returned.
            tensors: What ``tensors`` returned, among others.
        """
        if self._retention and (retention := state["retention"]):
            self._retention.load_position(retention)
        if self._drift:
            self._drift.before = tensors[f"{_PREFIX}features"]


def without_measures(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are not those of ``TaskMeasures``."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_PREFIX)}


def _packed(flags: Flags) -> str:
    return np.packbits(flags).tobytes().hex()


def _unpacked(text: str, size: int) -> Flags:
    return np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8), count=size).astype(bool)
