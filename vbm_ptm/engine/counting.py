"""When a prediction is correct: ties, classes that are ruled out, and experts of a task.

Shapes: N images, K seen classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.metrics import AccuracyCell


def count_of_task(
    learner: Learner, task: Task, scores: Tensor, labels: Tensor, expert_scores: Tensor | None
) -> AccuracyCell:
    """Count what is correct among images of one task.

    Args:
        learner: Whose scores they are.
        task: The task of the images.
        scores: (N, seen).
        labels: (N,) class indices.
        expert_scores: (N, classes of the task) of the task's expert, if it has one.
    """
    classes = task.classes if task.domain is None else None
    if learner.rules_out_classes:
        return count_correct(scores, labels, task_classes=classes, own_scores=expert_scores)
    return count_correct(scores, labels, task_classes=classes, expert_scores=expert_scores)


def count_correct(
    scores: Tensor,
    labels: Tensor,
    *,
    task_classes: Sequence[int] | None,
    own_scores: Tensor | None = None,
    expert_scores: Tensor | None = None,
) -> AccuracyCell:
    """Count the images of one task that the scores get right.

    A class is among the k best if its score is finite and fewer than k other classes score higher, or equal
    with a lower index. A class that the learner rules out (-inf) is never right.

    Args:
        scores: (N,K), one column per seen class.
        labels: (N,) class indices; a label beyond K is a class not seen yet, never right.
        task_classes: The task's own class indices, for the task-incremental counts; None where tasks share
            their classes.
        own_scores: (N, task classes) what the task-incremental counts are made of; None for those columns of
            ``scores``, the usual definition, which says nothing where a learner rules classes out.
        expert_scores: (N, task classes) of the task's own expert, for the counts of their own.
    """
    all_classes = torch.arange(scores.shape[1], device=scores.device)
    ranks = _ranks(scores, labels, all_classes)
    inside = expert = None
    if task_classes is not None:
        own = torch.tensor(list(task_classes), dtype=torch.int64, device=scores.device)
        inside = _ranks(scores[:, own] if own_scores is None else own_scores, labels, own)
        expert = None if expert_scores is None else _ranks(expert_scores, labels, own)
    return AccuracyCell(
        total=len(labels),
        class_incremental_top1=int((ranks < 1).sum()),
        class_incremental_top5=int((ranks < 5).sum()),
        task_incremental_top1=_num_below(1, inside),
        task_incremental_top5=_num_below(5, inside),
        task_expert_top1=_num_below(1, expert),
        task_expert_top5=_num_below(5, expert),
    )


def _num_below(limit: int, ranks: Tensor | None) -> int | None:
    return None if ranks is None else int((ranks < limit).sum())


def _ranks(scores: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
    """Return (N,) how many of the classes (K,) come before the label by their scores (N,K).

    A label without a finite score of its own comes after all others, and at least five.
    """
    is_label = labels[:, None] == classes
    ruled_out = ~(is_label & torch.isfinite(scores)).any(dim=1)
    own_score = torch.where(is_label, scores, -torch.inf).amax(dim=1, keepdim=True)
    before = (scores > own_score) | ((scores == own_score) & (classes < labels[:, None]))
    return torch.where(ruled_out, len(classes) + 5, before.sum(dim=1))


def probabilities(scores: Tensor) -> Tensor:
    """Return (N,K) what a softmax makes of scores (N,K): 0 for classes that are ruled out, also where all of them are.

    They are calibrated for no learner; where scores are similarities or distances they only keep their order.
    """
    return scores.double().softmax(1).nan_to_num(0.0).float()
