"""The only code that runs more than one configuration: plan, skip what is finished, run the rest, collect."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from vbm_ptm.backbones.weights_file import file_sha256
from vbm_ptm.config.run_config import ComposedConfig, RunConfig, compose, problem_messages
from vbm_ptm.config.tree import nested, read_yaml
from vbm_ptm.data.reading.datasets import DatasetSpec, load_image_dataset
from vbm_ptm.errors import TrainingInterrupted, UsageError
from vbm_ptm.experiment import run
from vbm_ptm.launch import is_main_process, num_processes
from vbm_ptm.report.tables import mean_and_deviation
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.runs.resuming import is_damaged
from vbm_ptm.settings import Settings
from vbm_ptm.storage.durable_files import write_json
from vbm_ptm.storage.locking import LockedElsewhereError, sole_holder
from vbm_ptm.storage.run_result import RunResult

logger = logging.getLogger(__name__)

METRICS = ("average_incremental_accuracy", "last_accuracy", "forgetting")
TASK_MEANS = ("average_incremental_accuracy_task_mean", "last_accuracy_task_mean")
TOP5 = ("average_incremental_accuracy", "last_accuracy")

# Seconds to wait for another part of a study that is collecting.
_COLLECTING_SECONDS = 600.0

Grid = dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]]


class StudyRun(Settings):
    """One line of a study: a learner and what is special about it.

    Attributes:
        learner: Name of the learner.
        dataset: Data set in place of the study's.
        name: Label in tables and directories; made from learner and grid values without it.
        preset: Preset in place of the study's.
        settings: A partial run configuration.
        grid: Dotted setting -> values, as in the study, for this line alone.
    """

    learner: str
    dataset: str | None = None
    name: str | None = Field(default=None, pattern="[^.]")  # "." and ".." are other folders
    preset: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    grid: Grid = Field(default_factory=dict)


class StudyConfig(Settings):
    """A study file.

    Attributes:
        dataset: Name, YAML file or folder, as for ``vbm-ptm train``; for all runs that name none.
        preset: Preset of every run that names none.
        settings: A partial run configuration for all runs.
        runs: The lines of the study.
        grid: Dotted setting -> values; every run is planned with every combination.
        seeds: Training seeds.
        class_order_seeds: Seeds of the class order; together with ``seeds`` they are zipped.
    """

    dataset: str | None = None
    preset: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    runs: tuple[StudyRun, ...] = Field(min_length=1)
    grid: Grid = Field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    class_order_seeds: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _check_datasets(self) -> StudyConfig:
        if self.dataset is None and (unnamed := [entry for entry in self.runs if entry.dataset is None]):
            raise ValueError(
                f"no data set is given for {', '.join(entry.name or entry.learner for entry in unnamed)}: set "
                "'dataset' of the study, or of each run."
            )
        return self


@dataclass(frozen=True)
class PlannedRun:
    """A configuration, where it goes, and which line of the table it belongs to."""

    label: str
    config: RunConfig
    output: Path

    @property
    def seeds(self) -> tuple[int, int]:
        """Training seed and class-order seed: what pairs two runs."""
        return self.config.seed, self.config.scenario.class_order_seed

    def __str__(self) -> str:
        return f"{self.label}, seeds {self.seeds}, in {self.output}"

    def record(self) -> dict[str, Any]:
        """Return what identifies the run, as JSON values."""
        return {"label": self.label, "seeds": list(self.seeds), "directory": str(self.output)}


def read_study(file: Path | None) -> StudyConfig:
    """Read a study file.

    Raises:
        UsageError: A setting of the study itself is wrong.
    """
    try:
        return StudyConfig.model_validate(read_yaml(file))
    except ValidationError as error:
        problems = problem_messages(StudyConfig, error, origin=lambda _: str(file))
        raise UsageError(*(f"study: {problem}" for problem in problems)) from error


def plan_study(study: StudyConfig, *, output: Path, overrides: Sequence[str] = ()) -> list[PlannedRun]:
    """Return all runs of a study; every configuration is validated before any of them starts.

    Args:
        study: What to run.
        output: Folder for the run directories.
        overrides: Items ``path.to.setting=value`` for all runs.

    Raises:
        UsageError: A configuration is wrong, or two runs share one folder.
    """
    planned = []
    cells = [
        (entry, dict(zip(grid, values, strict=True)))
        for entry in study.runs
        for grid in [study.grid | entry.grid]
        for values in itertools.product(*grid.values())
    ]
    for entry, cell in cells:
        suffix = "".join(f"-{key.rpartition('.')[2]}={value}" for key, value in cell.items())
        composed = ComposedConfig()
        for tree in (study.settings, entry.settings, *(nested(key, value) for key, value in cell.items())):
            composed.merge(tree, "the study")
        planned += plan_runs(
            f"{entry.name or entry.learner}{suffix}",
            output=output,
            seeds=study.seeds,
            class_order_seeds=study.class_order_seeds,
            dataset=entry.dataset or study.dataset,
            learner=entry.learner,
            preset=entry.preset or study.preset,
            tree=composed.tree,
            overrides=overrides,
        )
    twice = [str(folder) for folder, count in Counter(item.output for item in planned).items() if count > 1]
    if twice:
        raise UsageError(
            f"several runs of the study would be written to {', '.join(twice)}: give every run a name of its own "
            "and no value twice."
        )
    return planned


def plan_runs(
    label: str,
    *,
    output: Path,
    seeds: Sequence[int] = (),
    class_order_seeds: Sequence[int] = (),
    overrides: Sequence[str] = (),
    **sources: Any,
) -> list[PlannedRun]:
    """Return one run for each pair of seeds, or a single one without any.

    Args:
        label: Line of the table, and folder below ``output``.
        output: Folder for the run directories.
        seeds: Training seeds.
        class_order_seeds: Seeds of the class order; zipped with ``seeds`` if both are given.
        overrides: Items ``path.to.setting=value``.
        sources: The other arguments of ``vbm_ptm.config.run_config.compose``.

    Raises:
        UsageError: The two lists differ in length, or a configuration is wrong.
    """
    if seeds and class_order_seeds and len(seeds) != len(class_order_seeds):
        raise UsageError(
            f"{len(seeds)} seeds and {len(class_order_seeds)} class-order seeds are given; both lists are walked "
            "side by side and must have the same length."
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
        runs.append(PlannedRun(label, config, folder))
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


def parse_shard(text: str) -> tuple[int, int]:
    """Read "2/8", the second of eight parts; return index, from 0, and number of parts.

    Raises:
        UsageError: It is no such part.
    """
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
        return int(first) - 1, int(second)
    raise UsageError(f"--shard '{text}' is not of the form PART/PARTS, such as 1/8 to 8/8.")


def execute(
    runs: Sequence[PlannedRun],
    *,
    output: Path,
    study: Sequence[PlannedRun] | None = None,
    skip_damaged: bool = False,
) -> dict[str, Any]:
    """Run what is not finished, go on with what is interrupted, and collect all into ``study.json``.

    A run that fails is named under "failed", and the others go on; on several ranks it ends the study, since the
    others may wait for the one that failed.

    Args:
        runs: What to run.
        output: Folder of the study.
        study: All runs of the study, where ``runs`` is a part of it: what is finished of them is collected.
        skip_damaged: Let runs go on from their newest whole checkpoint, finished ones too if the last is damaged.

    Raises:
        UsageError: No run is possible.
        TrainingInterrupted: The study was stopped; what is finished stays.
    """
    if (output / "config.yaml").exists():
        raise UsageError(f"--output {output} is the directory of a single run; give another folder.")
    finished = {planned.output for planned, _ in finished_runs(study or runs)}
    remaining = [
        planned
        for planned in runs
        if planned.output not in finished or (skip_damaged and is_damaged(RunDirectory(planned.output)))
    ]
    logger.info("%d of %d runs are finished", len(runs) - len(remaining), len(runs))
    failed: list[dict[str, Any]] = []
    refusals: list[tuple[str, ...]] = []
    with _said_once("vbm_ptm.data.reading.datasets", "vbm_ptm.data.task_division"):
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
                    refusals.append(error.problems)
                elif not isinstance(error, FloatingPointError):
                    logger.error("%s", traceback.format_exc())
                logger.error("%s failed: %s", planned, error)
                failed.append({**planned.record(), "problem": f"{type(error).__name__}: {error}"})
            gc.collect()  # what a failed run leaves hangs together in cycles
    if refusals and len(refusals) == len(remaining):
        raise UsageError(*dict.fromkeys(itertools.chain.from_iterable(refusals)))
    with exclusively(output):
        collected = collect_finished(study or runs) | {"failed": failed}
        if is_main_process():
            write_json(output / "study.json", collected)
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
def _said_once(*names: str) -> Iterator[None]:
    """Let every message of these loggers pass once: the runs of a study mostly share their data."""
    said = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_known = message in said
        said.add(message)
        return not is_known

    loggers = [logging.getLogger(name) for name in names]
    for each in loggers:
        each.addFilter(is_new)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(is_new)


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
    problems += _other_content(finished)
    if problems:
        raise UsageError(*problems)
    return finished


def _other_content(finished: Iterable[tuple[PlannedRun, RunResult]]) -> list[str]:
    """Return a problem for each run whose images or weights, looked for in another place now, are others there."""
    sha256_of = cache(file_sha256)

    @cache
    def split_at(spec: str) -> str:
        dataset = DatasetSpec.model_validate_json(spec).model_copy(update={"verify": "none"})
        return load_image_dataset(dataset).split_sha256

    problems = []
    for planned, result in finished:
        stored, config = result.config, planned.config
        path, checkpoint = config.dataset.path, config.backbone.checkpoint
        made_of: list[tuple[Path | str, str, str, Callable[[], str]]] = []
        if (path and str(path)) != stored["dataset"]["path"]:
            spec = config.dataset.model_dump_json()
            made_of.append(
                (
                    path or config.dataset.name,
                    "the images or their split",
                    result.split_sha256,
                    partial(split_at, spec),
                )
            )
        if checkpoint is None and stored["backbone"]["checkpoint"] is not None:
            logger.warning(
                "%s was made with a weights file of its own; not compared with '%s'",
                planned.output,
                config.backbone.name,
            )
        elif checkpoint is not None and str(checkpoint) != stored["backbone"]["checkpoint"]:
            recorded = result.weights.sha256 if result.weights else ""
            made_of.append((checkpoint, "the weights", recorded, partial(sha256_of, checkpoint)))
        for place, what, recorded, hash_of in made_of:
            try:
                now = hash_of()
            except (UsageError, OSError) as error:
                logger.warning("%s: taken as made of %s; not checked: %s", planned.output, place, error)
                continue
            if now != recorded:
                problems.append(
                    f"{planned.output} was made with other data than lie at {place} now: SHA-256 of {what} is "
                    f"{recorded[:12]} there against {now[:12]}. Give this study another --output."
                )
    return problems


def collect_finished(runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """Return what ``collect`` returns of the finished runs, and name the others under "missing"."""
    finished = finished_runs(runs)
    there = {planned.output for planned, _ in finished}
    collected = collect([planned for planned, _ in finished], [result for _, result in finished])
    return collected | {"missing": [planned.record() for planned in runs if planned.output not in there]}


def collect(runs: Iterable[PlannedRun], results: Iterable[RunResult]) -> dict[str, Any]:
    """Return a row per label (mean and standard deviation over seeds) and the paired effect of the view batch.

    A pair is two runs that differ in nothing but the view batch, one of them with a single view.
    """
    finished = list(zip(runs, results, strict=True))
    rows = []
    for label in dict.fromkeys(planned.label for planned, _ in finished):
        members = [(planned, result) for planned, result in finished if planned.label == label]
        rows.append(
            {
                "label": label,
                "num_runs": len(members),
                **{
                    name: mean_and_deviation([headline(result)[name] for _, result in members])
                    for name in (*METRICS, *TASK_MEANS)
                },
                **{
                    f"{name}_top5": mean_and_deviation(
                        [headline(result, top=5)[name] for _, result in members]
                    )
                    for name in TOP5
                },
                "seconds": mean_and_deviation([seconds(result) for _, result in members]),
                "num_images": mean_and_deviation([result.num_images for _, result in members]),
                "seeds": [planned.seeds for planned, _ in members],
                "directories": [str(planned.output) for planned, _ in members],
            }
        )
    return {"rows": rows, "view_batch_effects": _paired_effects(finished)}


def headline(result: RunResult, *, top: int = 1) -> dict[str, Any]:
    """Return the numbers over all seen classes of a result, top-1 or top-5."""
    numbers: dict[str, Any] = result.metrics["class_incremental"][f"top{top}"]
    return numbers


def seconds(result: RunResult) -> float:
    """Return the time that the tasks of a run took, over all its sittings."""
    return result.task_seconds


def _paired_effects(finished: Sequence[tuple[PlannedRun, RunResult]]) -> list[dict[str, Any]]:
    def family(planned: PlannedRun) -> str:
        # With a single view the objective's settings have no effect.
        return json.dumps(planned.config.model_dump(mode="json", exclude={"view_batch", "objective"}))

    baselines = {
        family(planned): result for planned, result in finished if planned.config.view_batch.num_views == 1
    }
    pairs: dict[str, list[dict[str, float]]] = {}
    for planned, result in finished:
        baseline = baselines.get(family(planned))
        if planned.config.view_batch.num_views > 1 and baseline and result.num_steps:
            with_views, without = headline(result), headline(baseline)
            known = [name for name in METRICS if None not in (with_views[name], without[name])]
            pairs.setdefault(planned.label, []).append(
                {name: with_views[name] - without[name] for name in known}
            )
    return [
        {
            "label": label,
            "num_pairs": len(members),
            **{name: mean_and_deviation([member.get(name) for member in members]) for name in METRICS},
        }
        for label, members in pairs.items()
    ]
