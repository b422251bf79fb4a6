"""What a run will take, against runs that were done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vbm_ptm.check.estimates import estimate, even_outline, read_outline
from vbm_ptm.config.run_config import RunConfig, compose
from vbm_ptm.experiment import run
from vbm_ptm.learners import list_learners
from vbm_ptm.learners.registry import learner_class

Tree = dict[str, Any]


def config_of(tree: Tree) -> RunConfig:
    return compose(tree=tree).validate()


@pytest.mark.parametrize(
    ("learner", "kind"),
    [("finetune", "joint"), ("nearest_mean", "class_incremental"), ("aper", "class_incremental")],
)
def test_estimate__is_what_a_run_takes(
    learner: str, kind: str, toy_tree: Callable[..., Tree], tmp_path: Path
) -> None:
    tree = toy_tree(learner)
    tree["scenario"] |= {"kind": kind, "num_tasks": 5}
    tree["optimization"]["epochs"] = 3
    config = config_of(tree)
    result = run(config, output=tmp_path / "run")
    foretold = estimate(config, read_outline(config.dataset))
    assert foretold.num_tasks == len(result["task_records"])
    assert (foretold.num_steps, foretold.num_images) == (result["num_steps"], result["num_images"])
    tested = sum(cell["total"] for row in result["accuracy_counts"]["rows"] for cell in row)
    assert foretold.num_viewed == 72 + tested
    assert foretold.hours(2.0) == (foretold.num_images + foretold.num_viewed / 3) / 2 / 3600


def test_estimate__goes_by_assumed_counts_where_data_are_not_at_hand(toy_tree: Callable[..., Tree]) -> None:
    config = config_of(toy_tree())
    there = estimate(config, read_outline(config.dataset))
    assert estimate(config, even_outline(num_classes=12, num_train=72, num_test=48)) == there


def test_estimate__learners_say_truly_whether_they_are_trained() -> None:
    said = {name: learner_class(name).config_class(name=name).trained_tasks for name in list_learners()}
    assert {name: tasks for name, tasks in said.items() if tasks != "all"} == {
        "aper": "first",
        "nearest_mean": "none",
        "ran_pac": "none",
    }
