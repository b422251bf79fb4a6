"""Figures for experiment trackers at the end of a task, in addition to the numbers; none without a tracker."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from accelerate import Accelerator
from numpy.typing import NDArray
from PIL import Image

from vbm_ptm.analysis.retention import evolution_figure, matrix_figure
from vbm_ptm.metrics import AccuracyMatrix

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By the name that trackers show.
_FIGURES = {"accuracy matrix": matrix_figure, "task evolution": evolution_figure}


def log_figures(accelerator: Accelerator, matrix: AccuracyMatrix, *, step: int) -> None:
    """Log the accuracies so far to the trackers as pictures.

    Args:
        accelerator: Knows the trackers.
        matrix: All accuracies so far.
        step: As for ``Accelerator.log``.
    """
    if not (accelerator.trackers and accelerator.is_main_process):
        return
    for name, draw in _FIGURES.items():
        picture = pixels(draw({"accuracy": [matrix]}))
        for tracker in accelerator.trackers:
            # TensorBoard takes (N,C,H,W), W&B a list of (H,W,C).
            pictures = (picture.transpose(2, 0, 1) if tracker.name == "tensorboard" else picture)[None]
            tracker.log_images({name: pictures}, step=step)


def pixels(figure: Figure) -> NDArray[np.uint8]:
    """Return a figure (H,W,3) on white, whatever the page of a tracker looks like."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi="figure", facecolor="white")
    return np.asarray(Image.open(file).convert("RGB"))
