"""Sections on what happened while tasks were trained, and on what that cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vbm_ptm.analysis import prompts, recall, retention, training
from vbm_ptm.analysis.spread import Spread, spreads
from vbm_ptm.analysis.training import TrainingLog
from vbm_ptm.report.page import Cell, PageFigure, PageTable, Section
from vbm_ptm.report.page_parts import (
    ReportRun,
    first_lines,
    lines_of,
    mean_text,
    number,
    records_of,
    rows_table,
    task_table,
    which_lines,
)


def rest(runs: Sequence[ReportRun]) -> Section | None:
    """What was measured while tasks were trained; None for runs that have not measured it."""
    lines = records_of(runs)
    names = [name for name in recall.MEASURES if recall.is_measured(lines, name)]
    if not names:
        return None
    tables = []
    for name in names:
        unit, of = recall.MEASURES[name]
        columns = {
            label: spreads([retention.known_values(of(each)) for each in several])
            for label, several in lines.items()
        }
        tables.append(task_table(columns, digits=4, caption=f"{name}, {unit}, by task"))
    figures = [
        PageFigure(
            "rest",
            "While each task was trained",
            f"By task: {', '.join(names)}; the numbers are in the table.",
            recall.measures_figure(lines),
            tuple(tables),
        )
    ]
    points = {label: recall.interval_points(several) for label, several in lines.items()}
    if any(None not in point for several in points.values() for point in several):
        rows = [
            [label, number(each.interval, 3), number(each.degree, 4)]
            for label, several in points.items()
            for each in several
        ]
        figures.append(
            PageFigure(
                "recall_interval",
                "Degree of forgetting against recall interval",
                "A point for each run: mean recall interval across, mean degree of forgetting up.",
                recall.interval_figure(lines),
                (PageTable.of(("line", "recall interval", "degree of forgetting"), rows),),
            )
        )
    return Section(
        "rest",
        "Rest between visits",
        "Recall interval: images between two visits of a sample, in passes over its task. Degree of forgetting: the "
        "variance of training accuracy over the second half of the epochs.",
        figures=tuple(figures),
    )


def prompt_selection(runs: Sequence[ReportRun]) -> Section | None:
    """Which prompts are chosen; None for learners that choose none."""
    lines = {label: rows for label, rows in records_of(runs).items() if prompts.mean_selections(rows)}
    if not lines:
        return None
    entropy = {
        label: spreads(
            [each.tolist() for each in map(prompts.selection_entropy, several) if each is not None]
        )
        for label, several in lines.items()
    }
    tables = [
        task_table(
            entropy,
            digits=3,
            caption="Entropy of the choices by task: 1 if all are equally frequent, 0 if only one is chosen",
        )
    ]
    tables += [
        rows_table(
            prompts.mean_selections(several),
            corner="task",
            caption=f"{label}, in percent of a task's choices",
        )
        for label, several in first_lines(lines).items()
    ]
    return Section(
        "prompts",
        "Prompt selection",
        "Which prompts of the pool the samples of each task choose in training, in percent."
        + which_lines(lines),
        figures=(
            PageFigure(
                "prompts",
                "",
                "Heat maps of tasks against prompts; the numbers are in the table.",
                prompts.selections_figure(first_lines(lines)),
                tuple(tables),
            ),
        ),
    )


def readings(runs: Sequence[ReportRun]) -> Section | None:
    """Losses and learning rates over the steps."""
    lines: dict[str, list[TrainingLog]] = {}
    finished = {run.label for run in runs if run.measured}
    for run in runs:
        if run.log.readings and (run.measured or run.label not in finished):
            lines.setdefault(run.label, []).append(run.log)
    if not lines:
        return None
    tables = []
    for name in training.reading_names(lines):
        means = {label: [training.task_means(log, name) for log in logs] for label, logs in lines.items()}
        count = 1 + max((task for several in means.values() for each in several for task in each), default=-1)
        columns = {
            label: spreads([[each.get(task) for task in range(count)] for each in several])
            for label, several in means.items()
        }
        tables.append(
            task_table(
                columns, digits=4, caption=f"{name.replace('_', ' ')}, mean over the steps of each task"
            )
        )
    return Section(
        "training",
        "Losses and learning rates",
        "Over the steps of a run, from its log. A point is the mean over a stretch of steps and over the finished runs "
        "of the line; where none is finished, over the others as far as they go.",
        figures=(
            PageFigure(
                "training",
                "",
                f"Over the steps: {', '.join(training.reading_names(lines))}; means by task are in the table.",
                training.readings_figure(lines),
                tuple(tables),
            ),
        ),
    )


def cost(runs: Sequence[ReportRun]) -> Section | None:
    """Where time and memory went."""
    lines = lines_of(runs, lambda result: result.timings.tasks)
    if not lines:
        return None
    rows = []
    for label, several in lines.items():
        split = [training.seconds_by_part(timings) for timings in several]
        rows.append(
            [label, *(mean_text(Spread.of(each[part] for each in split), 1) for part in training.PARTS)]
        )
    return Section(
        "cost",
        "Time and memory",
        "Seconds of all tasks, mean over runs; parameters of the last task, and what a learner keeps of the past.",
        tables=(PageTable.of(("line", "what", "after the last task"), list(_memory(runs))),),
        figures=(
            PageFigure(
                "time",
                "Where the time went",
                "Bars of the seconds of training, ends of tasks and evaluation; the numbers are in the table.",
                training.time_figure(lines),
                (PageTable.of(("line", *training.PARTS), rows, "Seconds: mean ± standard deviation"),),
            ),
        ),
    )


def _memory(runs: Sequence[ReportRun]) -> Iterator[list[Cell | str]]:
    """Yield what the first finished run of each line stores after its last task."""
    seen: set[str] = set()
    for position, run in enumerate(runs):
        if run.label in seen or not (run.measured and run.result and run.result.task_records):
            continue
        seen.add(run.label)
        last = len(run.result.task_records) - 1
        record = run.result.task_records[last]
        for name, count in record.parameters.items():
            source = f"{position}/task_records/{last}/parameters/{name}"
            yield [run.label, f"parameters: {name}", Cell(str(count), source)]
        report = record.learner_report
        if "statistics_bytes" in report:
            source = f"{position}/task_records/{last}/learner_report/statistics_bytes"
            yield [run.label, "bytes of class statistics", Cell(str(report["statistics_bytes"]), source)]
        if "buffer" in report:
            source = f"{position}/task_records/{last}/learner_report/buffer/stored"
            yield [run.label, "images in the buffer", Cell(str(report["buffer"]["stored"]), source)]
