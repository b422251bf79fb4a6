"""The contract of a learner, checked where a breach would silently spoil a run.

Micro-batches are checked when the learner is built, parameters when a task begins, the output of its first training
forward before the weights move, and all tensors and scores when it ends. Every check gives the same result on all
ranks.
Shapes: N images of this rank, K columns of the logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from vbm_ptm.backbones import trains_batch_norm
from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError, some_names
from vbm_ptm.learners.base import Learner, LearnerOutput
from vbm_ptm.storage.log_reader import ABOUT_A_STEP

# Names that the objective and the log use for their own values.
RESERVED_TERMS = ABOUT_A_STEP.union(
    ("loss", "cross_entropy", "supervised", "consistency", "accuracy", "gradient_norm")
)


def check_micro_batches(learner: Learner, num_parts: int) -> None:
    """Refuse to cut a step of a learner that trains batch norms.

    Args:
        learner: Before its first task.
        num_parts: Micro-batches of a step.

    Raises:
        UsageError: There are several, and the learner trains a batch norm.
    """
    if num_parts > 1 and trains_batch_norm(learner):
        raise UsageError(
            f"optimization.gradient_accumulation_steps is {num_parts}, but learner '{learner.config.name}' trains "
            "batch norms, which normalise a step as a whole: take 1, or more ranks."
        )


def check_parameters(learner: Learner) -> None:
    """Refuse parameter groups that do not hold each trainable parameter once and nothing else.

    Args:
        learner: Has begun a task.

    Raises:
        UsageError: One message for each kind of fault, with the names of the parameters.
    """
    groups = learner.parameter_groups()
    name_of: dict[int, str] = {id(parameter): name for name, parameter in learner.named_parameters()}
    grouped = [(group.name, parameter) for group in groups for parameter in group.parameters]
    counts = Counter(id(parameter) for _, parameter in grouped)
    names = Counter(group.name for group in groups)
    parameter_faults = {
        "trainable but in no group, and so never updated; add it to a group, or freeze it by requires_grad_(False)": [
            name
            for name, parameter in learner.named_parameters()
            if parameter.requires_grad and id(parameter) not in counts
        ],
        "in more than one group, or in one twice": [
            name_of.get(key, "?") for key, count in counts.items() if count > 1
        ],
        "in a group but frozen, and so not updated; leave it out of the group": [
            name_of.get(id(parameter), "?") for _, parameter in grouped if not parameter.requires_grad
        ],
        "one parameter under several names, which no checkpoint can hold; register it once": [
            f"{name_of[id(parameter)]} = {name}"
            for name, parameter in learner.named_parameters(remove_duplicate=False)
            if parameter.requires_grad and name_of[id(parameter)] != name
        ],
    }
    group_faults = {
        "with parameters that are not the learner's own, which no checkpoint would hold": [
            group for group, parameter in grouped if id(parameter) not in name_of
        ],
        "more than one group of that name": [name for name, count in names.items() if count > 1],
    }
    problems = [
        f"learner '{learner.config.name}', task {learner.task.index + 1}, parameter_groups(): "
        f"{_named(kind, dict.fromkeys(found))}: {fault}."
        for kind, faults in (("parameter", parameter_faults), ("group", group_faults))
        for fault, found in faults.items()
        if found
    ]
    if problems:
        raise UsageError(*problems)


def _named(kind: str, names: Collection[str], *, limit: int = 10) -> str:
    """Return the names after what they are names of, in the singular for a single one."""
    return f"{kind if len(names) == 1 else f'{kind}s'} {some_names(names, limit=limit)}"


def check_terms(names: Iterable[str]) -> None:
    """Refuse auxiliary terms that would replace a value of the objective or of the log.

    Raises:
        UsageError: The message names the terms.
    """
    taken = sorted(RESERVED_TERMS.intersection(names))
    if taken:
        raise UsageError(
            f"LearnerOutput.auxiliary has the {_named('term', taken)}, a name of the objective or the log; choose "
            f"another one. Reserved: {', '.join(sorted(RESERVED_TERMS))}."
        )


def check_output(
    output: LearnerOutput,
    *,
    num_images: int,
    task: Task,
    class_names: Sequence[str],
    accelerator: Accelerator,
) -> None:
    """Refuse a training output that the objective cannot use; waits for the device, so only once a task.

    Args:
        output: Of the task's first forward, before any step.
        num_images: N.
        task: What the learner is trained on.
        class_names: By class index, for the message.
        accelerator: Knows the other ranks.

    Raises:
        UsageError: Shapes do not fit, or a class of the task has no column.
        FloatingPointError: A logit or an auxiliary term is not finite; the message names the columns and terms.
    """
    check_terms(output.auxiliary)
    logits, columns = output.logits, output.columns.tolist()
    if logits.shape != (num_images, len(columns)):
        raise UsageError(
            f"LearnerOutput.logits is {tuple(logits.shape)}, but must be ({num_images}, {len(columns)}): a row for "
            "each image, and a column for each class index in LearnerOutput.columns."
        )
    for name, value in output.auxiliary.items():
        if value.shape not in ((), (num_images,)):
            raise UsageError(
                f"LearnerOutput.auxiliary: '{name}' is {tuple(value.shape)}, but must be ({num_images},), a value for "
                "each image, or (), a single one."
            )
    twice = [class_names[index] for index, count in Counter(columns).items() if count > 1]
    if twice:
        raise UsageError(f"LearnerOutput.columns has more than one column for {some_names(twice)}.")
    missing = [class_names[index] for index in task.classes if index not in columns]
    if missing:
        raise UsageError(
            f"LearnerOutput.columns has no column for {some_names(missing)}, class index "
            f"{', '.join(str(index) for index in task.classes if index not in columns)}, of task {task.index + 1}: "
            f"images of these classes would have no loss. The columns are {columns}."
        )
    _check_values(output, columns=columns, task=task, class_names=class_names, accelerator=accelerator)


def _check_values(
    output: LearnerOutput,
    *,
    columns: Sequence[int],
    task: Task,
    class_names: Sequence[str],
    accelerator: Accelerator,
) -> None:
    names = list(output.auxiliary)
    broken = torch.cat(
        [
            (~output.logits.detach().isfinite()).sum(0),
            *[(~output.auxiliary[name].detach().isfinite()).sum()[None] for name in names],
        ]
    )
    if accelerator.num_processes > 1:
        broken = accelerator.reduce(broken, reduction="sum")
    counts = broken.tolist()
    in_columns = [class_names[column] for column, count in zip(columns, counts, strict=False) if count]
    in_terms = [name for name, count in zip(names, counts[len(columns) :], strict=True) if count]
    what = [f"the logits in the columns of {some_names(in_columns)}"] if in_columns else []
    what += [f"the auxiliary {_named('term', in_terms)}"] if in_terms else []
    if what:
        raise FloatingPointError(
            f"in the first forward of task {task.index + 1}, before any step, not finite: {' and '.join(what)}. Leave "
            "classes that must not compete out of the columns instead of setting them to -inf."
        )


def check_finite(tensors: Mapping[str, Tensor], *, when: str) -> None:
    """Refuse tensors with values that are not finite.

    Args:
        tensors: Parameters or buffers by name; integers are finite.
        when: Begins the message: "after training on task 2".

    Raises:
        FloatingPointError: The message names the tensors.
    """
    broken = [name for name, tensor in tensors.items() if not bool(tensor.detach().isfinite().all())]
    if broken:
        raise FloatingPointError(
            f"{when}, not finite ({len(broken)} of {len(tensors)}): {_named('tensor', broken, limit=5)}. Finished "
            "tasks are saved; lower optimization.learning_rate."
        )


def check_scores(scores: Tensor, *, num_images: int, num_classes: int, method: str = "predict") -> None:
    """Refuse predictions that are not a score for every class: those seen so far, or an expert's.

    Raises:
        UsageError: They have another shape than (N, classes).
    """
    if scores.shape != (num_images, num_classes):
        raise UsageError(
            f"Learner.{method} returned scores of shape {tuple(scores.shape)} for {num_images} images and "
            f"{num_classes} classes; it returns ({num_images}, {num_classes}), -inf for classes that it rules out."
        )


def broken_scores(scores: Tensor) -> Tensor:
    """Return which rows (N,) of the scores (N, K) hold NaN or +inf; -inf rules a class out and is legal."""
    return (scores.isnan() | scores.isposinf()).any(dim=1)
