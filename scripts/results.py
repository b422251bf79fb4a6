"""Keep what studies have measured in the repository, and make the tables of docs/results.md of it.

python scripts/results.py keep RUNS/digits     keeps the finished runs of a study; what was kept of them is replaced
python scripts/results.py tables               writes the tables into docs/results.md and docs/results/few_visits.md,
                                               and the pictures that these pages show into docs/results

docs/results/runs.csv has a row per run, docs/results/accuracies.csv a row for each task that a run was measured on
after a task. All accuracies follow from these counts; those in runs.csv are there to be read. In the pages a study's
tables stand between ``<!-- study -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from vbm_ptm.analysis.drawing import ACCENT, GRID, INK, PAPER, SOFT, new_figure, styled
from vbm_ptm.analysis.spread import Spread
from vbm_ptm.errors import UsageError
from vbm_ptm.metrics import AccuracyCell, AccuracyMatrix, Scope
from vbm_ptm.report.collect import (
    Effect,
    EffectRow,
    MeasuredRun,
    Row,
    collect,
    effect_row,
    measures_of,
    view_batch_effects,
)
from vbm_ptm.report.page import inline_svg
from vbm_ptm.storage.run_result import RunResult, read_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("results.md", "results/few_visits.md")
# Studies whose differences are drawn, and what of them: headings of the tables.
PICTURES = ("recalls_digits", "factors_digits", "factors_cifar10", "samples_or_visits")
PICTURED = ("average", "last")
_LIGHT = {"ink": INK, "soft": SOFT, "grid": GRID, "paper": PAPER, "accent": ACCENT}
_DARK = {"ink": "#e8ebee", "soft": "#a3adb8", "grid": "#343b43", "paper": "#14171a"}

SCOPES: dict[str, Scope] = {"all_classes": "class_incremental", "own_classes": "task_incremental"}


@dataclass(frozen=True)
class KeptRun:
    """A row of runs.csv, and the matrix that accuracies.csv has of it.

    Attributes:
        study: Name of the study.
        run: Line of the study.
        seed: Training seed.
        class_order_seed: Seed of the class order.
        learner: Name of the learner.
        dataset: Name of the data set.
        num_views: V.
        images_per_step: Images of a full step.
        epochs: Epochs of each task.
        num_steps: Optimizer steps.
        num_images: Views in training.
        seconds: What the tasks took.
        split_sha256: Which image is in which split and class.
        weights_sha256: The pre-trained weights.
        versions: Of this package, Python and the libraries.
        matrix: All accuracies.
        measures: What ``measures_of`` its tasks returned; empty for runs from before it was recorded.
    """

    study: str
    run: str
    seed: int
    class_order_seed: int
    learner: str
    dataset: str
    num_views: int
    images_per_step: int
    epochs: int
    num_steps: int
    num_images: int
    seconds: float
    split_sha256: str
    weights_sha256: str
    versions: str
    matrix: AccuracyMatrix
    measures: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What is kept once, and the order of the rows."""
        return self.study, self.run, self.seed, self.class_order_seed

    @property
    def seed_pair(self) -> tuple[int, int]:
        """Training seed and class-order seed."""
        return self.seed, self.class_order_seed

    @classmethod
    def of(cls, study: str, run: str, result: RunResult) -> KeptRun:
        """Return what is kept of a result."""
        return cls(
            study=study,
            run=run,
            seed=result.seed,
            class_order_seed=result.class_order_seed,
            learner=result.learner,
            dataset=result.dataset,
            num_views=result.num_views,
            images_per_step=result.images_per_step,
            epochs=int(result.config["optimization"]["epochs"]),
            num_steps=result.num_steps,
            num_images=result.num_images,
            seconds=round(result.task_seconds, 1),
            split_sha256=result.split_sha256,
            weights_sha256=result.weights.sha256 if result.weights else "",
            versions=" ".join(f"{name}={version}" for name, version in result.versions.items()),
            matrix=result.matrix,
            measures=measures_of(result.task_records),
        )

    def row(self) -> dict[str, str]:
        """Return the cells of runs.csv: all but the matrix, and its numbers."""
        own = {name: str(getattr(self, name)) for name in COLUMNS}
        measures = {name: self.measures.get(name) for name in MEASURES}
        return own | _texts(measures) | numbers(self.matrix)

    def measured(self) -> MeasuredRun:
        """Return the run for its study's tables; a line is paired with the one of the same name but for the views."""
        return MeasuredRun(
            label=self.run,
            seeds=self.seed_pair,
            directory="",
            family=f"{VIEWS_IN_NAME.sub('', self.run)} {self.seed} {self.class_order_seed}",
            num_views=self.num_views,
            is_baseline=self.num_views == 1,
            matrix=self.matrix,
            num_steps=self.num_steps,
            num_images=self.num_images,
            seconds=self.seconds,
            measures=dict(self.measures),
        )


# Columns of runs.csv that are the run's own; what a study's grid or a line's name says of the views.
COLUMNS = tuple(each.name for each in fields(KeptRun) if each.name not in ("matrix", "measures"))
MEASURES = tuple(measures_of([]))
VIEWS_IN_NAME = re.compile(r"-(V|num_views=)\d+")
# What is compared in a study of factors: the arm with a change, and the one without it.
FACTORS = (
    *((arm, "baseline") for arm in ("strong-share", "replay", "replay-strong", "replay-kl", "view-batch")),
    *(("replay-strong", "replay"), ("replay-kl", "replay")),
    *(("view-batch", "replay-strong"), ("view-batch", "replay-kl"), ("replay-strong", "strong-share")),
)


def numbers(matrix: AccuracyMatrix) -> dict[str, str]:
    """Return the numbers of a run as text: over all seen classes, and within each task's own classes."""
    found: dict[str, float | None] = {}
    for name, scope in SCOPES.items():
        found[f"{name}_average"] = matrix.average_incremental(scope=scope)
        found[f"{name}_last"] = matrix.last(scope=scope)
        found[f"{name}_last_top5"] = matrix.last(scope=scope, top=5)
        found[f"{name}_forgetting"] = matrix.forgetting(scope=scope)
    return _texts(found)


def _texts(values: Mapping[str, float | None]) -> dict[str, str]:
    return {name: "" if value is None else f"{value:.4f}" for name, value in values.items()}


def read_kept(docs: Path = DOCS) -> list[KeptRun]:
    """Read all runs that are kept."""
    cells: dict[tuple[str, ...], list[list[AccuracyCell]]] = defaultdict(list)
    for row in _read(docs / "results" / "accuracies.csv"):
        key = (row.pop("study"), row.pop("run"), row.pop("seed"), row.pop("class_order_seed"))
        after, _ = int(row.pop("after_task")), row.pop("task")
        rows = cells[key]
        rows += [[] for _ in range(after - len(rows))]
        counts = {name: int(value) if value else None for name, value in row.items()}
        rows[after - 1].append(AccuracyCell(**counts))  # type: ignore[arg-type]
    kept = []
    for row in _read(docs / "results" / "runs.csv"):
        key = (row["study"], row["run"], row["seed"], row["class_order_seed"])
        types = {"int": int, "float": float, "str": str}
        values = {
            each.name: types[str(each.type)](row[each.name])
            for each in fields(KeptRun)
            if each.name in COLUMNS
        }
        measures = {name: float(row[name]) for name in MEASURES if row[name]}
        kept.append(KeptRun(**values, matrix=AccuracyMatrix(cells[key]), measures=measures))
    return kept


def write_kept(runs: Iterable[KeptRun], docs: Path = DOCS) -> None:
    """Write all runs that are kept, in order."""
    ordered = sorted(runs, key=lambda run: run.key)
    _write(docs / "results" / "runs.csv", [run.row() for run in ordered])
    counts = [
        {
            **dict(zip(("study", "run", "seed", "class_order_seed"), run.key, strict=True)),
            "after_task": after,
            "task": task,
            **{name: "" if count is None else count for name, count in asdict(cell).items()},
        }
        for run in ordered
        for after, row in enumerate(run.matrix.rows, start=1)
        for task, cell in enumerate(row, start=1)
        if cell
    ]
    _write(docs / "results" / "accuracies.csv", counts)


def keep(study: Path, docs: Path = DOCS) -> int:
    """Keep the finished runs below a study's folder beside those kept before; return how many there are.

    A run of the same study, line, seed and class order replaces the one that is there: a study may be kept in parts.
    Extensions, which lie beside the runs that they extend, are none of the study.

    Args:
        study: Output folder of ``vbm-ptm study``; its name becomes the name of the study.
        docs: Where they are kept.

    Raises:
        UsageError: Two runs have the same line, seed and class order, as a run and its copy.
    """
    found: dict[tuple[str, str, int, int], Path] = {}
    kept = []
    for file in sorted(study.rglob("result.json")):
        result = read_result(file)
        if not result.is_finished or result.config["scenario"].get("extends") is not None:
            continue
        run = KeptRun.of(study.name, file.relative_to(study).parts[0], result)
        first = found.setdefault(run.key, file)
        if first != file:
            raise UsageError(
                f"{first.parent} and {file.parent} are the same run; leave one of them in {study}."
            )
        kept.append(run)
    others = read_kept(docs) if (docs / "results" / "runs.csv").exists() else []
    write_kept([*(run for run in others if run.key not in found), *kept], docs)
    return len(kept)


# Columns of both tables: heading -> number of a row, of an effect.
NUMBERS = {
    "average": "average_incremental_accuracy",
    "last": "last_accuracy",
    "forgetting": "forgetting",
    "TIL last": "task_incremental_last_accuracy",
    "TIL forgetting": "task_incremental_forgetting",
    "Avg*": "last_accuracy_of_both",
}


def tables(runs: Sequence[KeptRun]) -> str:
    """Return a study's tables as Markdown: a row per line of the study, then the paired differences."""
    runs = in_order(runs)
    lines: dict[str, list[KeptRun]] = defaultdict(list)
    for run in runs:
        lines[run.run].append(run)
    collected = collect([run.measured() for run in runs])
    rows = _table(
        ("run", *NUMBERS, "visits", "seconds", "runs"),
        ((f"`{row.label}`", *_row_cells(row, lines[row.label])) for row in collected.rows),
    )
    effects = effects_of(runs)
    if not effects:
        return rows
    pairs = _table(
        ("line", *NUMBERS, "p: average, last", "pairs"),
        ((_code(effect.label), *_effect_cells(effect)) for effect in effects),
    )
    are_factors = any(" - " in effect.label for effect in effects)
    what = "with a factor minus without it" if are_factors else "views minus one view"
    return "\n".join((rows, "", f"Differences in pairs, {what}:", "", pairs))


def in_order(runs: Iterable[KeptRun]) -> list[KeptRun]:
    """Return runs by the names of their lines, 4 before 16."""
    return sorted(
        runs, key=lambda run: [(text, int(part or 0)) for text, part in re.findall(r"(\D*)(\d*)", run.run)]
    )


def effects_of(runs: Sequence[KeptRun]) -> list[EffectRow]:
    """Return the differences that a study is about, in pairs by seed: of factors, or views minus one view."""
    runs = in_order(runs)
    lines: dict[str, list[KeptRun]] = defaultdict(list)
    for run in runs:
        lines[run.run].append(run)
    return factor_effects(lines) or list(view_batch_effects([run.measured() for run in runs]))


def factor_effects(lines: Mapping[str, Sequence[KeptRun]]) -> list[EffectRow]:
    """Return the differences between the arms of a study of factors, for each learner that has them, in pairs by seed.

    An arm is known by the end of its line's name; what stands before it is that of the learner.
    """
    learners = dict.fromkeys(name.removesuffix("baseline") for name in lines if name.endswith("baseline"))
    found = []
    for learner in learners:
        arms = {
            arm: {run.seed_pair: run.measured() for run in lines.get(learner + arm, ())}
            for arm in itertools.chain.from_iterable(FACTORS)
        }
        for changed, plain in FACTORS:
            pairs = [
                (run, arms[plain][seeds]) for seeds, run in arms[changed].items() if seeds in arms[plain]
            ]
            if pairs:
                found.append(effect_row(f"{learner}{changed} - {learner}{plain}", pairs))
    return found


def _code(label: str) -> str:
    return " minus ".join(f"`{name}`" for name in label.split(" - "))


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = (headings, ["---"] * len(headings), *rows)
    return "\n".join("|".join(("", *(f" {cell} " for cell in line), "")) for line in lines).replace(
        " --- ", "---"
    )


def _row_cells(row: Row, runs: Sequence[KeptRun]) -> list[str]:
    visits = runs[0].epochs / runs[0].num_views if runs[0].num_steps else 0
    return [
        *(_spread(getattr(row, name)) for name in NUMBERS.values()),
        f"{visits:g}",
        f"{min(run.seconds for run in runs):.0f}",
        str(row.num_runs),
    ]


def _effect_cells(effect: EffectRow) -> list[str]:
    tested = (effect.average_incremental_accuracy, effect.last_accuracy)
    p_values = ", ".join(
        "-" if each.p_value is None or len(each.differences) < 3 else f"{each.p_value:.3f}" for each in tested
    )
    return [
        *(_differences(getattr(effect, name)) for name in NUMBERS.values()),
        p_values,
        str(effect.num_pairs),
    ]


def page_with_tables(page: str, kept: Iterable[KeptRun]) -> str:
    """Return the page with every study's tables between its two marks renewed."""
    studies: dict[str, list[KeptRun]] = defaultdict(list)
    for run in kept:
        studies[run.study].append(run)

    def renew(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n\n{tables(studies[found[1]])}\n\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", renew, page, flags=re.DOTALL)


def picture(runs: Iterable[KeptRun], study: str) -> str:
    """Return the paired differences of a study as an SVG file: each pair, their mean and its 95 % interval.

    Intervals that leave 0 out are blue, others grey; what goes beyond the pairs by far is cut. Colours follow the
    reader's light or dark theme.
    """
    effects = effects_of([run for run in runs if run.study == study])
    file = io.StringIO()
    with styled():
        differences_figure(effects).savefig(file, format="svg", metadata={"Date": None})
    alt = f"Differences of average and last accuracy: {'; '.join(map(in_words, effects))}"
    body = inline_svg(file.getvalue(), name=study, alt=alt)
    themes = (_colours(_LIGHT), f"@media (prefers-color-scheme: dark) {{{_colours(_DARK)}}}")
    style = f"<style>{' '.join(themes)}</style>"
    opening, rest = body.split(">", maxsplit=1)
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f"{opening.replace('<svg', f'<svg {namespaces}', 1)}>{style}{rest}\n"


def in_words(effect: EffectRow) -> str:
    """Return what the picture shows of a line, for those who cannot see it."""
    average, last = (_differences(getattr(effect, NUMBERS[heading])) for heading in PICTURED)
    return f"{effect.label.replace(' - ', ' minus ')} {average} and {last}"


def differences_figure(effects: Sequence[EffectRow]) -> Figure:
    """Draw the differences of average and last accuracy, a line below the other; to be called inside ``styled``."""
    figure, panels = new_figure(2, columns=2, height=0.9 + 0.24 * len(effects), share_y=True)
    for axes, heading in zip(panels, PICTURED, strict=True):
        _draw_differences(axes, [getattr(effect, NUMBERS[heading]) for effect in effects])
        axes.set_title(f"{heading} accuracy")
        axes.set_xlabel("difference (points)")
    labels = [effect.label.replace(" - ", " minus ") for effect in effects]
    panels[0].set_yticks(range(len(effects)), labels)
    panels[0].invert_yaxis()
    return figure


def _draw_differences(axes: Axes, effects: Sequence[Effect]) -> None:
    """Draw the differences of each line at its height, from 0 on downwards."""
    pairs = [difference for effect in effects for difference in effect.differences]
    low, high = min([*pairs, 0]), max([*pairs, 0])
    room = 0.15 * (high - low) or 1
    axes.set_xlim(low - room, high + room)
    axes.axvline(0, color=INK, linewidth=0.8)
    for place, effect in enumerate(effects):
        if effect.mean is None:
            continue
        color = SOFT
        if effect.interval and len(effect.differences) > 2:
            low, high = effect.interval
            color = ACCENT if low > 0 or high < 0 else SOFT
            axes.plot((low, high), (place, place), color=color, linewidth=1.8, solid_capstyle="butt")
        for value in effect.differences:
            axes.plot(value, place, "o", color=color, markersize=2.5)
        axes.plot(effect.mean, place, "D", color=color, markersize=5)


def _colours(theme: Mapping[str, str]) -> str:
    return f"svg {{{' '.join(f'--{name}: {color};' for name, color in theme.items())}}}"


def _spread(values: Spread) -> str:
    if values.mean is None:
        return "-"
    return f"{values.mean:.1f}" + ("" if values.std is None else f" ± {values.std:.1f}")


def _differences(effect: Effect) -> str:
    """Return the mean of the differences: with its 95 % interval from three pairs on, with both values for two."""
    if effect.mean is None:
        return "-"
    mean = f"{effect.mean:+.1f}"
    if len(effect.differences) == 2:
        return f"{mean} ({', '.join(f'{value:+.1f}' for value in effect.differences)})"
    if effect.interval is None or len(effect.differences) < 2:
        return mean
    low, high = effect.interval
    return f"{mean} [{low:+.1f}, {high:+.1f}]"


def _read(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def _write(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    keeping = commands.add_parser("keep", help="keep finished runs in docs/results")
    keeping.add_argument("study", type=Path, nargs="+", help="output folder of a study")
    commands.add_parser("tables", help="renew the tables of the pages")
    arguments = parser.parse_args()
    if arguments.command == "keep":
        for study in arguments.study:
            try:
                print(f"{study.name}: {keep(study)} runs kept in {DOCS / 'results'}")
            except UsageError as error:
                parser.error(str(error))
    else:
        kept = read_kept()
        for page in PAGES:
            (DOCS / page).write_text(page_with_tables((DOCS / page).read_text(), kept))
        for study in PICTURES:
            file = DOCS / "results" / f"{study}.svg"
            file.write_text(picture(kept, study), encoding="utf-8")


if __name__ == "__main__":
    main()
