"""The only code that runs more than one configuration: plan, skip what is finished, run the rest."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase as _matches
from pathlib import Path
from typing import Any, NamedTuple

from vbm_ptm.backbones import EMBEDDED_NAME
from vbm_ptm.config.run_config import ComposedConfig, RunConfig, compose
from vbm_ptm.config.study_config import StudyConfig, StudyRun
from vbm_ptm.config.tree import changes, nested
from vbm_ptm.errors import (
    Problem,
    TrainingInterrupted,
    UsageError,
    describe_failure,
    some_names,
    unknown_name,
)
from vbm_ptm.experiment import run
from vbm_ptm.launch import is_main_process, num_processes
from vbm_ptm.report.collect import Collected, MeasuredRun, Missing, collect, costs_of, measures_of
from vbm_ptm.runs.directory import FREE_ON_RESUME, LISTS, PLACES, RunDirectory
from vbm_ptm.runs.places import Places, moved_content
from vbm_ptm.runs.resuming import is_damaged
from vbm_ptm.storage.durable_files import write_json
from vbm_ptm.storage.locking import LockedElsewhereError, sole_holder
from vbm_ptm.storage.run_result import RunResult

logger = logging.getLogger(__name__)

# Seconds to wait for another part of a study that is collecting.
_COLLECTING_SECONDS = 600.0


@dataclass(frozen=True)
class PlannedRun:
    """A configuration, where it goes, and which line of the table it belongs to.

    Attributes:
        label: Line of the table: name of the study's line, data set and grid values.
        config: What is run.
        output: The run directory.
        line: Name of the study's line with its grid values alone.
    """

    label: str
    config: RunConfig
    output: Path
    line: str = ""

    @property
    def seeds(self) -> tuple[int, int]:
        """Training seed and class-order seed: what pairs two runs."""
        return self.config.seed, self.config.scenario.class_order_seed

    def __str__(self) -> str:
        seed, order = self.seeds
        return f"{self.label}, seed {seed}, class-order seed {order}, in {self.output}"

    def missing(self, problem: str | None = None) -> Missing:
        """Return what names the run where it is not finished, or failed with a problem."""
        return Missing(self.label, self.seeds, str(self.output), problem)


def plan_study(
    study: StudyConfig,
    *,
    output: Path,
    overrides: Sequence[str] = (),
    places: Places | None = None,
    only: Sequence[str] = (),
) -> list[PlannedRun]:
    """Return the runs of a study; every configuration is validated before any of them starts.

    Runs of one line and data set that share their seeds stand side by side.

    Args:
        study: What to run.
        output: Folder for the run directories.
        overrides: Items ``path.to.setting=value`` for all runs.
        places: Where data and weights lie.
        only: Patterns of labels, or of labels and folders of seeds, as ``*`` and ``?`` mean them in names of files:
            ``imagenet_r-slca*``, ``*/seed_1993-*``. Other runs are left out; all without it.

    Raises:
        UsageError: A configuration is wrong, two runs share one folder, a place is of no data set of the study, or a
            pattern matches no run.
    """
    places = places or Places()
    known = list(dict.fromkeys(name for entry in study.runs for name in study.datasets_of(entry)))
    unknown = [unknown_name("data set", name, known) for name in places.datasets if name not in known]
    if unknown:
        raise UsageError(*unknown)
    planned = []
    for group in _groups(study):
        lines = [
            _plan_line(study, line, output=output, overrides=overrides, places=places)
            for line in group
            if not only
            or any(_matches(line.label, pattern.rpartition("/")[0] or pattern) for pattern in only)
        ]
        planned += [run for runs in zip(*lines, strict=True) for run in runs]
    if only:
        planned = _select(planned, only, labels=[line.label for group in _groups(study) for line in group])
    twice = [str(folder) for folder, count in Counter(item.output for item in planned).items() if count > 1]
    if twice:
        raise UsageError(
            f"several runs of the study would be written to {', '.join(twice)}: give every run its own name and "
            "no value twice."
        )
    return planned


class _Line(NamedTuple):
    """An entry of a study on one data set, with one choice of the grid."""

    prefix: str
    name: str
    entry: StudyRun
    dataset: str
    cell: dict[str, Any]

    @property
    def label(self) -> str:
        """The name, after that of the data set where there are several."""
        return self.prefix + self.name


def _groups(study: StudyConfig) -> Iterator[list[_Line]]:
    """Yield the lines of each entry on each of its data sets."""
    for entry in study.runs:
        grid = study.grid | entry.grid
        cells = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        for dataset in study.datasets_of(entry):
            prefix = f"{Path(dataset).stem}-" if study.datasets and entry.dataset is None else ""
            suffixes = (
                "".join(f"-{key.rpartition('.')[2]}={value}" for key, value in cell.items()) for cell in cells
            )
            yield [
                _Line(prefix, f"{entry.line}{suffix}", entry, dataset, cell)
                for suffix, cell in zip(suffixes, cells, strict=True)
            ]


def _plan_line(
    study: StudyConfig, line: _Line, *, output: Path, overrides: Sequence[str], places: Places
) -> list[PlannedRun]:
    """Return the runs of one line, one for each pair of seeds."""
    composed = ComposedConfig()
    chosen = [nested(key, value) for key, value in line.cell.items()]
    own = {"dataset": places.datasets.get(line.dataset, {})}
    here = line.entry.settings_on.get(line.dataset, {})
    for tree in (study.settings, line.entry.settings, here, *chosen, own):
        composed.merge(tree, "the study")

    def plan() -> list[PlannedRun]:
        return plan_runs(
            line.label,
            line=line.name,
            output=output,
            seeds=study.seeds,
            class_order_seeds=study.class_order_seeds,
            dataset=line.dataset,
            learner=line.entry.learner,
            preset=line.entry.preset or study.preset,
            tree=composed.tree,
            tree_origin="the study",
            overrides=overrides,
        )

    runs = plan()
    backbone = runs[0].config.backbone
    if places.weights is None or backbone.checkpoint is not None or backbone.name == EMBEDDED_NAME:
        return runs
    composed.merge({"backbone": {"checkpoint": str(places.weights_file(backbone.name))}}, "the study")
    return plan()


def _select(
    runs: Sequence[PlannedRun], patterns: Sequence[str], *, labels: Iterable[str]
) -> list[PlannedRun]:
    """Return the runs that match a pattern; refuse a pattern that matches none."""

    def matching(pattern: str) -> set[Path]:
        return {
            run.output
            for run in runs
            if _matches(run.label, pattern) or _matches(f"{run.label}/{run.output.name}", pattern)
        }

    found = {pattern: matching(pattern) for pattern in patterns}
    without = [pattern for pattern, folders in found.items() if not folders]
    if without:
        raise UsageError(
            f"no run of the study matches {some_names(without)}. Its lines are: {some_names(labels, limit=50)}."
        )
    chosen: set[Path] = set().union(*found.values())
    return [run for run in runs if run.output in chosen]


def plan_runs(
    label: str,
    *,
    output: Path,
    seeds: Sequence[int] = (),
    class_order_seeds: Sequence[int] = (),
    overrides: Sequence[str] = (),
    line: str = "",
    **sources: Any,
) -> list[PlannedRun]:
    """Return one run for each pair of seeds, or a single one without any.

    Args:
        label: Line of the table, and folder below ``output``.
        output: Folder for the run directories.
        seeds: Training seeds.
        class_order_seeds: Seeds of the class order; zipped with ``seeds`` if both are given.
        overrides: Items ``path.to.setting=value``.
        line: See ``PlannedRun``.
        sources: The other arguments of ``vbm_ptm.config.run_config.compose``.

    Raises:
        UsageError: The two lists differ in length, or a configuration is wrong.
    """
    if seeds and class_order_seeds and len(seeds) != len(class_order_seeds):
        raise UsageError(
            f"{len(seeds)} seeds and {len(class_order_seeds)} class-order seeds are given; the lists are "
            "paired and must have the same length."
        )
    pairs = list(zip(seeds, class_order_seeds, strict=True)) if seeds and class_order_seeds else []
    twice = [item for item, number in Counter(pairs or seeds or class_order_seeds).items() if number > 1]
    if twice:
        raise UsageError(f"seeds given more than once: {', '.join(map(str, twice))}; a run is not repeated.")
    count = max(len(seeds), len(class_order_seeds), 1)
    runs = []
    for index in range(count):
        chosen = list(overrides)
        chosen += [f"seed={seeds[index]}"] if seeds else []
        chosen += [f"scenario.class_order_seed={class_order_seeds[index]}"] if class_order_seeds else []
        config = compose(overrides=chosen, **sources).validate()
        folder = output / label.replace("/", "_")
        if seeds or class_order_seeds:
            folder /= f"seed_{config.seed}-order_{config.scenario.class_order_seed}"
        runs.append(PlannedRun(label, config, folder, line))
    return runs


def shard(runs: Sequence[PlannedRun], *, index: int, count: int, costs: Sequence[float]) -> list[PlannedRun]:
    """Return one of the parts into which a study is cut: disjoint, complete, and of about equal cost.

    The dearest run goes first, each to the part that has least to do. It depends on runs and costs alone, never on
    what is finished already.

    Args:
        runs: All runs, in the same order for every part.
        index: Number of the part, from 0.
        count: Number of parts.
        costs: What each run takes, in any unit.
    """
    loads = [0.0] * count
    part_of = {}
    for position in sorted(range(len(runs)), key=lambda position: -costs[position]):
        lightest = loads.index(min(loads))
        loads[lightest] += costs[position]
        part_of[position] = lightest
    return [planned for position, planned in enumerate(runs) if part_of[position] == index]


def fitting(runs: Sequence[PlannedRun], *, costs: Sequence[float], budget: float) -> list[PlannedRun]:
    """Return, in their order, the runs that still fit into a budget.

    Args:
        runs: The most interesting first.
        costs: What each of them takes.
        budget: What all may take, in the same unit.
    """
    kept = []
    for planned, cost in zip(runs, costs, strict=True):
        if cost <= budget:
            budget -= cost
            kept.append(planned)
    return kept


def execute(
    runs: Sequence[PlannedRun],
    *,
    output: Path,
    study: Sequence[PlannedRun] | None = None,
    skip_damaged: bool = False,
) -> Collected:
    """Run what is not finished, resume what was interrupted, and collect all into ``study.json``.

    A run that fails is named under "failed", and the others continue; on several ranks it ends the study, since the
    others may wait for the one that failed.

    Args:
        runs: What to run.
        output: Folder of the study.
        study: All runs of the study, where ``runs`` is a part of it: what is finished of them is collected.
        skip_damaged: Resume runs from their newest intact checkpoint, finished ones too if the last is damaged.

    Raises:
        UsageError: No run is possible.
        TrainingInterrupted: The study was stopped; what is finished stays.
    """
    if (output / "config.yaml").exists():
        raise UsageError(f"{output} is the directory of a single run; a study needs its own folder.")
    finished = {planned.output for planned, _ in finished_runs(study or runs)}
    remaining = [
        planned
        for planned in runs
        if planned.output not in finished or (skip_damaged and is_damaged(RunDirectory(planned.output)))
    ]
    logger.info("%d of %d runs are finished", len(runs) - len(remaining), len(runs))
    failed: list[Missing] = []
    refusals: list[UsageError] = []
    with _said_once("vbm_ptm.data"):
        for number, planned in enumerate(remaining, start=1):
            logger.info("run %d of %d: %s", number, len(remaining), planned)
            try:
                run(
                    planned.config,
                    output=planned.output,
                    resume=planned.output.exists(),
                    skip_damaged=skip_damaged,
                )
            except TrainingInterrupted:
                raise
            except Exception as error:
                if num_processes() > 1:
                    raise
                if isinstance(error, UsageError):
                    refusals.append(error)
                failure = str(error) if isinstance(error, UsageError) else describe_failure(error)
                if failure is None:
                    logger.error("%s", traceback.format_exc())
                logger.error("%s failed: %s", planned, failure or error)
                advice = error.advice if isinstance(error, UsageError) else None
                failed.append(planned.missing(Problem(f"{type(error).__name__}: {failure or error}", advice)))
            gc.collect()  # what a failed run leaves behind consists of reference cycles
    if refusals and len(refusals) == len(remaining):
        problems = dict.fromkeys(itertools.chain.from_iterable(refusal.problems for refusal in refusals))
        raise UsageError(*problems)
    with exclusively(output):
        collected = collect_finished(study or runs, failed=failed)
        if is_main_process():
            write_json(output / "study.json", collected.to_json())
    return collected


@contextmanager
def exclusively(output: Path) -> Iterator[None]:
    """Wait until no other part of the study is collecting: the last one then sees what all have done.

    Raises:
        UsageError: Another part does not end.
    """
    output.mkdir(parents=True, exist_ok=True)
    what = f"{output / 'study.json'} from parts of the study that end at the same moment"
    try:
        with sole_holder(output / ".lock", what=what, patience=_COLLECTING_SECONDS):
            yield
    except LockedElsewhereError as error:
        raise UsageError(
            f"another part of the study does not stop collecting: {error}. Repeat the command."
        ) from error


@contextmanager
def _said_once(package: str) -> Iterator[None]:
    """Let every message of a package pass once: the runs of a study mostly share their data."""

    class Once(logging.Filter):
        """Refuses what it has let pass before; each handler has its own."""

        def __init__(self) -> None:
            super().__init__(package)
            self.said: set[str] = set()

        def filter(self, record: logging.LogRecord) -> bool:
            if not super().filter(record):  # of another package
                return True
            message = record.getMessage()
            is_known = message in self.said
            self.said.add(message)
            return not is_known

    # Records of the modules below pass through handlers alone, not through the filters of their package's logger.
    handlers = [*logging.getLogger("vbm_ptm").handlers, *logging.getLogger().handlers]
    filters = [(handler, Once()) for handler in handlers]
    for handler, once in filters:
        handler.addFilter(once)
    try:
        yield
    finally:
        for handler, once in filters:
            handler.removeFilter(once)


def finished_runs(runs: Iterable[PlannedRun]) -> list[tuple[PlannedRun, RunResult]]:
    """Return the runs of a study that are finished, with what their ``result.json`` holds.

    Raises:
        UsageError: Some directories hold runs of other configurations.
    """
    finished: list[tuple[PlannedRun, RunResult]] = []
    problems: list[str] = []
    for planned in runs:
        try:
            result = RunDirectory(planned.output).finished_result(planned.config)
        except UsageError as error:
            problems += error.problems
            continue
        if result:
            finished.append((planned, result))
    problems += moved_content((item.output, item.config, result) for item, result in finished)
    if problems:
        raise UsageError(*problems)
    return finished


def collect_finished(runs: Sequence[PlannedRun], *, failed: Iterable[Missing] = ()) -> Collected:
    """Return what the finished runs have measured, and name the others.

    Args:
        runs: All runs of the study.
        failed: Those that failed in this sitting.
    """
    finished = finished_runs(runs)
    there = {planned.output for planned, _ in finished}
    return collect(
        [measured_run(planned, result) for planned, result in finished],
        missing=(planned.missing() for planned in runs if planned.output not in there),
        failed=failed,
    )


def changed_settings(planned: PlannedRun, protocol: PlannedRun) -> tuple[str, ...]:
    """Return a line for each setting that is not the study's own, but for those that change no number."""
    trees = [run.config.model_dump(mode="json") for run in (protocol, planned)]
    return tuple(
        f"{key}: {own!r} against {given!r}"
        for key, (own, given) in changes(*trees).items()
        if not any(
            f"{key}.".startswith(f"{free.rstrip('.')}.") for free in (*FREE_ON_RESUME, *PLACES, *LISTS)
        )
    )


def measured_run(planned: PlannedRun, result: RunResult) -> MeasuredRun:
    """Return what is collected of a finished run."""
    return MeasuredRun(
        label=planned.label,
        seeds=planned.seeds,
        directory=str(planned.output),
        # With a single view the objective's settings have no effect.
        family=json.dumps(planned.config.model_dump(mode="json", exclude={"view_batch", "objective"})),
        num_views=planned.config.view_batch.num_views,
        is_baseline=planned.config.view_batch.is_baseline,
        matrix=result.matrix,
        num_steps=result.num_steps,
        num_images=result.num_images,
        seconds=result.task_seconds,
        measures=measures_of(result.task_records)
        | costs_of(result.timings.tasks, num_steps=result.num_steps),
    )
