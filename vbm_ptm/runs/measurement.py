"""What a stored learner predicts for every test image, for your own analyses: by image, by class, as a file."""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.evaluator import Evaluation
from vbm_ptm.errors import UsageError
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.storage.durable_files import check_writable, write_file

ENDINGS = (".csv", ".jsonl")


@dataclass(frozen=True)
class ImagePrediction:
    """The prediction for one test image.

    Attributes:
        image: Its name in the source: its path below the data set's folder, or the row of a table.
        row: Row number in the test split.
        task: Number of its task, from 1 as on the command line; None for images of a data set other than the run's.
        label: Name of its class.
        prediction: Name of the seen class with the best score.
        is_correct: Whether the two are the same.
        score: That score; None if the learner rules out all classes, so that no prediction is right.
        probability: Softmax of the scores of all seen classes, for the predicted class.
    """

    image: str
    row: int
    task: int | None
    label: str
    prediction: str
    is_correct: bool
    score: float | None
    probability: float


@dataclass(frozen=True)
class ClassCount:
    """How well one class is recognised among all seen classes.

    Attributes:
        name: Name of the class.
        tasks: Numbers of the tasks that its test images belong to; empty for a data set other than the run's.
        num_images: Number of its test images.
        num_correct: Number of those that were classified correctly.
        taken_for: The wrong class that they were most often assigned, and how often; None without a mistake.
    """

    name: str
    tasks: tuple[int, ...]
    num_images: int
    num_correct: int
    taken_for: tuple[str, int] | None

    @property
    def accuracy(self) -> float:
        """In percent."""
        return 100 * self.num_correct / self.num_images


@dataclass(frozen=True)
class Measurement:
    """A stored learner, measured once.

    Attributes:
        matrix: Its last row is the measurement.
        images: Every test image once, task by task.
    """

    matrix: AccuracyMatrix
    images: tuple[ImagePrediction, ...]

    @classmethod
    def of(
        cls,
        measured: Evaluation,
        matrix: AccuracyMatrix,
        *,
        benchmark: Benchmark,
        tasks: Sequence[Task],
        has_tasks: bool = True,
    ) -> Measurement:
        """Name the images and classes of an evaluation.

        Args:
            measured: What ``Evaluator.judge`` returned.
            matrix: The matrix made from its cells.
            benchmark: The source of the test images.
            tasks: The tasks that were evaluated.
            has_tasks: Whether these are tasks of the run, rather than one that stands for another data set.
        """
        test, names = benchmark.datasets.test, benchmark.scenario.class_names
        rows = [benchmark.test_rows(task) for task in tasks]
        numbers = [task.index + 1 for task, own in zip(tasks, rows, strict=True) for _ in own]
        columns = zip(
            np.concatenate(rows).tolist(),
            numbers,
            *(
                column.tolist()
                for column in (measured.labels, measured.predictions, measured.scores, measured.probabilities)
            ),
            strict=True,
        )
        images = (
            ImagePrediction(
                image=test.source_name(row),
                row=row,
                task=number if has_tasks else None,
                label=names[label],
                prediction=names[best],
                is_correct=label == best and math.isfinite(score),
                score=score if math.isfinite(score) else None,
                probability=probability,
            )
            for row, number, label, best, score, probability in columns
        )
        return cls(matrix, tuple(images))

    def per_class(self) -> list[ClassCount]:
        """Return the counts of each class with test images, in order of appearance."""
        by_class: dict[str, list[ImagePrediction]] = {}
        for image in self.images:
            by_class.setdefault(image.label, []).append(image)
        counts = []
        for name, own in by_class.items():
            wrong = Counter(image.prediction for image in own if not image.is_correct)
            counts.append(
                ClassCount(
                    name,
                    tuple(sorted({image.task for image in own if image.task is not None})),
                    num_images=len(own),
                    num_correct=sum(image.is_correct for image in own),
                    taken_for=wrong.most_common(1)[0] if wrong else None,
                )
            )
        return counts


def check_prediction_file(path: Path) -> None:
    """Make sure, before anything is measured, that predictions can be written to a file.

    Raises:
        UsageError: Its ending stands for no known format, or it cannot be written.
    """
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"predictions are written as {' or '.join(ENDINGS)}, not to '{path.name}'.")
    check_writable(path)


def write_predictions(path: Path, images: Iterable[ImagePrediction]) -> None:
    """Write a line for every image, as CSV with a heading or as JSON lines, depending on the file's ending."""
    lines = [asdict(image) for image in images]
    if path.suffix.lower() == ".jsonl":
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    else:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(ImagePrediction.__dataclass_fields__), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        content = text.getvalue()
    write_file(path, content.encode(errors="surrogateescape"))
