"""The sentence that a page begins with."""

from __future__ import annotations

import pytest

from vbm_ptm.metrics import AccuracyCell, AccuracyMatrix
from vbm_ptm.report.collect import MeasuredRun, collect
from vbm_ptm.report.whole_page import _finding


def a_run(label: str, seed: int, num_views: int, correct: int) -> MeasuredRun:
    """One task of 100 test images."""
    return MeasuredRun(
        label=f"{label}-V{num_views}",
        seeds=(seed, seed),
        directory="",
        family=f"{label} {seed}",
        num_views=num_views,
        is_baseline=num_views == 1,
        matrix=AccuracyMatrix([[AccuracyCell(100, correct, 100)]]),
        num_steps=1,
        num_images=100,
        seconds=1.0,
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        # Student's t of (2, 3, 4): 3 ± 4.303 / sqrt(3).
        (
            {"a": (2, 3, 4), "b": (-9, 9, 1)},
            "raises the average accuracy of a-V4 by 3.00 points (95 % interval +0.52 to",
        ),
        ({"a": (-2, -3, -4)}, "lowers the average accuracy of a-V4 by 3.00 points"),
        (
            {"a": (-9, 9, 0)},
            "decided: every 95 % interval of paired differences of average and last accuracy contains 0",
        ),
        (
            {"a": (3, 3)},
            "changes the last accuracy of a-V4 by +3.00 points in each of 2 pairs of equal seeds",
        ),
        ({"a": (5,)}, "by +5.00 points in a single pair"),
    ],
)
def test_finding__is_what_pairs_decide(changes: dict[str, tuple[int, ...]], sentence: str) -> None:
    runs = [
        a_run(label, seed, views, 50 + (change if views > 1 else 0))
        for label, each in changes.items()
        for seed, change in enumerate(each)
        for views in (1, 4)
    ]
    found = _finding(collect(runs), [])
    assert sentence in found
    assert ("1 other line: not decided." in found) == (len(changes) > 1)


def test_finding__without_views_is_the_best_line() -> None:
    runs = [a_run("a", 1, 1, 40), a_run("b", 1, 1, 70)]
    assert _finding(collect(runs), []) == "Best of 2: b-V1 ends at 70.00 % over all classes."
