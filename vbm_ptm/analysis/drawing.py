"""One look for all figures: colours that colour-blind readers can distinguish, thin lines, no frame.

matplotlib is loaded when something is drawn. The colours are those of Okabe and Ito (Color Universal Design, 2008),
ordered by contrast; lines also differ in dashes and markers. A page may replace them, and the colours of ink, grid and
paper, to follow its theme: no other colour occurs in a figure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from vbm_ptm.analysis.spread import Floats, Spread, mean_and_std

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")

# What the lines of a figure are drawn from: one item per run, by the line's label.
Lines = Mapping[str, Sequence[T]]

INK, SOFT, GRID, PAPER, ACCENT = "#1b1f24", "#5c6570", "#d9dde2", "#ffffff", "#0b62a8"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#6a51a3", "#7f7f7f")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica Neue", "Arial", "Liberation Sans", "DejaVu Sans"],
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "vbm_ptm",
    "pdf.fonttype": 42,
    "text.color": INK,
    "text.parse_math": False,  # a dollar sign in the name of a class or run is a dollar sign
    "axes.edgecolor": GRID,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.bottom": False,
    "ytick.left": False,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "path.simplify": True,
}


class LineStyle(NamedTuple):
    """How a line is distinguished from the others."""

    color: str
    linestyle: Any
    marker: str


def line_styles(labels: Sequence[str]) -> dict[str, LineStyle]:
    """Return a style for each label; beyond eight, the colours repeat with other dashes."""
    numbered = enumerate(labels)
    return {
        label: LineStyle(
            SERIES[number % len(SERIES)],
            _DASHES[number // len(SERIES) % len(_DASHES)],
            _MARKERS[number % len(_MARKERS)],
        )
        for number, label in numbered
    }


@contextmanager
def styled() -> Iterator[None]:
    """Give everything drawn and saved inside the block the look of this package."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        yield


def new_figure(
    num_panels: int = 1, *, width: float = 7.2, height: float = 3.4, columns: int = 1, share_y: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure, unknown to pyplot, and its panels; to be called inside ``styled``.

    Args:
        num_panels: Number of panels.
        width: Width in inches.
        height: Height of a row of panels, in inches.
        columns: Number of panels side by side.
        share_y: Whether all panels share one vertical scale.
    """
    from matplotlib.figure import Figure

    columns = max(1, min(columns, num_panels))
    rows = max(1, math.ceil(num_panels / columns))
    figure = Figure(figsize=(width, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    panels = list(itertools.chain.from_iterable(grid))
    for empty in panels[num_panels:]:
        empty.set_axis_off()
    return figure, panels[:num_panels]


def draw_line(axes: Axes, places: Floats, columns: Sequence[Spread], *, label: str, style: LineStyle) -> None:
    """Draw means over runs, with a band of one standard deviation if there are several.

    Args:
        axes: The panel.
        places: (n,) positions on the horizontal axis.
        columns: (n,) means and deviations.
        label: Label in the legend.
        style: Style of the line.
    """
    means, deviations = mean_and_std(columns)
    axes.plot(places, means, label=label, **style._asdict())
    if deviations.any():
        axes.fill_between(
            places, means - deviations, means + deviations, color=style.color, alpha=0.16, linewidth=0
        )


def whole_ticks(axes: Axes, count: int) -> None:
    """Put ticks at whole numbers from 1 on, with some room beside the first and last."""
    step = max(1, math.ceil(count / 10))
    axes.set_xticks(np.arange(1, count + 1, step))
    axes.set_xlim(0.7, count + 0.3)


def add_legend(figure: Figure, axes: Axes, labels: Iterable[str]) -> None:
    """Put a legend below the panels, unless a single line needs none.

    Args:
        figure: The figure.
        axes: The panel whose artists stand for the lines.
        labels: Labels to show, in order, as far as they are drawn.
    """
    artists: list[Any] = [*axes.lines, *axes.containers]
    drawn = {each.get_label(): each for each in reversed(artists)}
    shown = [label for label in labels if label in drawn]
    if len(shown) > 1:
        longest = max(map(len, shown))
        columns = max(1, min(len(shown), int(90 / (longest + 8))))
        handles, blank = [drawn[label] for label in shown], [" "] * len(shown)
        legend = figure.legend(handles, blank, loc="outside lower left", ncols=columns, fontsize=9)
        # Given at once, labels that begin with "_" would be left out.
        for text, label in zip(legend.get_texts(), shown, strict=True):
            text.set_text(label)
