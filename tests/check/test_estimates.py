"""What a run will take, against runs that were done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.check.estimates import estimate, even_outline, read_outline
from vbm_ptm.config.run_config import RunConfig, compose
from vbm_ptm.data.reading.datasets import DatasetSpec
from vbm_ptm.data.single_views import SingleViewDataset
from vbm_ptm.experiment import run
from vbm_ptm.learners import list_learners
from vbm_ptm.learners.config import TRAINING_PASSES
from vbm_ptm.learners.registry import learner_class

Tree = dict[str, Any]


def config_of(tree: Tree) -> RunConfig:
    return compose(tree=tree).validate()


PASSED: dict[str, Tree] = {
    "linear_probe": {},
    "l2p": {},
    "coda_prompt": {"pool_size": 30},
    "dualprompt": {},
    "s_prompt_pp": {},
    "s_iprompt": {},
    "hide_prompt": {"alignment_epochs": 1, "num_centroids": 2},
    "ran_pac": {"projection_width": 50, "first_session": {"kind": "adapter"}},
    "ease": {},
    "tuna": {"alignment_epochs": 1},
    "slca_pp": {"alignment_epochs": 1},
    "inf_lora": {},
    "lwf": {},
}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The forward passes of a ViT as they are done, image by image, a backward pass counted as two."""
    done: list[int] = []
    encode = PromptableViT.encode

    def noted(self: PromptableViT, images: Tensor, *arguments: Any, **more: Any) -> Tensor:
        tokens = encode(self, images, *arguments, **more)
        done.append(len(images) * (TRAINING_PASSES if tokens.requires_grad else 1))
        return tokens

    monkeypatch.setattr(PromptableViT, "encode", noted)
    return done


@pytest.mark.parametrize(
    ("learner", "kind"),
    [("finetune", "joint"), ("nearest_mean", "class_incremental"), ("aper", "class_incremental")],
)
def test_estimate__is_what_a_run_takes(
    learner: str, kind: str, toy_tree: Callable[..., Tree], tmp_path: Path, passes: list[int]
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
    assert foretold.num_viewed == (0 if learner == "finetune" else 72) + tested
    assert foretold.num_passes == sum(passes)
    assert foretold.hours(2.0) == foretold.num_passes / 3 / 2 / 3600


@pytest.mark.slow
@pytest.mark.parametrize(
    ("learner", "kind"), [*((name, "class_incremental") for name in PASSED), ("tuna", "joint")]
)
def test_estimate__counts_every_pass_of_an_image(
    learner: str, kind: str, toy_tree: Callable[..., Tree], tmp_path: Path, passes: list[int]
) -> None:
    """Queries, adapters and experts; in half precision, where an image's own expert is asked in any case."""
    tree = toy_tree(learner, **PASSED[learner])
    tree["scenario"] |= {"kind": kind}
    tree["trainer"] = {"max_steps_per_task": 1, "mixed_precision": "bf16"}
    config = config_of(tree)
    run(config, output=tmp_path / "run")
    assert estimate(config, read_outline(config.dataset)).num_passes == sum(passes)


VIEWED = {
    "slca": {"drift": "linear", "alignment_epochs": 1},
    "hide_prompt": {"alignment_epochs": 1, "num_centroids": 2},
    "inf_lora": {},
    "icarl": {"capacity": 24, "mirrored_means": True},
    "bic": {"capacity": 30, "held_out": 0.4},
    "expandable": {"capacity": 24, "balanced_epochs": 2, "reset_epoch": 0},
    "wa": {"capacity": 24},
    "ucir": {"capacity": 24},
    "fdr": {"capacity": 16, "draw_size": 4},
    "er": {"capacity": 16, "draw_size": 4},
    "der_pp": {"capacity": 16, "draw_size": 6},
    "s_iprompt": {"num_centres": 2},
}


@pytest.mark.parametrize(
    "learner",
    [name if name == "fdr" else pytest.param(name, marks=pytest.mark.slow) for name in VIEWED],
)
def test_estimate__counts_every_training_image_that_is_looked_at(
    learner: str, toy_tree: Callable[..., Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features, stages and draws, against what the data sets were asked for."""
    viewed: list[int] = []
    item = SingleViewDataset.__getitem__

    def noted(self: SingleViewDataset, row: int) -> Any:
        if self.split.name == "train":
            viewed.append(row)
        return item(self, row)

    monkeypatch.setattr(SingleViewDataset, "__getitem__", noted)
    tree = toy_tree(learner, **VIEWED[learner])
    tree["data"] = {"num_workers": 0}
    config = config_of(tree)
    result = run(config, output=tmp_path / "run")
    foretold = estimate(config, read_outline(config.dataset))
    tested = sum(cell["total"] for row in result["accuracy_counts"]["rows"] for cell in row)
    assert foretold.num_viewed - tested == len(viewed)
    buffers = [record["learner_report"].get("buffer", {}) for record in result["task_records"]]
    assert foretold.num_replayed == sum(buffer.get("replayed_images", 0) for buffer in buffers)
    assert (foretold.num_steps, foretold.num_images) == (result["num_steps"], result["num_images"])


@pytest.mark.parametrize(("learner", "passes"), [("lwf", [(3, 1), (4, 1)]), ("expandable", [(3, 1), (4, 2)])])
def test_estimate__counts_teachers_and_earlier_backbones(
    learner: str, passes: list[tuple[int, int]], toy_tree: Callable[..., Tree]
) -> None:
    config = config_of(toy_tree(learner))
    assert [config.learner.passes(index)[:2] for index in (0, 1)] == passes
    config = config_of(
        toy_tree(learner, **({"capacity": 0, "balanced_epochs": 0} if learner == "expandable" else {}))
    )
    foretold = estimate(config, even_outline(num_classes=12, num_train=72, num_test=48))
    own = 0 if learner == "lwf" else 24  # images of a task, 16 tests of each
    by_hand = sum(
        48 * each.training + (own + 16 * (index + 1)) * each.viewing
        for index, each in enumerate(map(config.learner.passes, range(3)))
    )
    assert foretold.num_passes == by_hand
    assert foretold.hours(1.0) == by_hand / 3 / 3600


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


@pytest.mark.parametrize(
    "settings",
    [
        {"train_images_per_class": 4},
        {"validation_fraction": 0.3},
        {"test_split": None},
        {"train_images_per_class": 1, "validation_fraction": 0.5, "test_split": None},
    ],
)
def test_estimate__of_published_counts_follows_the_settings_of_the_data_set(
    settings: dict[str, Any], toy_tree: Callable[..., Tree]
) -> None:
    tree = toy_tree("finetune")
    tree["dataset"] |= settings
    config = compose(tree=tree).validate()
    published = even_outline(num_classes=12, num_train=72, num_test=48, spec=config.dataset)
    assert estimate(config, published) == estimate(config, read_outline(config.dataset))


def test_even_outline__leaves_out_other_domains() -> None:
    spec = DatasetSpec(name="toy", domains=("b",), train_images_per_class=1)
    domains = {"a": (6, 4), "b": (4, 2)}
    some = even_outline(num_classes=2, num_train=10, num_test=6, domains=domains, spec=spec)
    assert (some.train.labels.tolist(), some.test.labels.tolist()) == ([0, 1], [0, 1])
    assert some.train.domains is not None
    assert some.test.domains is not None
    assert {*some.train.domains, *some.test.domains} == {"b"}
