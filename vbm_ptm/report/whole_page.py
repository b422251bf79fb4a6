"""The page of a report: every number is from a ``result.json``, or a mean, deviation or effect of such numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vbm_ptm.report import page_accuracy, page_training
from vbm_ptm.report.collect import Collected, EffectRow, collect
from vbm_ptm.report.page import Page, PageTable, Section
from vbm_ptm.report.page_parts import Findings, ReportRun
from vbm_ptm.report.tables import NOT_AVAILABLE, spread
from vbm_ptm.storage.run_result import RunResult


def report_page(runs: Sequence[ReportRun], *, title: str, findings: Findings) -> Page:
    """Assemble a page.

    Args:
        runs: All runs, in the order of their lines.
        title: Title of the page.
        findings: What is known besides.
    """
    collected = collect([run.measured for run in runs if run.measured])
    sections = (
        page_accuracy.summary(collected),
        page_accuracy.all_runs(runs),
        page_accuracy.accuracy(runs),
        page_accuracy.matrices(runs),
        page_accuracy.forgetting(runs),
        page_accuracy.confusion_of_tasks(runs),
        page_accuracy.curves(runs),
        page_training.rest(runs),
        page_training.prompt_selection(runs),
        page_accuracy.classes(runs),
        page_training.readings(runs),
        page_training.cost(runs),
        _pictures(findings),
        _environment(findings),
    )
    unfinished = [run for run in runs if run.measured is None]
    notes = [
        f"Not finished, and in no mean of finished runs: {run.directory} ({run.state})."
        for run in unfinished[:20]
    ]
    if len(unfinished) > 20:
        notes.append(f"And {len(unfinished) - 20} more runs are not finished.")
    return Page(
        title=title,
        finding=_finding(collected, runs),
        facts=_facts(runs),
        notes=(*notes, *findings.notes),
        sections=tuple(section for section in sections if section is not None),
    )


def _finding(collected: Collected, runs: Sequence[ReportRun]) -> str:
    """Return the sentence that opens the page."""
    known = [row for row in collected.view_batch_effects if row.last_accuracy.mean is not None]
    if known:
        return _effect_sentence(known)
    rows = [row for row in collected.rows if row.last_accuracy.mean is not None]
    if rows:
        best = max(rows, key=lambda each: each.last_accuracy.mean or 0.0)
        start = "" if len(rows) == 1 else f"Best of {len(rows)}: "
        return f"{start}{best.label} ends at {spread(best.last_accuracy)} % over all classes."
    return f"None of {len(runs)} runs is finished yet." if len(runs) > 1 else "The run is not finished yet."


def _effect_sentence(rows: Sequence[EffectRow]) -> str:
    """Return what the view batch changes if pairs of runs decide it, and otherwise that they do not."""
    decided = [
        (row, name, mean, interval)
        for row in rows
        for name, mean, interval in (
            ("average", row.average_incremental_accuracy.mean, row.average_incremental_accuracy.interval),
            ("last", row.last_accuracy.mean, row.last_accuracy.interval),
        )
        if mean is not None and interval and not interval[0] <= 0 <= interval[1]
    ]
    if decided:
        row, name, mean, (low, high) = max(decided, key=lambda each: (each[0].num_pairs, abs(each[2])))
        others = len(rows) - len({each[0].label for each in decided})
        rest = f" {others} other line{'s' * (others > 1)}: not decided." if others else ""
        return (
            f"The view batch {'raises' if mean > 0 else 'lowers'} the {name} accuracy of {row.label} by "
            f"{abs(mean):.2f} points (95 % interval {low:+.2f} to {high:+.2f}, {row.num_pairs} pairs).{rest}"
        )
    if any(each.interval for row in rows for each in (row.average_incremental_accuracy, row.last_accuracy)):
        return (
            "No effect of the view batch is decided: every 95 % interval of paired differences of average and last "
            "accuracy contains 0."
        )
    row, change = rows[0], rows[0].last_accuracy.mean or 0.0
    pairs = f"in each of {row.num_pairs} pairs" if row.num_pairs > 1 else "in a single pair"
    return (
        f"The view batch changes the last accuracy of {row.label} by {change:+.2f} points {pairs} of equal seeds, "
        "which decides nothing."
    )


def _facts(runs: Sequence[ReportRun]) -> tuple[tuple[str, str], ...]:
    results = [run.result for run in runs if run.result]

    def each(name: str, of: Callable[[RunResult], object]) -> tuple[str, str]:
        return name, ", ".join(dict.fromkeys(str(of(result)) for result in results)) or NOT_AVAILABLE

    finished = sum(run.measured is not None for run in runs)
    return (
        ("Runs finished", f"{finished} of {len(runs)}"),
        each("Data", lambda result: result.dataset),
        each("Learners", lambda result: result.learner),
        each("Views", lambda result: result.num_views),
        each("Tasks", lambda result: len(result.tasks)),
        each("Classes", lambda result: len(result.class_names)),
    )


def _pictures(findings: Findings) -> Section | None:
    if not findings.hardest and not findings.forgotten:
        return None
    return Section(
        "images",
        "Hardest and most forgotten images",
        "Test images that most runs get wrong after the last task, then those that were right most often before and "
        "are wrong after it.",
        pictures=(*findings.hardest, *findings.forgotten),
    )


def _environment(findings: Findings) -> Section | None:
    tables = []
    headings = ("setting", "section", "value")
    if findings.differences:
        rows = [[name, section, values] for section, name, values in findings.differences]
        tables.append(PageTable.of(headings, rows, "What differs between runs"))
    if findings.shared:
        rows = [[name, section, value] for section, name, value in findings.shared]
        tables.append(PageTable.of(headings, rows, "What all runs have in common"))
    if not tables:
        return None
    return Section("environment", "Differences, environment and hashes", tables=tuple(tables))
