"""The only code that runs more than one configuration: plan, skip what is finished, run the rest, collect."""

from __future__ import annotations

import itertools
import json
import logging
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from vbm_ptm.config import ComposedConfig, RunConfig, compose, problem_messages
from vbm_ptm.config_tree import nested, read_yaml
from vbm_ptm.engine.checkpoint import write_json
from vbm_ptm.errors import UsageError
from vbm_ptm.experiment import run
from vbm_ptm.launch import is_main_process
from vbm_ptm.settings import Settings

logger = logging.getLogger(__name__)

METRICS = ("average_incremental_accuracy", "last_accuracy", "forgetting")


class StudyRun(Settings):
    """One line of a study: a learner and what is special about it.

    Attributes:
        learner: Name of the learner.
        name: Label in tables and directories; made from learner and grid values without it.
        preset: Preset in place of the study's.
        settings: A partial run configuration.
    """

    learner: str
    name: str | None = Field(default=None, pattern="[^.]")  # "." and ".." are other folders
    preset: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)


class StudyConfig(Settings):
    """A study file.

    Attributes:
        dataset: Name, YAML file or folder, as for ``vbm-ptm train``.
        preset: Preset of every run that names none.
        settings: A partial run configuration for all runs.
        runs: The lines of the study.
        grid: Dotted setting -> values; every run is planned with every combination.
        seeds: Training seeds.
        class_order_seeds: Seeds of the class order; together with ``seeds`` they are zipped.
    """

    dataset: str
    preset: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    runs: tuple[StudyRun, ...] = Field(min_length=1)
    grid: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(default_factory=dict)
    seeds: tuple[int, ...] = ()
    class_order_seeds: tuple[int, ...] = ()


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
    combinations = list(itertools.product(*study.grid.values()))
    for entry, values in itertools.product(study.runs, combinations):
        cell = dict(zip(study.grid, values, strict=True))
        suffix = "".join(f"-{key.rpartition('.')[2]}={value}" for key, value in cell.items())
        composed = ComposedConfig()
        for tree in (study.settings, entry.settings, *(nested(key, value) for key, value in cell.items())):
            composed.merge(tree, "the study")
        planned += plan_runs(
            f"{entry.name or entry.learner}{suffix}",
            output=output,
            seeds=study.seeds,
            class_order_seeds=study.class_order_seeds,
            dataset=study.dataset,
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
        sources: The other arguments of ``vbm_ptm.config.compose``.

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


def execute(runs: Sequence[PlannedRun], *, output: Path) -> dict[str, Any]:
    """Run what is not finished, go on with what is interrupted, and collect all into ``study.json``."""
    if (output / "config.yaml").exists():
        raise UsageError(f"--output {output} is the directory of a single run; give another folder.")
    results = []
    for number, planned in enumerate(runs, start=1):
        logger.info(
            "run %d of %d: %s, seeds %s, in %s",
            number,
            len(runs),
            planned.label,
            planned.seeds,
            planned.output,
        )
        results.append(run(planned.config, output=planned.output, resume=planned.output.exists()))
    collected = collect(runs, results)
    if is_main_process():
        write_json(output / "study.json", collected)
    return collected


def collect(runs: Iterable[PlannedRun], results: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
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
                **{name: _spread([headline(result)[name] for _, result in members]) for name in METRICS},
                "seconds": _spread([seconds(result) for _, result in members]),
                "num_images": _spread([result["num_images"] for _, result in members]),
                "seeds": [planned.seeds for planned, _ in members],
                "directories": [str(planned.output) for planned, _ in members],
            }
        )
    return {"rows": rows, "view_batch_effects": _paired_effects(finished)}


def headline(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the top-1 numbers over all seen classes of a result."""
    numbers: dict[str, Any] = result["metrics"]["class_incremental"]["top1"]
    return numbers


def seconds(result: Mapping[str, Any]) -> float:
    """Return the time that the tasks of a run took, over all its sittings."""
    return float(sum(sum(task.values()) for task in result["timings"]["tasks"]))


def _paired_effects(finished: Sequence[tuple[PlannedRun, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    def family(planned: PlannedRun) -> str:
        # With a single view the objective's settings have no effect.
        return json.dumps(planned.config.model_dump(mode="json", exclude={"view_batch", "objective"}))

    baselines = {
        family(planned): result for planned, result in finished if planned.config.view_batch.num_views == 1
    }
    pairs: dict[str, list[dict[str, float]]] = {}
    for planned, result in finished:
        baseline = baselines.get(family(planned))
        if planned.config.view_batch.num_views > 1 and baseline and result["num_steps"]:
            with_views, without = headline(result), headline(baseline)
            known = [name for name in METRICS if None not in (with_views[name], without[name])]
            pairs.setdefault(planned.label, []).append(
                {name: with_views[name] - without[name] for name in known}
            )
    return [
        {
            "label": label,
            "num_pairs": len(members),
            **{name: _spread([member.get(name) for member in members]) for name in METRICS},
        }
        for label, members in pairs.items()
    ]


def _spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return mean and sample standard deviation of the numbers that exist."""
    known = [value for value in values if value is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else None,
    }
