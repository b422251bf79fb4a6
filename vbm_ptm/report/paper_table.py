"""A table of a paper beside our own runs of it: means, paired differences, and what is known to differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, PositiveInt

from vbm_ptm.report.tables import mean_and_deviation, spread
from vbm_ptm.settings import Settings

# Columns of the table: heading -> accuracy of a result's metrics, and number of a published row.
_COLUMNS = {
    "top-1 average": ("top1", "average"),
    "top-1 last": ("top1", "last"),
    "top-5 average": ("top5", "average"),
    "top-5 last": ("top5", "last"),
}
_METRICS = {"average": "average_incremental_accuracy", "last": "last_accuracy"}


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
        line: What the paper calls it.
        published: Its numbers by benchmark.
        deviations: What is known to differ in our runs of it.
    """

    title: str
    line: str
    published: dict[str, PublishedNumbers]
    deviations: tuple[str, ...] = ()


class PaperRow(PublishedLine):
    """A method of the table, and how we run it.

    Attributes:
        learner: Name of the learner.
        settings: A partial run configuration.
        weighting: How the method averages an accuracy over the seen test images.
        with_views: The line with the view batch, if there is one.
    """

    learner: str
    settings: dict[str, Any] = Field(default_factory=dict)
    weighting: Literal["pooled", "task_mean"]
    with_views: PublishedLine | None = None


class PaperBenchmark(Settings):
    """A benchmark of the table.

    Attributes:
        title: What the paper calls it.
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


class PaperTable(Settings):
    """The published table.

    Attributes:
        source: Publication and table.
        hyper_parameters: Where the settings come from.
        benchmarks: Benchmarks by name of the data set, the most interesting first.
        deviations: What is known to differ in all our runs.
        rows: Methods by name, the most interesting first.
    """

    source: str
    hyper_parameters: str
    benchmarks: dict[str, PaperBenchmark]
    deviations: tuple[str, ...]
    rows: dict[str, PaperRow]

    def line(self, row: str, num_views: int) -> PublishedLine:
        """Return the line that a row with so many views stands beside."""
        method = self.rows[row]
        return method.with_views if num_views > 1 and method.with_views else method


@dataclass(frozen=True)
class TableRun:
    """A run that the table asks for.

    Attributes:
        row: Name of the method.
        benchmark: Name of the data set.
        num_views: V.
        order: Seed of class order and training.
        directory: Where it goes.
        changed: Settings that are not those of the paper's preset.
        result: What ``result.json`` holds, if it is finished.
    """

    row: str
    benchmark: str
    num_views: int
    order: int
    directory: str
    changed: tuple[str, ...] = ()
    result: Mapping[str, Any] | None = None


def compare_with_paper(table: PaperTable, runs: Sequence[TableRun]) -> dict[str, Any]:
    """Return the table with the published numbers beside ours, as JSON values.

    Args:
        table: What was published.
        runs: All runs that were asked for; lines stand in their order.
    """
    benchmarks = {}
    for name, benchmark in table.benchmarks.items():
        here = [run for run in runs if run.benchmark == name]
        if here:
            lines = dict.fromkeys((run.row, run.num_views) for run in here)
            benchmarks[name] = {
                "title": benchmark.title,
                "deviations": list(benchmark.deviations),
                "lines": [
                    _line(table, name, [run for run in here if (run.row, run.num_views) == key])
                    for key in lines
                ],
                "paired": [
                    _paired(table, name, here, row, num_views) for row, num_views in lines if num_views > 1
                ],
            }
    return {
        "source": table.source,
        "hyper_parameters": table.hyper_parameters,
        "deviations": list(table.deviations),
        "benchmarks": benchmarks,
    }


def _line(table: PaperTable, benchmark: str, runs: Sequence[TableRun]) -> dict[str, Any]:
    row, num_views = runs[0].row, runs[0].num_views
    method, line = table.rows[row], table.line(row, num_views)
    finished = [run for run in runs if run.result]
    deviations = [*method.deviations, *(line.deviations if line is not method else ())]
    deviations += [f"Not the paper's setting: {change}." for change in dict.fromkeys(_all_changes(finished))]
    deviations += _data_deviations(table.benchmarks[benchmark], finished)
    return {
        "row": row,
        "title": _title(line, num_views),
        "line": line.line,
        "num_views": num_views,
        "weighting": method.weighting,
        "numbers": {
            heading: {
                "paper": _published(line, benchmark, top, number),
                **{
                    weighting: mean_and_deviation(
                        _accuracy(run, top=top, number=number, weighting=weighting) for run in finished
                    )
                    for weighting in ("pooled", "task_mean")
                },
            }
            for heading, (top, number) in _COLUMNS.items()
        },
        "orders": [run.order for run in finished],
        "missing": [{"order": run.order, "directory": run.directory} for run in runs if not run.result],
        "protocol": sorted({_protocol(run.result) for run in finished if run.result}),
        "deviations": deviations,
    }


def _title(line: PublishedLine, num_views: int) -> str:
    return f"{line.title}, V = {num_views}" if num_views > 1 else line.title


def _all_changes(runs: Iterable[TableRun]) -> Iterable[str]:
    for run in runs:
        yield from run.changed


def _data_deviations(benchmark: PaperBenchmark, runs: Sequence[TableRun]) -> list[str]:
    expected = (benchmark.num_train, benchmark.num_test)
    counts = {
        (run.result["data"]["train"]["images"], run.result["data"]["test"]["images"])
        for run in runs
        if run.result
    }
    return [
        f"{train:,} training and {test:,} test images, not {expected[0]:,} and {expected[1]:,} "
        f"({benchmark.origin})."
        for train, test in sorted(counts - {expected})
    ]


def _protocol(result: Mapping[str, Any]) -> str:
    """Say with what a run was made: weights, inputs, schedule, split."""
    config, weights = result["config"], result["weights"]
    optimization, transforms = config["optimization"], config["dataset"]["transforms"]
    schedule = optimization["schedule"]
    if optimization["milestones"]:
        schedule += f" at {', '.join(map(str, optimization['milestones']))}"
    clipping = optimization["clip_gradient_norm"]
    named = (
        f"{weights['name']} (SHA-256 {weights['sha256'][:12]})" if weights else "weights given by the caller"
    )
    return (
        f"{named}; inputs: {transforms['interpolation'] or 'as the weights'}, normalization "
        f"{transforms['normalization']}, strong view {transforms['strong']}; {optimization['optimizer']} "
        f"{optimization['learning_rate']:g}, {optimization['epochs']} epochs of batches of "
        f"{optimization['batch_size']}, {schedule}, weight decay {optimization['weight_decay']:g}, "
        f"clipping {'none' if clipping is None else f'{clipping:g}'}; precision "
        f"{config['trainer']['mixed_precision']}; split SHA-256 {result['split_sha256'][:12]}, "
        f"held out for testing: {result['data']['held_out'] or 'nothing, the data set has a test split'}"
    )


def _published(line: PublishedLine, benchmark: str, top: str, number: str) -> dict[str, float] | None:
    accuracy = getattr(line.published.get(benchmark, PublishedNumbers()), top)
    pair = getattr(accuracy, number)
    return None if pair is None else {"mean": pair[0], "std": pair[1]}


def _accuracy(run: TableRun, *, top: str, number: str, weighting: str) -> float | None:
    assert run.result is not None
    name = _METRICS[number] + ("_task_mean" if weighting == "task_mean" else "")
    value: float | None = run.result["metrics"]["class_incremental"][top][name]
    return value


def _paired(
    table: PaperTable, benchmark: str, runs: Sequence[TableRun], row: str, num_views: int
) -> dict[str, Any]:
    """Return what the view batch changes for each class order, and what the paper's means differ by."""
    method, line = table.rows[row], table.line(row, num_views)
    finished = {(run.num_views, run.order): run for run in runs if run.row == row and run.result}
    differences = []
    for (views, order), run in finished.items():
        baseline = finished.get((1, order))
        if views == num_views and baseline and _is_same_data(run, baseline):
            changes = {}
            for heading, (top, number) in _COLUMNS.items():
                with_views, without = (
                    _accuracy(each, top=top, number=number, weighting=method.weighting)
                    for each in (run, baseline)
                )
                changes[heading] = _difference(with_views, without)
            differences.append({"order": order, **changes})
    published = {}
    for heading, (top, number) in _COLUMNS.items():
        means = [(_published(each, benchmark, top, number) or {}).get("mean") for each in (line, method)]
        published[heading] = _difference(*means)
    return {
        "title": f"{_title(line, num_views)}, minus {method.title}",
        "weighting": method.weighting,
        "paper": published,
        "orders": differences,
        "mean": {heading: mean_and_deviation(each[heading] for each in differences) for heading in _COLUMNS},
    }


def _difference(one: float | None, two: float | None) -> float | None:
    return None if one is None or two is None else one - two


def _is_same_data(one: TableRun, two: TableRun) -> bool:
    """Return whether two runs saw the same images with the same weights; others are no pair."""
    seen = [
        (result["split_sha256"], (result["weights"] or {}).get("sha256"))
        for result in (one.result, two.result)
        if result
    ]
    return seen[0] == seen[1]


def markdown(compared: Mapping[str, Any]) -> str:
    """Return the comparison as a Markdown page."""
    lines = [
        "# The paper's table and ours",
        "",
        f"Published: {compared['source']}. Settings: {compared['hyper_parameters']}.",
        "",
        "Accuracy over all seen classes in percent, mean ± standard deviation over class orders; `p` is the paper's "
        "number. Under *mean*: whether the method pools the test images of all tasks or averages over tasks; ours "
        "does the same.",
    ]
    for benchmark in compared["benchmarks"].values():
        lines += ["", f"## {benchmark['title']}", ""]
        lines += _accuracy_lines(benchmark["lines"])
        for paired in benchmark["paired"]:
            lines += [
                "",
                f"**{paired['title']}**, per class order, in points ({_words(paired['weighting'])}):",
                "",
            ]
            lines += _paired_lines(paired)
        lines += ["", "What we ran, and what is known to differ:", ""]
        lines += [f"- {deviation}" for deviation in (*compared["deviations"], *benchmark["deviations"])]
        for line in benchmark["lines"]:
            lines.append(f"- **{line['title']}**")
            lines += [f"  - Run with {protocol}." for protocol in line["protocol"]]
            lines += [f"  - {deviation}" for deviation in line["deviations"]]
    missing = [
        f"- {benchmark['title']}, {line['title']}, order {item['order']}: `{item['directory']}`"
        for benchmark in compared["benchmarks"].values()
        for line in benchmark["lines"]
        for item in line["missing"]
    ]
    if missing:
        lines += ["", "## Not finished", "", *missing]
    return "\n".join(lines) + "\n"


def _words(weighting: str) -> str:
    return weighting.replace("_", " ")


def _accuracy_lines(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    headings = [part for heading in _COLUMNS for part in (f"{heading} p", "ours")]
    rows = []
    for line in lines:
        cells = []
        for heading in _COLUMNS:
            numbers = line["numbers"][heading]
            cells += ["-" if numbers["paper"] is None else spread(numbers["paper"])]
            cells += [spread(numbers[line["weighting"]])]
        rows.append([line["title"], *cells, _words(line["weighting"]), str(len(line["orders"]))])
    return _table(["method", *headings, "mean", "runs"], rows)


def _paired_lines(paired: Mapping[str, Any]) -> list[str]:
    def signed(value: float | None) -> str:
        return spread({"mean": value, "std": None}, sign="+")

    rows = [["paper (of the means)", *(signed(paired["paper"][heading]) for heading in _COLUMNS)]]
    rows += [
        [str(each["order"]), *(signed(each[heading]) for heading in _COLUMNS)] for each in paired["orders"]
    ]
    rows.append(["ours", *(spread(paired["mean"][heading], sign="+") for heading in _COLUMNS)])
    return _table(["class order", *_COLUMNS], rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---", *("---:" for _ in headings[1:])]
    return [f"| {' | '.join(cells)} |" for cells in (headings, rule, *rows)]
