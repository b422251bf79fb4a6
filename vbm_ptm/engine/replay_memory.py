"""What a learner stores for the images that enter its buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from vbm_ptm.data.view_batch import chunk
from vbm_ptm.engine.replay_planner import StepPlan
from vbm_ptm.learners.base import Learner


def remember(
    learner: Learner,
    plan: StepPlan,
    weak_logits: Sequence[Tensor],
    num_groups: int,
    accelerator: Accelerator,
) -> None:
    """Give the learner the weak views' logits of the images that entered the buffer; all ranks get all of them.

    Args:
        learner: Remembers logits, if there are any here.
        plan: Of the step that was taken.
        weak_logits: (G, K) of this rank's groups, in one part or several; none if the learner remembers nothing.
        num_groups: Groups of the step over all ranks.
        accelerator: Knows the ranks.
    """
    if not (plan.admissions and weak_logits):
        return
    logits = torch.cat(list(weak_logits))
    num_ranks = accelerator.num_processes
    first, last = chunk(num_groups, accelerator.process_index, num_ranks)
    admitted = logits.new_zeros(len(plan.admissions), logits.shape[1])
    for number, (position, _) in enumerate(plan.admissions):
        if first <= position < last:
            admitted[number] = logits[position - first]
    if num_ranks > 1:
        admitted = accelerator.reduce(admitted, reduction="sum")
    slots = torch.tensor([slot for _, slot in plan.admissions]).to(logits.device, non_blocking=True)
    learner.remember(slots, admitted)
