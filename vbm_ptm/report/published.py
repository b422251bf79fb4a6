"""A published table beside our own runs of it: means, paired differences, and what is known to differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import PositiveInt

from vbm_ptm.analysis.spread import Spread
from vbm_ptm.metrics import AccuracyMatrix, TopK, Weighting
from vbm_ptm.report.collect import Effect
from vbm_ptm.report.tables import effect, spread
from vbm_ptm.settings import Settings
from vbm_ptm.storage.run_result import RunResult


@dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        top: A hit is the best or one of the five best classes.
        number: Average over the tasks' ends, or last.
    """

    top: TopK
    number: Literal["average", "last"]

    def accuracy(self, matrix: AccuracyMatrix, weighting: Weighting) -> float | None:
        """Return the accuracy of a run."""
        of = matrix.average_incremental if self.number == "average" else matrix.last
        return of(top=self.top, weighting=weighting)


COLUMNS = {
    "top-1 average": Column(1, "average"),
    "top-1 last": Column(1, "last"),
    "top-5 average": Column(5, "average"),
    "top-5 last": Column(5, "last"),
}


class PublishedAccuracy(Settings):
    """Mean and standard deviation of the published accuracies, in percent."""

    average: tuple[float, float] | None = None
    last: tuple[float, float] | None = None


class PublishedNumbers(Settings):
    """A published row on one benchmark."""

    top1: PublishedAccuracy = PublishedAccuracy()
    top5: PublishedAccuracy = PublishedAccuracy()


class PublishedLine(Settings):
    """A line of the table.

    Attributes:
        title: What we call it.
        line: What the publication calls it.
        published: Its numbers by benchmark.
        deviations: What is known to differ in our runs of it.
    """

    title: str
    line: str
    published: dict[str, PublishedNumbers]
    deviations: tuple[str, ...] = ()

    def number(self, benchmark: str, column: Column) -> Spread | None:
        """Return what was published."""
        numbers = self.published.get(benchmark, PublishedNumbers())
        pair = getattr(numbers.top1 if column.top == 1 else numbers.top5, column.number)
        return None if pair is None else Spread(*pair)


class PublishedRow(PublishedLine):
    """A method of the table; a line of the study has its name.

    Attributes:
        weighting: How the method averages an accuracy over the seen test images.
        with_views: The line with the view batch, if there is one.
    """

    weighting: Weighting
    with_views: PublishedLine | None = None


class PublishedBenchmark(Settings):
    """A benchmark of the table.

    Attributes:
        title: What the publication calls it.
        num_classes: Classes.
        num_train: Training images.
        num_test: Test images.
        origin: Where the counts come from; what is assumed of a data set that is not at hand.
        deviations: What is known to differ in our runs on it.
    """

    title: str
    num_classes: PositiveInt
    num_train: PositiveInt
    num_test: PositiveInt
    origin: str
    deviations: tuple[str, ...] = ()


class PublishedTable(Settings):
    """The published table.

    Attributes:
        source: Publication and table.
        hyper_parameters: Where the settings come from.
        benchmarks: Benchmarks by name of the data set.
        deviations: What is known to differ in all our runs.
        rows: Methods by name of the study's line.
    """

    source: str
    hyper_parameters: str
    benchmarks: dict[str, PublishedBenchmark]
    deviations: tuple[str, ...]
    rows: dict[str, PublishedRow]

    def line(self, row: str, num_views: int) -> PublishedLine:
        """Return the line that a row with this number of views stands beside."""
        method = self.rows[row]
        return method.with_views if num_views > 1 and method.with_views else method


@dataclass(frozen=True)
class TableRun:
    """A run that the table asks for.

    Attributes:
        row: Name of the method.
        benchmark: Name of the data set.
        num_views: V.
        order: Seed of the class order.
        directory: Where it lies.
        changed: Settings that are not those of the study.
        result: Its outcome, if it is finished.
    """

    row: str
    benchmark: str
    num_views: int
    order: int
    directory: str
    changed: tuple[str, ...] = ()
    result: RunResult | None = None


@dataclass(frozen=True)
class Cell:
    """A published number, and ours under both ways of averaging over tasks."""

    paper: Spread | None
    pooled: Spread
    task_mean: Spread


@dataclass(frozen=True)
class Line:
    """A line of the comparison on one benchmark.

    Attributes:
        row: Name of the method.
        title: What we call it.
        line: What the publication calls it.
        num_views: V.
        weighting: How the method averages.
        numbers: By heading of the column.
        orders: Class orders of the finished runs.
        missing: Class order and directory of the others.
        protocol: With what it was run.
        deviations: What is known to differ.
    """

    row: str
    title: str
    line: str
    num_views: int
    weighting: Weighting
    numbers: dict[str, Cell]
    orders: tuple[int, ...]
    missing: tuple[tuple[int, str], ...]
    protocol: tuple[str, ...]
    deviations: tuple[str, ...]


@dataclass(frozen=True)
class Paired:
    """What the view batch changes in a line; numbers by heading of the column, in points.

    Attributes:
        title: Both lines.
        weighting: How the method averages.
        paper: Difference of the published means.
        orders: Class orders of the pairs.
        effects: Of our pairs.
    """

    title: str
    weighting: Weighting
    paper: dict[str, float | None]
    orders: tuple[int, ...]
    effects: dict[str, Effect]


@dataclass(frozen=True)
class BenchmarkComparison:
    """The comparison on one benchmark."""

    title: str
    deviations: tuple[str, ...]
    lines: tuple[Line, ...]
    paired: tuple[Paired, ...]


@dataclass(frozen=True)
class Comparison:
    """The whole table beside ours."""

    source: str
    hyper_parameters: str
    deviations: tuple[str, ...]
    benchmarks: dict[str, BenchmarkComparison]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def compare_with_published(table: PublishedTable, runs: Sequence[TableRun]) -> Comparison:
    """Set the published numbers beside ours.

    Args:
        table: What was published.
        runs: All runs that were asked for; lines stand in their order, those without a published row are left out.
    """
    benchmarks = {}
    for name, benchmark in table.benchmarks.items():
        here = [run for run in runs if run.benchmark == name and run.row in table.rows]
        if here:
            lines = dict.fromkeys((run.row, run.num_views) for run in here)
            benchmarks[name] = BenchmarkComparison(
                title=benchmark.title,
                deviations=benchmark.deviations,
                lines=tuple(
                    _line(table, name, [run for run in here if (run.row, run.num_views) == key])
                    for key in lines
                ),
                paired=tuple(
                    _paired(table, name, here, row, num_views) for row, num_views in lines if num_views > 1
                ),
            )
    return Comparison(table.source, table.hyper_parameters, table.deviations, benchmarks)


def _line(table: PublishedTable, benchmark: str, runs: Sequence[TableRun]) -> Line:
    row, num_views = runs[0].row, runs[0].num_views
    method, line = table.rows[row], table.line(row, num_views)
    results = [run.result for run in runs if run.result]
    changed = dict.fromkeys(change for run in runs if run.result for change in run.changed)

    def ours(column: Column, weighting: Weighting) -> Spread:
        return Spread.of(column.accuracy(result.matrix, weighting) for result in results)

    return Line(
        row=row,
        title=_title(line, num_views),
        line=line.line,
        num_views=num_views,
        weighting=method.weighting,
        numbers={
            heading: Cell(line.number(benchmark, column), ours(column, "pooled"), ours(column, "task_mean"))
            for heading, column in COLUMNS.items()
        },
        orders=tuple(run.order for run in runs if run.result),
        missing=tuple((run.order, run.directory) for run in runs if not run.result),
        protocol=tuple(sorted(set(map(_protocol, results)))),
        deviations=(
            *method.deviations,
            *(line.deviations if line is not method else ()),
            *(f"Not a setting of the study: {change}." for change in changed),
            *_data_deviations(table.benchmarks[benchmark], results),
        ),
    )


def _title(line: PublishedLine, num_views: int) -> str:
    return f"{line.title}, V = {num_views}" if num_views > 1 else line.title


def _data_deviations(benchmark: PublishedBenchmark, results: Iterable[RunResult]) -> list[str]:
    expected = (benchmark.num_train, benchmark.num_test)
    counts = {(result.data.train.images, result.data.test.images) for result in results}
    return [
        f"{train:,} training and {test:,} test images, not {expected[0]:,} and {expected[1]:,} "
        f"({benchmark.origin})."
        for train, test in sorted(counts - {expected})
    ]


def _protocol(result: RunResult) -> str:
    """Say with what a run was made: weights, inputs, schedule, split."""
    config, weights = result.config, result.weights
    optimization, transforms = config["optimization"], config["dataset"]["transforms"]
    schedule = optimization["schedule"]
    if optimization["milestones"]:
        schedule += f" at {', '.join(map(str, optimization['milestones']))}"
    clipping = optimization["clip_gradient_norm"]
    named = f"{weights.name} (SHA-256 {weights.sha256[:12]})" if weights else "weights given by the caller"
    return (
        f"{named}; inputs: {transforms['interpolation'] or 'as the weights'}, normalization "
        f"{transforms['normalization']}, strong view {transforms['strong']}; {optimization['optimizer']} "
        f"{optimization['learning_rate']:g}, {optimization['epochs']} epochs of batches of "
        f"{optimization['batch_size']}, {schedule}, weight decay {optimization['weight_decay']:g}, "
        f"clipping {'none' if clipping is None else f'{clipping:g}'}; precision "
        f"{config['trainer']['mixed_precision']}; split SHA-256 {result.split_sha256[:12]}, "
        f"held out for testing: {result.data.held_out or 'nothing, the data set has a test split'}"
    )


def _paired(
    table: PublishedTable, benchmark: str, runs: Sequence[TableRun], row: str, num_views: int
) -> Paired:
    """Return what the view batch changes for each class order, and what the published means differ by."""
    method, line = table.rows[row], table.line(row, num_views)
    finished = {(run.num_views, run.order): run.result for run in runs if run.row == row and run.result}
    pairs = {
        order: (result.matrix, finished[1, order].matrix)
        for (views, order), result in finished.items()
        if views == num_views and (1, order) in finished and _is_same_data(result, finished[1, order])
    }

    def published(column: Column) -> float | None:
        numbers = [each.number(benchmark, column) for each in (line, method)]
        means = [number.mean for number in numbers if number and number.mean is not None]
        return means[0] - means[1] if len(means) == 2 else None

    def ours(column: Column) -> Effect:
        return Effect.of_pairs(
            (column.accuracy(changed, method.weighting), column.accuracy(plain, method.weighting))
            for changed, plain in pairs.values()
        )

    return Paired(
        title=f"{_title(line, num_views)}, minus {method.title}",
        weighting=method.weighting,
        paper={heading: published(column) for heading, column in COLUMNS.items()},
        orders=tuple(pairs),
        effects={heading: ours(column) for heading, column in COLUMNS.items()},
    )


def _is_same_data(one: RunResult, two: RunResult) -> bool:
    """Return whether two runs saw the same images with the same weights; others are not a pair."""
    seen = [(each.split_sha256, each.weights and each.weights.sha256) for each in (one, two)]
    return seen[0] == seen[1]


def markdown(compared: Comparison) -> str:
    """Return the comparison as a Markdown page."""
    lines = [
        "# The published table and ours",
        "",
        f"Published: {compared.source}. Settings: {compared.hyper_parameters}.",
        "",
        "Accuracy over all seen classes in percent, mean ± standard deviation over class orders; `p` is the published "
        "number. Under *mean*: whether the method pools the test images of all tasks or averages over tasks; ours "
        "does the same.",
    ]
    for benchmark in compared.benchmarks.values():
        lines += ["", f"## {benchmark.title}", "", *_accuracy_lines(benchmark.lines)]
        for paired in benchmark.paired:
            weighting = _words(paired.weighting)
            lines += ["", f"**{paired.title}**, per class order, in points ({weighting}):", ""]
            lines += _paired_lines(paired)
        lines += ["", "What we ran, and what is known to differ:", ""]
        lines += [f"- {deviation}" for deviation in (*compared.deviations, *benchmark.deviations)]
        for line in benchmark.lines:
            lines.append(f"- **{line.title}**")
            lines += [f"  - Run with {protocol}." for protocol in line.protocol]
            lines += [f"  - {deviation}" for deviation in line.deviations]
    missing = [
        f"- {benchmark.title}, {line.title}, order {order}: `{directory}`"
        for benchmark in compared.benchmarks.values()
        for line in benchmark.lines
        for order, directory in line.missing
    ]
    if missing:
        lines += ["", "## Not finished", "", *missing]
    return "\n".join(lines) + "\n"


def _words(weighting: Weighting) -> str:
    return weighting.replace("_", " ")


def _accuracy_lines(lines: Sequence[Line]) -> list[str]:
    headings = [part for heading in COLUMNS for part in (f"{heading} p", "ours")]
    rows = []
    for line in lines:
        cells = []
        for heading in COLUMNS:
            cell = line.numbers[heading]
            cells += ["-" if cell.paper is None else spread(cell.paper)]
            cells += [spread(cell.pooled if line.weighting == "pooled" else cell.task_mean)]
        rows.append([line.title, *cells, _words(line.weighting), str(len(line.orders))])
    return _table(["method", *headings, "mean", "runs"], rows)


def _paired_lines(paired: Paired) -> list[str]:
    def signed(values: Mapping[str, float | None]) -> list[str]:
        return [spread(Spread(values[heading], None), sign="+") for heading in COLUMNS]

    rows = [["published (of the means)", *signed(paired.paper)]]
    for index, order in enumerate(paired.orders):
        differences = {heading: paired.effects[heading].differences for heading in COLUMNS}
        is_whole = {heading: len(each) == len(paired.orders) for heading, each in differences.items()}
        shown = {heading: each[index] if is_whole[heading] else None for heading, each in differences.items()}
        rows.append([str(order), *signed(shown)])
    rows.append(["ours", *(effect(paired.effects[heading]) for heading in COLUMNS)])
    return _table(["class order", *COLUMNS], rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in headings[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)]
