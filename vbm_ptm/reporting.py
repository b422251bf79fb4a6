"""From run directories, of a study or given one by one, to a report's page: read, compare, find images, write."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vbm_ptm.analysis.training import read_log_file
from vbm_ptm.data.image_split import ImageDatasets
from vbm_ptm.data.reading.datasets import load_image_dataset
from vbm_ptm.data.task_division import build_scenario
from vbm_ptm.errors import UsageError
from vbm_ptm.report.page import Picture
from vbm_ptm.report.page_parts import Findings, ReportRun
from vbm_ptm.report.whole_page import report_page
from vbm_ptm.runs.comparison import compared_facts
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.storage.durable_files import check_writable, write_file
from vbm_ptm.study import PlannedRun, measured_run

logger = logging.getLogger(__name__)

NUM_PICTURES = 12
_LARGEST_SIDE = 96
# What a study calls the run directories of a line.
_SEED_FOLDER = re.compile(r"seed_\d+(-order_\d+)?")
_MOST_VALUES = 8
# What pairs or distinguishes the runs of a line, and where they are: not a difference worth a row.
_NOT_COMPARED = ("seed", "scenario.class_order_seed", "dataset.path", "device", "preset")


def write_report(places: Sequence[Path], *, output: Path, pdf: bool = False) -> list[Path]:
    """Write a page on runs, and its figures as files beside it in ``figures/``.

    Args:
        places: Run directories, or folders that hold some, such as those of studies.
        output: The page.
        pdf: Whether figures are written as PDF, too. Their fonts take longer than all the rest.

    Returns:
        The files.

    Raises:
        UsageError: A place holds no run, or the files cannot be written.
    """
    found = find_runs(places)
    figures = output.parent / "figures"
    for file in (output, figures / "*.svg"):
        check_writable(file)
    runs = [read_run(folder, label) for folder, label in found]
    title = ", ".join(dict.fromkeys(place.resolve().name for place in places))
    page = report_page(runs, title=title, findings=find(runs))
    output.parent.mkdir(parents=True, exist_ok=True)
    write_file(output, page.html().encode())
    return [output, *page.write_figures(figures, pdf=pdf)]


def find_runs(places: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return the run directories at or below the places, each once and with its line.

    Runs with one parent folder that are named by their seeds are a line, every other run is one of its own. It is named
    by its path below the place; where two lines would have one name, all are named from the folder that holds them all.

    Raises:
        UsageError: A place holds none.
    """
    line_of: dict[Path, Path] = {}
    folders: dict[Path, Path] = {}
    names: dict[Path, str] = {}
    for place in places:
        for folder in _runs_below(place):
            run, top = folder.resolve(), place.resolve()
            line = run.parent if _SEED_FOLDER.fullmatch(run.name) else run
            is_below = line != top and line.is_relative_to(top)
            folders.setdefault(run, folder)
            line_of.setdefault(run, line)
            names.setdefault(line, line.relative_to(top).as_posix() if is_below else line.name)
    if len(set(names.values())) < len(names):
        top = Path(os.path.commonpath([line.parent for line in names]))
        names = {line: line.relative_to(top).as_posix() for line in names}
    return [(folder, names[line_of[run]]) for run, folder in folders.items()]


def _runs_below(place: Path) -> list[Path]:
    if (place / "config.yaml").is_file():
        return [place]
    found = sorted(file.parent for file in place.rglob("config.yaml") if "checkpoints" not in file.parts)
    if not found:
        raise UsageError(
            f"{place} is neither a run directory (with a config.yaml) nor a folder that holds some."
        )
    return found


def read_run(folder: Path, label: str) -> ReportRun:
    """Read what a run has left, finished or not.

    Raises:
        UsageError: Its configuration or its result is damaged.
    """
    directory = RunDirectory(folder)
    config, result, log = directory.config(), directory.result(), read_log_file(folder / "log.jsonl")
    if result is None:
        return ReportRun(label, str(folder), f"no result yet, {log.num_tasks} tasks are finished", log=log)
    if not result.is_finished:
        state = f"{result.status}, {len(result.task_records)} of {len(result.tasks)} tasks are finished"
        return ReportRun(label, str(folder), state, result=result, log=log)
    measured = measured_run(PlannedRun(label, config, folder), result)
    return ReportRun(label, str(folder), "finished", result=result, measured=measured, log=log)


def find(runs: Sequence[ReportRun]) -> Findings:
    """Return in what runs differ, what they share, and the most telling test images, where these are available."""
    differences, shared = _compare(runs)
    notes: list[str] = []
    hardest: list[Picture] = []
    forgotten: list[Picture] = []
    try:
        hardest, forgotten = _find_pictures(runs)
    except (UsageError, OSError) as error:
        notes.append(f"Images are not shown: {error}")
    return Findings(tuple(differences), tuple(shared), tuple(hardest), tuple(forgotten), tuple(notes))


def _compare(runs: Sequence[ReportRun]) -> tuple[list[tuple[str, str, str]], list[tuple[str, str, str]]]:
    """Return rows of section, name and values: what differs between runs, and what of the environment does not."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for run in runs:
        for section, facts in compared_facts(Path(run.directory)).items():
            for name, value in facts.items():
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                found.setdefault((section, name), {}).setdefault(text, []).append(run.label)
    differences, shared = [], []
    for (section, name), values in found.items():
        if name in _NOT_COMPARED:
            continue
        if len(values) > 1:
            differences.append((section, name, _values(values)))
        elif section != "settings":
            shared.append((section, name, next(iter(values))))
    return differences, shared


def _values(values: Mapping[str, Sequence[str]]) -> str:
    """Word which runs have which value."""
    parts = [f"{text} ({', '.join(dict.fromkeys(labels))})" for text, labels in values.items()]
    more = f"; and {len(parts) - _MOST_VALUES} more" if len(parts) > _MOST_VALUES else ""
    return "; ".join(parts[:_MOST_VALUES]) + more


def _find_pictures(runs: Sequence[ReportRun]) -> tuple[list[Picture], list[Picture]]:
    """Return the hardest and the most forgotten test images of the finished runs on the first one's images."""
    known = [run for run in runs if run.measured and run.result and run.log.predictions]
    if not known:
        return [], []
    first = known[0]
    assert first.result is not None
    config = RunDirectory(Path(first.directory)).config()
    spec = config.dataset
    is_here = (
        spec.path.exists()
        if spec.path is not None
        else spec.source is not None and spec.source.startswith("builtin:")
    )
    if not is_here or config.scenario.extends is not None:
        return [], []
    datasets = load_image_dataset(spec)
    if datasets.split_sha256 != first.result.split_sha256:
        raise UsageError(f"the images of '{spec.name}' are not those that {first.directory} was measured on.")
    known = [run for run in known if run.result and run.result.split_sha256 == first.result.split_sha256]
    num_images = len(datasets.test)
    wrong, judged, lost = (np.zeros(num_images) for _ in range(3))
    guesses: dict[int, str] = {}
    for run in known:
        table, names = _predictions(run, datasets)
        ends = table[-1] >= 0
        truth = _truth(run, datasets)
        is_wrong = ends & (table[-1] != truth)
        judged += ends
        wrong += is_wrong
        lost += is_wrong * (table[:-1] == truth).sum(axis=0)
        for row in np.flatnonzero(is_wrong):
            guesses[int(row)] = names[table[-1, row]]
    share = np.divide(wrong, judged, out=np.zeros(num_images), where=judged > 0)
    forgotten = [int(row) for row in np.argsort(-lost, kind="stable")[:NUM_PICTURES] if lost[row]]
    # Of the images that all runs get wrong, those that none of them ever knew come first.
    order = np.lexsort((lost, -share))
    hardest = [int(row) for row in order if share[row] and int(row) not in forgotten][:NUM_PICTURES]

    def picture(row: int, what: str) -> Picture:
        name = datasets.class_names[datasets.test.labels[row]]
        return Picture(_data_address(datasets, row), f"{name}, classified as {guesses[row]}: {what}")

    return (
        [picture(row, f"wrong in {int(wrong[row])} of {int(judged[row])} runs") for row in hardest],
        [picture(row, f"right after {int(lost[row])} earlier evaluations") for row in forgotten],
    )


def _scenario(run: ReportRun, datasets: ImageDatasets) -> Any:
    config = RunDirectory(Path(run.directory)).config()
    return build_scenario(
        config.scenario,
        class_names=datasets.class_names,
        labels=datasets.train.labels,
        domains=datasets.train.domains,
    )


def _truth(run: ReportRun, datasets: ImageDatasets) -> Any:
    return _scenario(run, datasets).class_index_of_label[datasets.test.labels]


def _predictions(run: ReportRun, datasets: ImageDatasets) -> tuple[Any, tuple[str, ...]]:
    """Return (evaluations, test images) predicted classes, -1 where one was not looked at, and class names."""
    scenario = _scenario(run, datasets)
    table = np.full((max(run.log.predictions) + 1, len(datasets.test)), -1)
    for after, predictions in run.log.predictions.items():
        seen = scenario.seen_after(after)
        rows = np.concatenate(
            [scenario.rows_of(task, datasets.test.labels, datasets.test.domains) for task in seen]
        )
        if len(rows) == len(predictions):
            table[after, rows] = predictions
    return table, scenario.class_names


def _data_address(datasets: ImageDatasets, row: int) -> str:
    image = datasets.test.image(row).convert("RGB")
    image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE))
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
