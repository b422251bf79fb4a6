"""A published table beside our own runs: means, paired differences, and what is known to differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from vbm_ptm.analysis.spread import Spread
from vbm_ptm.metrics import Scope, TopK, Weighting
from vbm_ptm.report.collect import Effect, costs_of, measures_of
from vbm_ptm.report.tables import effect, spread
from vbm_ptm.settings import Settings
from vbm_ptm.storage.run_result import RunResult


@dataclass(frozen=True)
class Measure:
    """A column of a table.

    Attributes:
        heading: Its heading.
        of: Returns the number of a run, if it was measured.
    """

    heading: str
    of: Callable[[RunResult, Weighting], float | None]


def _average(*, top: TopK) -> Callable[[RunResult, Weighting], float | None]:
    return lambda result, weighting: result.matrix.average_incremental(top=top, weighting=weighting)


def _last(*, top: TopK = 1, scope: Scope) -> Callable[[RunResult, Weighting], float | None]:
    return lambda result, weighting: result.matrix.last(top=top, scope=scope, weighting=weighting)


def _degree_of_forgetting(result: RunResult, _: Weighting) -> float | None:
    return measures_of(result.task_records)["degree_of_forgetting_test"]


def _cost(name: str) -> Callable[[RunResult, Weighting], float | None]:
    return lambda result, _: costs_of(result.timings.tasks, num_steps=result.num_steps)[name]


MeasureName = Literal[
    "average", "last", "average_top5", "last_top5", "til_last", "degree_of_forgetting", "latency", "memory"
]

MEASURES: dict[MeasureName, Measure] = {
    "average": Measure("top-1 average", _average(top=1)),
    "last": Measure("top-1 last", _last(scope="class_incremental")),
    "average_top5": Measure("top-5 average", _average(top=5)),
    "last_top5": Measure("top-5 last", _last(top=5, scope="class_incremental")),
    "til_last": Measure("TIL last", _last(scope="task_incremental")),
    "degree_of_forgetting": Measure("degree of forgetting", _degree_of_forgetting),
    "latency": Measure("ms a step", _cost("step_milliseconds")),
    "memory": Measure("peak memory, GB", _cost("peak_memory_gigabytes")),
}

Number = float | tuple[float, float]


class PublishedRow(Settings):
    """A row of the table, named after the study's line with its grid values: ``er-num_views=4``.

    Attributes:
        title: What we call it.
        line: What the publication calls it.
        weighting: How the method averages an accuracy over the seen test images.
        published: Its numbers by benchmark and measure: a mean, or a mean and a standard deviation.
        against: The row whose runs are paired with those of this row.
        is_run: Whether a study runs it; for other rows only published numbers are shown.
        deviations: What is known to differ in our runs of it, besides what differs in those that it is paired with.
    """

    title: str
    line: str
    weighting: Weighting
    published: dict[str, dict[MeasureName, Number]]
    against: str | None = None
    is_run: bool = True
    deviations: tuple[str, ...] = ()

    def number(self, benchmark: str, measure: MeasureName) -> Spread | None:
        """Return what was published."""
        number = self.published.get(benchmark, {}).get(measure)
        if number is None:
            return None
        return Spread(*number) if isinstance(number, tuple) else Spread(number, None)


class PublishedBenchmark(Settings):
    """A benchmark of the table.

    Attributes:
        title: What the publication calls it.
        num_classes: Number of classes.
        num_train: Number of training images.
        num_test: Number of test images.
        origin: Where the counts come from; what is assumed of a data set that is not available.
        domains: Training and test images of each domain, if domains are the tasks.
        deviations: What is known to differ in our runs on it.
    """

    title: str
    num_classes: PositiveInt
    num_train: PositiveInt
    num_test: PositiveInt
    origin: str
    domains: dict[str, tuple[PositiveInt, PositiveInt]] = Field(default_factory=dict)
    deviations: tuple[str, ...] = ()


class PublishedTable(Settings):
    """The published table.

    Attributes:
        source: Publication and table.
        hyper_parameters: Where the settings come from.
        benchmarks: Benchmarks by name of the data set.
        deviations: What is known to differ in all our runs.
        rows: Rows by the name of the study's line.
    """

    source: str
    hyper_parameters: str
    benchmarks: dict[str, PublishedBenchmark]
    deviations: tuple[str, ...]
    rows: dict[str, PublishedRow]

    @model_validator(mode="after")
    def _check_names(self) -> PublishedTable:
        for name, row in self.rows.items():
            unknown = [each for each in row.published if each not in self.benchmarks]
            unknown += [row.against] if row.against and row.against not in self.rows else []
            if unknown:
                raise ValueError(f"row {name} names {', '.join(unknown)}, which the table does not have")
        return self

    def measures(self, benchmark: str) -> tuple[MeasureName, ...]:
        """Return the columns that have a number for a benchmark."""
        return tuple(
            measure
            for measure in MEASURES
            if any(row.number(benchmark, measure) for row in self.rows.values())
        )

    def deviations_of(self, name: str) -> tuple[str, ...]:
        """Return what is known to differ in the runs of a row."""
        row = self.rows[name]
        return (*(self.deviations_of(row.against) if row.against else ()), *row.deviations)


Seeds = tuple[int, int]


@dataclass(frozen=True)
class TableRun:
    """A run that the table calls for.

    Attributes:
        row: Name of the study's line, with its grid values.
        benchmark: Name of the data set.
        seeds: Training seed and class-order seed, by which it is paired with a run of another row.
        directory: Its run directory.
        changed: Settings that differ from those of the study.
        result: Its outcome, if it is finished.
    """

    row: str
    benchmark: str
    seeds: Seeds
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
        row: Name of the row.
        title: What we call it.
        line: What the publication calls it.
        weighting: How the method averages.
        numbers: Numbers by column heading.
        seeds: Seeds of the finished runs.
        missing: Seeds and directories of the others.
        protocol: What it was run with.
        deviations: What is known to differ.
    """

    row: str
    title: str
    line: str
    weighting: Weighting
    numbers: dict[str, Cell]
    seeds: tuple[Seeds, ...]
    missing: tuple[tuple[Seeds, str], ...]
    protocol: tuple[str, ...]
    deviations: tuple[str, ...]


@dataclass(frozen=True)
class Paired:
    """What a row changes compared with another one; numbers by column heading.

    Attributes:
        title: Titles of both rows.
        weighting: How the method averages.
        paper: Difference of the published means.
        seeds: Seeds of the pairs.
        effects: Effects in our pairs.
    """

    title: str
    weighting: Weighting
    paper: dict[str, float | None]
    seeds: tuple[Seeds, ...]
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
    """Put the published numbers beside ours.

    Args:
        table: What was published.
        runs: All runs that are called for; those without a published row are left out. Lines are in the order of the
            table.
    """
    benchmarks = {}
    for name, benchmark in table.benchmarks.items():
        here: dict[str, list[TableRun]] = {}
        for run in runs:
            if run.benchmark == name and run.row in table.rows:
                here.setdefault(run.row, []).append(run)
        if not here:
            continue
        shown = [
            row
            for row, each in table.rows.items()
            if row in here or (not each.is_run and name in each.published)
        ]
        benchmarks[name] = BenchmarkComparison(
            title=benchmark.title,
            deviations=benchmark.deviations,
            lines=tuple(_line(table, name, row, here.get(row, ())) for row in shown),
            paired=tuple(
                _paired(table, name, row, against, here)
                for row in shown
                if row in here and (against := table.rows[row].against) in here
            ),
        )
    return Comparison(table.source, table.hyper_parameters, table.deviations, benchmarks)


def _line(table: PublishedTable, benchmark: str, name: str, runs: Sequence[TableRun]) -> Line:
    row = table.rows[name]
    results = [run.result for run in runs if run.result]
    changed = dict.fromkeys(change for run in runs if run.result for change in run.changed)

    def ours(measure: Measure, weighting: Weighting) -> Spread:
        return Spread.of(measure.of(result, weighting) for result in results)

    return Line(
        row=name,
        title=row.title,
        line=row.line,
        weighting=row.weighting,
        numbers={
            measure.heading: Cell(
                row.number(benchmark, key), ours(measure, "pooled"), ours(measure, "task_mean")
            )
            for key, measure in _columns(table, benchmark).items()
        },
        seeds=tuple(run.seeds for run in runs if run.result),
        missing=tuple((run.seeds, run.directory) for run in runs if not run.result),
        protocol=tuple(sorted(set(map(_protocol, results)))),
        deviations=(
            *table.deviations_of(name),
            *(f"Not a setting of the study: {change}." for change in changed),
            *_data_deviations(table.benchmarks[benchmark], results),
        ),
    )


def _columns(table: PublishedTable, benchmark: str) -> dict[MeasureName, Measure]:
    return {name: MEASURES[name] for name in table.measures(benchmark)}


def _data_deviations(benchmark: PublishedBenchmark, results: Iterable[RunResult]) -> list[str]:
    expected = (benchmark.num_train, benchmark.num_test)
    counts = {(result.data.train.images, result.data.test.images) for result in results}
    return [
        f"{train:,} training and {test:,} test images, not {expected[0]:,} and {expected[1]:,} "
        f"({benchmark.origin})."
        for train, test in sorted(counts - {expected})
    ]


def _protocol(result: RunResult) -> str:
    """Say what a run was made with: weights, inputs, schedule, split."""
    config, weights = result.config, result.weights
    optimization, transforms = config["optimization"], config["dataset"]["transforms"]
    schedule = optimization["schedule"]
    if milestones := optimization.get("milestones"):
        schedule += f" at {', '.join(map(str, milestones))}"
    clipping = optimization["clip_gradient_norm"]
    named = f"{weights.name} (SHA-256 {weights.sha256[:12]})" if weights else "weights given by the caller"
    return (
        f"{named}; inputs: {transforms['interpolation'] or 'as the weights'}, normalization "
        f"{transforms['normalization']}, strong view {transforms['strong']}; {optimization['optimizer']} "
        f"{optimization['learning_rate']:g}, {optimization['epochs']} epochs of batches of "
        f"{optimization['batch_size']}, {schedule}, weight decay {optimization['weight_decay']:g}, "
        f"clipping {'none' if clipping is None else f'{clipping:g}'}; precision "
        f"{config['trainer'].get('mixed_precision', 'no')}; split SHA-256 {result.split_sha256[:12]}, "
        f"held out for testing: {result.data.held_out or 'nothing, the data set has a test split'}"
    )


def _paired(
    table: PublishedTable, benchmark: str, name: str, against: str, runs: Mapping[str, Sequence[TableRun]]
) -> Paired:
    """Return what a row changes for each pair of seeds, and by how much the published means differ."""
    row, plain = table.rows[name], table.rows[against]
    finished, baselines = (
        {run.seeds: run.result for run in runs[each] if run.result} for each in (name, against)
    )
    pairs = {
        seeds: (result, baselines[seeds])
        for seeds, result in finished.items()
        if seeds in baselines and _is_same_data(result, baselines[seeds])
    }

    def published(measure: MeasureName) -> float | None:
        numbers = [each.number(benchmark, measure) for each in (row, plain)]
        means = [number.mean for number in numbers if number and number.mean is not None]
        return means[0] - means[1] if len(means) == 2 else None

    def ours(measure: Measure) -> Effect:
        return Effect.of_pairs(
            (measure.of(changed, row.weighting), measure.of(base, row.weighting))
            for changed, base in pairs.values()
        )

    columns = _columns(table, benchmark)
    return Paired(
        title=f"{row.title}, minus {plain.title}",
        weighting=row.weighting,
        paper={measure.heading: published(key) for key, measure in columns.items()},
        seeds=tuple(pairs),
        effects={measure.heading: ours(measure) for measure in columns.values()},
    )


def _is_same_data(one: RunResult, two: RunResult) -> bool:
    """Return whether two runs had the same images and weights; otherwise they are not a pair."""
    seen = [(each.split_sha256, each.weights and each.weights.sha256) for each in (one, two)]
    return seen[0] == seen[1]


def markdown(compared: Comparison) -> str:
    """Return the comparison as a Markdown page."""
    lines = [
        "# The published table and ours",
        "",
        f"Published: {compared.source}. Settings: {compared.hyper_parameters}.",
        "",
        "Accuracy in percent, over all seen classes or (TIL) among those of the task, mean ± standard deviation over "
        "runs; `p` is the published number. Under *mean*: whether the method pools the test images of all tasks or "
        "averages over tasks; ours does the same.",
    ]
    for benchmark in compared.benchmarks.values():
        lines += ["", f"## {benchmark.title}", "", *_number_lines(benchmark.lines)]
        for paired in benchmark.paired:
            weighting = _words(paired.weighting)
            lines += ["", f"**{paired.title}**, by seed and class order ({weighting}):", ""]
            lines += _paired_lines(paired)
        lines += ["", "What we ran, and what is known to differ:", ""]
        lines += [f"- {deviation}" for deviation in (*compared.deviations, *benchmark.deviations)]
        for line in benchmark.lines:
            lines.append(f"- **{line.title}**")
            lines += [f"  - Run with {protocol}." for protocol in line.protocol]
            lines += [f"  - {deviation}" for deviation in line.deviations]
    missing = [
        f"- {benchmark.title}, {line.title}, seed and class order {_numbers(seeds)}: `{directory}`"
        for benchmark in compared.benchmarks.values()
        for line in benchmark.lines
        for seeds, directory in line.missing
    ]
    if missing:
        lines += ["", "## Not finished", "", *missing]
    return "\n".join(lines) + "\n"


def _words(weighting: Weighting) -> str:
    return weighting.replace("_", " ")


def _numbers(seeds: Seeds) -> str:
    return ", ".join(map(str, seeds))


def _number_lines(lines: Sequence[Line]) -> list[str]:
    columns = list(lines[0].numbers)
    headings = [part for heading in columns for part in (f"{heading} p", "ours")]
    rows = []
    for line in lines:
        cells = []
        for cell in line.numbers.values():
            cells += ["-" if cell.paper is None else spread(cell.paper)]
            cells += [spread(cell.pooled if line.weighting == "pooled" else cell.task_mean)]
        rows.append([line.title, *cells, _words(line.weighting), str(len(line.seeds))])
    return _table(["method", *headings, "mean", "runs"], rows)


def _paired_lines(paired: Paired) -> list[str]:
    def signed(values: Iterable[float | None]) -> list[str]:
        return [spread(Spread(value, None), sign="+") for value in values]

    rows = [["published (of the means)", *signed(paired.paper.values())]]
    for index, seeds in enumerate(paired.seeds):
        differences = [each.differences for each in paired.effects.values()]
        shown = [each[index] if len(each) == len(paired.seeds) else None for each in differences]
        rows.append([_numbers(seeds), *signed(shown)])
    rows.append(["ours", *(effect(each) for each in paired.effects.values())])
    return _table(["seed, order", *paired.effects], rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in headings[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)]
