"""How classes or domains are divided into tasks: pure functions of labels, domains and configuration.

Class indices are assigned in order of appearance, so that the classes seen after any task are 0..seen-1. The
order never depends on the training seed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from pydantic import PositiveInt, model_validator

from vbm_ptm.data.names import alike, first_written, form
from vbm_ptm.data.scenario import Integers, Names, Scenario, Task
from vbm_ptm.errors import UsageError, nearest_name
from vbm_ptm.settings import AbsolutePath, Settings

logger = logging.getLogger(__name__)


class ScenarioConfig(Settings):
    """Settings of the scenario.

    Attributes:
        kind: "joint" trains once on everything and is evaluated on the tasks of the scenario that it bounds.
        num_tasks: Number of tasks, as equal in size as the class count allows, larger ones first.
        first_task_size: Classes of the first task; the rest is divided by ``increment`` or ``num_tasks``.
        increment: Classes of every (further) task; the last one may be smaller.
        task_sizes: Classes of each task.
        class_order: "seed", "natural" (as the data set numbers them) or all class names in order.
        class_order_seed: Seed of the class order only; the order is a NumPy legacy permutation as in SLCA and PILOT.
        domain_order: All domain names in order; default: alphabetical.
        bounds: The scenario that joint training bounds.
        extends: Directory of a finished run: this run has its tasks, and one more with the images of this data set.
        num_earlier_tasks: Tasks of the run that is extended.
        allow_known_classes: The new task may hold classes (or a domain) that were learned before.
    """

    kind: Literal["class_incremental", "domain_incremental", "joint"] = "class_incremental"
    num_tasks: PositiveInt | None = None
    first_task_size: PositiveInt | None = None
    increment: PositiveInt | None = None
    task_sizes: tuple[PositiveInt, ...] | None = None
    class_order: Literal["seed", "natural"] | tuple[str, ...] = "seed"
    class_order_seed: int = 1993
    domain_order: tuple[str, ...] | None = None
    bounds: Literal["class_incremental", "domain_incremental"] = "class_incremental"
    extends: AbsolutePath | None = None
    num_earlier_tasks: PositiveInt | None = None
    allow_known_classes: bool = False

    @model_validator(mode="after")
    def _check_bounds(self) -> ScenarioConfig:
        if self.kind != "joint" and self.bounds != "class_incremental":
            raise ValueError(
                f"scenario.bounds={self.bounds} says what joint training bounds, but scenario.kind is {self.kind}: set "
                "scenario.kind=joint, or leave scenario.bounds out"
            )
        return self


def build_scenario(
    config: ScenarioConfig, *, class_names: Sequence[str], labels: Integers, domains: Names | None = None
) -> Scenario:
    """Divide a training split into tasks.

    Args:
        config: The settings.
        class_names: Names by label id.
        labels: (N,) label ids of the training split.
        domains: (N,) domain names of the training split.
    """
    labels = np.asarray(labels)
    _check_labels(class_names, labels)
    order = _class_order(config, class_names)
    kind = config.bounds if config.kind == "joint" else config.kind
    if kind == "domain_incremental":
        order, tasks = _domain_tasks(config, order, labels, domains)
    else:
        if config.domain_order is not None:
            raise UsageError(
                "scenario.domain_order only orders the tasks of the domain-incremental scenario: set it to null "
                "(or scenario.kind=domain_incremental)"
            )
        tasks = _class_tasks(_task_sizes(config, len(order)))
    class_index_of_label = np.empty(len(order), dtype=np.int64)
    class_index_of_label[order] = np.arange(len(order))
    class_index_of_label.flags.writeable = False
    tasks = tuple(replace(task, num_planned_classes=len(order)) for task in tasks)
    everything = tuple(range(len(order)))
    whole = Task(0, everything, everything, len(order), num_planned_classes=len(order))
    return Scenario(
        kind=config.kind,
        class_names=tuple(class_names[label] for label in order),
        tasks=(whole,) if config.kind == "joint" else tasks,
        evaluation_tasks=tasks,
        class_index_of_label=class_index_of_label,
    )


def extend_scenario(
    config: ScenarioConfig,
    *,
    earlier: Sequence[Task],
    known_names: Sequence[str],
    class_names: Sequence[str],
    labels: Integers,
    domain: str,
) -> Scenario:
    """Add one task to those of a finished run.

    Args:
        config: The settings; ``kind`` is that of the run.
        earlier: Tasks of the run.
        known_names: Its class names by class index.
        class_names: Names of the new images' classes by label id.
        labels: (N,) label ids of the new training split.
        domain: Name of the new images' domain in a domain-incremental run.

    Raises:
        UsageError: A class or the domain was learned before, and ``allow_known_classes`` is not set.
    """
    _check_labels(class_names, np.asarray(labels))
    is_by_domain = config.kind == "domain_incremental"
    known = first_written(known_names)
    again = [name for name in class_names if form(name) in known]
    if again and not is_by_domain and not config.allow_known_classes:
        raise UsageError(
            f"{len(again)} of {len(class_names)} classes were learned before: {_listed(again)}. More images of "
            "them need scenario.allow_known_classes; new classes need other names.",
            advice="more_data",
        )
    if (
        is_by_domain
        and form(domain) in {form(task.domain or "") for task in earlier}
        and not config.allow_known_classes
    ):
        raise UsageError(
            f"domain '{domain}' was learned before. More images of it need scenario.allow_known_classes; a new "
            "domain needs another dataset.name.",
            advice="more_data",
        )
    names = (*known_names, *(name for name in class_names if form(name) not in known))
    if same := alike(names):
        logger.warning("classes whose names differ only in case or white space: %s", "; ".join(same))
    index_of = {form(name): index for index, name in enumerate(names)}
    indices = np.array([index_of[form(name)] for name in class_names], dtype=np.int64)
    task = Task(
        index=len(earlier),
        classes=tuple(sorted(indices.tolist())),
        new_classes=tuple(range(len(known_names), len(names))),
        num_seen_classes=len(names),
        domain=domain if is_by_domain else None,
    )
    tasks = (*earlier, task)
    return Scenario(config.kind, names, tasks, tasks, indices)


def _check_labels(class_names: Sequence[str], labels: Integers) -> None:
    if not len(labels):
        raise UsageError("the training split has no images")
    if labels.min() < 0 or labels.max() >= len(class_names):
        raise UsageError(
            f"labels run from {labels.min()} to {labels.max()}, but there are {len(class_names)} classes and "
            f"labels must lie in 0..{len(class_names) - 1}: check the label column and the number of classes"
        )
    counts = np.bincount(labels, minlength=len(class_names))
    empty = [name for name, count in zip(class_names, counts, strict=True) if not count]
    if empty:
        raise UsageError(
            f"{len(empty)} of {len(class_names)} classes have no training image: {_listed(empty)}; "
            "give each at least one or take them out of the data set"
        )


def _class_order(config: ScenarioConfig, class_names: Sequence[str]) -> Integers:
    """Return the label ids in the order of the classes."""
    num_classes = len(class_names)
    if config.class_order == "natural":
        return np.arange(num_classes)
    if config.class_order == "seed":
        try:
            generator = np.random.RandomState(config.class_order_seed)
        except ValueError:
            raise UsageError(
                f"scenario.class_order_seed is {config.class_order_seed}, but must lie in 0..{2**32 - 1}"
            ) from None
        return generator.permutation(num_classes)
    if len(set(class_names)) < num_classes:
        twice = [name for name, count in Counter(class_names).items() if count > 1]
        raise UsageError(
            f"scenario.class_order lists names, but several classes share one: {_listed(twice)}; "
            "use 'seed' or 'natural', or rename the classes"
        )
    _check_order("scenario.class_order", config.class_order, class_names, kind="class")
    label_of_name = {form(name): label for label, name in enumerate(class_names)}
    return np.array([label_of_name[form(name)] for name in config.class_order])


def _check_order(key: str, given: Sequence[str], allowed: Sequence[str], *, kind: str) -> None:
    """Refuse a list that does not contain every allowed name exactly once."""
    known, named = first_written(allowed), first_written(given)
    unknown = [name for key, name in named.items() if key not in known]
    missing = [name for key, name in known.items() if key not in named]
    twice = [named[key] for key, count in Counter(map(form, given)).items() if count > 1]
    problems = []
    if unknown:
        nearest = {name: nearest_name(name, allowed) for name in unknown}
        hints = [f"{name} (nearest: {nearest[name]})" if nearest[name] else name for name in unknown]
        problems.append(f"unknown: {_listed(hints)}")
    if missing:
        problems.append(f"missing: {_listed(missing)}")
    if twice:
        problems.append(f"more than once: {_listed(twice)}")
    if problems:
        raise UsageError(
            f"{key} has {len(given)} names for a data set with {len(allowed)} and must name every {kind} "
            f"exactly once; {'; '.join(problems)}"
        )


def _task_sizes(config: ScenarioConfig, num_classes: int) -> tuple[int, ...]:
    """Return the number of classes of each task."""
    if config.task_sizes is not None:
        sizes = _listed_sizes(config, num_classes)
    elif config.increment is not None:
        sizes = _sizes_by_increment(config, config.increment, num_classes)
    elif config.num_tasks is not None:
        sizes = _sizes_by_number(config, config.num_tasks, num_classes)
    else:
        why = (
            "joint training is measured on the tasks of the scenario that it bounds, and "
            if config.kind == "joint"
            else ""
        )
        raise UsageError(
            f"{why}nothing says how {num_classes} classes are divided into tasks: set scenario.num_tasks, "
            "scenario.increment (with or without scenario.first_task_size) or scenario.task_sizes; or, for a task per "
            "domain, scenario.kind=domain_incremental"
        )
    if config.num_tasks not in (None, len(sizes)):
        raise UsageError(
            f"scenario.num_tasks is {config.num_tasks}, but the other settings make {len(sizes)} tasks "
            f"({_listed(sizes)} classes): set scenario.num_tasks to null or {len(sizes)}"
        )
    return sizes


def _listed_sizes(config: ScenarioConfig, num_classes: int) -> tuple[int, ...]:
    sizes = config.task_sizes or ()
    if config.increment is not None or config.first_task_size is not None:
        raise UsageError(
            "scenario.task_sizes already gives every size: do not set scenario.first_task_size "
            f"({config.first_task_size}) or scenario.increment ({config.increment}) with it"
        )
    if sum(sizes) != num_classes:
        raise UsageError(
            f"scenario.task_sizes {_listed(sizes)} sum to {sum(sizes)}, but the data set has "
            f"{num_classes} classes"
        )
    return sizes


def _sizes_by_increment(config: ScenarioConfig, increment: int, num_classes: int) -> tuple[int, ...]:
    first = _first_size(config, increment, num_classes)
    num_full, remainder = divmod(num_classes - first, increment)
    sizes = (first, *[increment] * num_full, *([remainder] if remainder else []))
    if remainder or first < (config.first_task_size or increment):
        logger.warning(
            "increment %d does not divide the %d classes after the first task: "
            "the last task has %d classes (sizes %s)",
            increment,
            num_classes - first,
            sizes[-1],
            _listed(sizes),
        )
    return sizes


def _sizes_by_number(config: ScenarioConfig, num_tasks: int, num_classes: int) -> tuple[int, ...]:
    first = 0 if config.first_task_size is None else _first_size(config, 0, num_classes)
    rest, num_rest = num_classes - first, num_tasks - bool(first)
    if num_rest > rest or (rest and not num_rest):
        after = f" after a first task of {first}" if first else ""
        raise UsageError(
            f"scenario.num_tasks is {num_tasks}, but {rest} classes{after} cannot make {num_rest} tasks "
            "of at least one class each; choose another number of tasks"
        )
    smaller, num_larger = divmod(rest, num_rest) if num_rest else (0, 0)
    sizes = [smaller + 1] * num_larger + [smaller] * (num_rest - num_larger)
    if num_larger:
        logger.warning(
            "%d classes do not divide into %d equal tasks: sizes %s", rest, num_rest, _listed(sizes)
        )
    return (first, *sizes) if first else tuple(sizes)


def _first_size(config: ScenarioConfig, default: int, num_classes: int) -> int:
    if config.first_task_size is None:
        return min(default, num_classes)
    if config.first_task_size > num_classes:
        raise UsageError(
            f"scenario.first_task_size is {config.first_task_size}, "
            f"but the data set has {num_classes} classes"
        )
    return config.first_task_size


def _class_tasks(sizes: Iterable[int]) -> tuple[Task, ...]:
    tasks: list[Task] = []
    seen = 0
    for index, size in enumerate(sizes):
        classes = tuple(range(seen, seen + size))
        seen += size
        tasks.append(Task(index, classes, classes, seen))
    return tuple(tasks)


def _domain_tasks(
    config: ScenarioConfig, order: Integers, labels: Integers, domains: Names | None
) -> tuple[Integers, tuple[Task, ...]]:
    """Return the label ids by first domain, then class order, and one task per domain."""
    if domains is None:
        raise UsageError(
            "the domain-incremental scenario needs a domain for every image: set dataset.domain_column "
            "(or scenario.kind=class_incremental)"
        )
    if config.task_sizes or config.increment or config.first_task_size:
        raise UsageError(
            "scenario.task_sizes, first_task_size and increment divide classes; in the domain-incremental "
            "scenario every domain is a task: set them to null"
        )
    names = sorted({str(domain) for domain in domains})
    if config.num_tasks not in (None, len(names)):
        raise UsageError(
            f"scenario.num_tasks is {config.num_tasks}, but the data set has {len(names)} domains "
            f"({_listed(names)}) and each is a task: set it to null or {len(names)}"
        )
    if config.domain_order is not None:
        _check_order("scenario.domain_order", config.domain_order, names, kind="domain")
        spellings = first_written(names)
        names = [spellings[form(name)] for name in config.domain_order]
    seen: dict[int, int] = {}  # label id -> class index
    tasks: list[Task] = []
    for index, name in enumerate(names):
        occurring = set(labels[domains == name].tolist())
        present = [int(label) for label in order if label in occurring]
        num_before = len(seen)
        for label in present:
            seen.setdefault(label, len(seen))
        classes = tuple(sorted(seen[label] for label in present))
        tasks.append(Task(index, classes, tuple(range(num_before, len(seen))), len(seen), name))
    return np.array(list(seen)), tuple(tasks)


def _listed(names: Iterable[object], *, limit: int = 20) -> str:
    texts = [str(name) for name in names]
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + more
