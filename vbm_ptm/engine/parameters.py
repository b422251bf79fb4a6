"""How many parameters a learner trains, and how many are frozen."""

from __future__ import annotations

from collections import Counter

from vbm_ptm.learners.base import Learner


def parameter_counts(learner: Learner) -> dict[str, int]:
    """Return the trainable parameters by group, and the frozen ones."""
    counts = {
        group.name: sum(parameter.numel() for parameter in group.parameters)
        for group in learner.parameter_groups()
    }
    frozen = sum(parameter.numel() for parameter in learner.parameters() if not parameter.requires_grad)
    return counts | {"frozen": frozen}


def describe_parameters(learner: Learner) -> str:
    """Say what the current task trains, group by group, and what stays frozen, part by part."""
    trained = {name: count for name, count in parameter_counts(learner).items() if name != "frozen"}
    frozen: Counter[str] = Counter()
    for name, parameter in learner.named_parameters():
        if not parameter.requires_grad:
            frozen[name.partition(".")[0]] += parameter.numel()
    return "parameters: " + "; ".join(
        f"{name} {sum(counts.values()):,}"
        + (f" ({', '.join(f'{part} {count:,}' for part, count in counts.items())})" if counts else "")
        for name, counts in (("trained", trained), ("frozen", frozen))
    )
