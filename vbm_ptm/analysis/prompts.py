"""Which prompts of a pool each task chooses, for learners that count them (L2P: ``prompt_selections``).

L2P (Wang et al., CVPR 2022), figure "histograms of prompt selections". The entropy is that of the shares, divided by
the logarithm of the pool size: 1 if all prompts are chosen equally often, 0 if only one is. T tasks, P prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vbm_ptm.analysis.drawing import Lines
from vbm_ptm.analysis.retention import heat_maps
from vbm_ptm.analysis.spread import Floats, spreads
from vbm_ptm.storage.task_record import TaskFacts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Records = Sequence[TaskFacts]

SELECTIONS = "prompt_selections"


def prompt_selections(records: Records) -> Floats | None:
    """Return (T,P) the share of each prompt in a task's choices, in percent; None for learners that choose none."""
    counts = [each.learner_report.get(SELECTIONS) for each in records]
    if not counts or any(each is None for each in counts):
        return None
    table = np.array(counts, dtype=float)
    totals = table.sum(axis=1, keepdims=True)
    shares: Floats = 100 * np.divide(table, totals, out=np.full_like(table, np.nan), where=totals > 0)
    return shares


def selection_entropy(records: Records) -> Floats | None:
    """Return (T,) the entropy of each task's choices, between 0 and 1; None for learners that choose none."""
    shares = prompt_selections(records)
    if shares is None:
        return None
    shares = shares / 100
    terms = np.where(shares > 0, -shares * np.log(np.where(shares > 0, shares, 1)), 0)
    entropy: Floats = terms.sum(axis=1) / np.log(max(shares.shape[1], 2))
    return entropy


def mean_selections(runs: Sequence[Records]) -> list[list[float | None]]:
    """Return the mean over runs of ``prompt_selections``; empty for learners that choose none."""
    tables = [table for table in map(prompt_selections, runs) if table is not None]
    num_tasks = max(map(len, tables), default=0)
    return [
        [each.mean for each in spreads([table[task].tolist() for table in tables if task < len(table)])]
        for task in range(num_tasks)
    ]


def selections_figure(lines: Lines[Records]) -> Figure:
    """Draw which prompts each task chooses as a heat map for each line, the mean over its runs."""
    tables = {label: mean_selections(runs) for label, runs in lines.items()}
    known = {label: rows for label, rows in tables.items() if rows}
    largest = max((value or 0.0 for rows in known.values() for row in rows for value in row), default=1.0)
    return heat_maps(known, across="prompt", down="task", largest=largest or 1.0)
