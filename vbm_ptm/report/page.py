"""One self-contained HTML page of tables and figures: no network, no script, light and dark, also for paper and phones.

The content of the page is assembled in ``vbm_ptm.report.whole_page``; this module turns tables and figures into text.
The template is ``page.html.jinja`` beside it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vbm_ptm.analysis.drawing import ACCENT, GRID, INK, PAPER, SERIES, SOFT, styled
from vbm_ptm.report.tables import NOT_AVAILABLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What the page puts in place of each colour, so that figures follow its theme.
_VARIABLES = {
    INK: "--ink",
    SOFT: "--soft",
    GRID: "--grid",
    PAPER: "--paper",
    ACCENT: "--accent",
    **{color: f"--line-{number}" for number, color in enumerate(SERIES)},
}


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: What is shown.
        source: Where the number is from: number of the run on the page and path in its ``result.json``, as in
            "0/metrics/class_incremental/top1/last_accuracy"; None for words and for numbers made from several.
    """

    text: str
    source: str | None = None

    @property
    def is_number(self) -> bool:
        """Whether it is a number, or stands in for one."""
        return bool(re.match(r"^[+-]?\d[\d,.]*( ±|%|$| \()", self.text)) or self.text == NOT_AVAILABLE


@dataclass(frozen=True)
class PageTable:
    """A table.

    Attributes:
        headings: Headings of the columns.
        rows: Cells; the first one names the row.
        caption: What it shows.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""

    @classmethod
    def of(
        cls, headings: Sequence[str], rows: Iterable[Sequence[Cell | str]], caption: str = ""
    ) -> PageTable:
        """Return a table with texts as cells."""
        return cls(
            tuple(headings),
            tuple(tuple(each if isinstance(each, Cell) else Cell(each) for each in row) for row in rows),
            caption,
        )

    @property
    def alignments(self) -> tuple[str, ...]:
        """The class of each column: "n" for numbers, which are right-aligned."""
        columns = zip(*self.rows, strict=True)
        aligned = tuple("n" if all(cell.is_number for cell in column) else "" for column in columns)
        return ("", *aligned[1:]) if aligned else ("",) * len(self.headings)

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [
            self.headings,
            ["---"] * len(self.headings),
            *([each.text for each in row] for row in self.rows),
        ]
        return "\n".join(
            f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in lines
        )

    def csv(self) -> str:
        """Return the table as CSV."""
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows(
            [self.headings, *([each.text for each in row] for row in self.rows)]
        )
        return file.getvalue().strip()

    def latex(self) -> str:
        """Return the table as LaTeX, with booktabs."""
        lines = [f"{' & '.join(map(_latex, self.headings))} \\\\", "\\midrule"]
        lines += [f"{' & '.join(_latex(each.text) for each in row)} \\\\" for row in self.rows]
        columns = "l" + "r" * (len(self.headings) - 1)
        return "\n".join(
            [f"\\begin{{tabular}}{{{columns}}}", "\\toprule", *lines, "\\bottomrule", "\\end{tabular}"]
        )


_LATEX = {
    **{sign: f"\\{sign}" for sign in "_%&#${}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "±": "$\\pm$",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)


@dataclass(frozen=True)
class PageFigure:
    """A figure with the tables behind it.

    Attributes:
        name: Name of its files.
        title: Title above it.
        alt: What it shows, for those who cannot see it.
        figure: The matplotlib figure.
        tables: Its numbers.
    """

    name: str
    title: str
    alt: str
    figure: Figure
    tables: tuple[PageTable, ...]

    @cached_property
    def file(self) -> str:
        """The figure as an SVG file, in its own colours."""
        file = io.StringIO()
        with styled():
            self.figure.savefig(file, format="svg", metadata={"Date": None})
        self.figure.set_layout_engine("none")  # its parts have found their places, for other formats too
        return file.getvalue()

    @property
    def svg(self) -> str:
        """The figure as an element of the page, in the page's colours."""
        return inline_svg(self.file, name=self.name, alt=self.alt)


@dataclass(frozen=True)
class Picture:
    """A test image.

    Attributes:
        source: A data: URL.
        caption: What it shows.
    """

    source: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A part of the page.

    Attributes:
        name: Anchor.
        title: Heading.
        text: What the reader should know first.
        tables: Shown as they are.
        figures: Below them.
        pictures: Below the figures.
        copies: A table to copy as LaTeX, Markdown and CSV.
    """

    name: str
    title: str
    text: str = ""
    tables: tuple[PageTable, ...] = ()
    figures: tuple[PageFigure, ...] = ()
    pictures: tuple[Picture, ...] = ()
    copies: PageTable | None = None


@dataclass(frozen=True)
class Page:
    """The page.

    Attributes:
        title: Title of the page.
        finding: The first sentence.
        facts: Beside it, names and values.
        notes: What is missing.
        sections: Sections, in order.
    """

    title: str
    finding: str
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    sections: tuple[Section, ...] = field(default_factory=tuple)

    def html(self) -> str:
        """Return the page."""
        import jinja2

        environment = jinja2.Environment(
            autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
        )
        template = environment.from_string(
            Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
        )
        return template.render(page=self, line_styles=list(enumerate(SERIES)))

    def write_figures(self, folder: Path, *, pdf: bool) -> list[Path]:
        """Write every figure as SVG, and as PDF with its fonts if wanted; return the files.

        PDFs of an earlier page go, as they would show other numbers.
        """
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for section in self.sections:
            for each in section.figures:
                written.append(folder / f"{each.name}.svg")
                written[-1].write_text(each.file, encoding="utf-8")
                document = folder / f"{each.name}.pdf"
                document.unlink(missing_ok=True)
                if pdf:
                    written.append(document)
                    with styled():
                        each.figure.savefig(written[-1], metadata={"CreationDate": None})
        return written


def inline_svg(text: str, *, name: str, alt: str) -> str:
    """Return a drawing as an SVG element whose colours are variables of the page.

    Args:
        text: The file that matplotlib has written.
        name: Distinguishes it from the other figures of the page.
        alt: What it shows, in words.
    """
    body = text[text.index("<svg") :]
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", body)
    for color, variable in _VARIABLES.items():
        body = re.sub(re.escape(color), f"var({variable})", body, flags=re.IGNORECASE)
    (view,) = re.findall(r'viewBox="[^"]*"', body)[:1]
    from markupsafe import escape

    opening = f'<svg role="img" aria-label="{escape(alt)}" {view} preserveAspectRatio="xMinYMin meet">'
    return opening + body[body.index(">") + 1 :].strip()
