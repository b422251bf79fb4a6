"""What a user does with a benchmark, from the check to a learner that is extended, through the command line."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import miniatures
import pytest

from vbm_ptm.cli import main
from vbm_ptm.config.reference import preset_values
from vbm_ptm.learners.registry import learner_class, list_learners

BENCHMARKS = ("cifar100", "imagenet_r", "domainnet_domains")
# Of classes the others have four tasks: ten do the same more often.
WITH_ALL_TASKS = ("slca", "coda_prompt")

# What of a paper's settings does not fit a backbone of width 64 and a few seconds.
SMALL = {
    "slca": ["learner.alignment_epochs=1", "learner.alignment_samples_per_class=4"],
    "coda_prompt": ["learner.pool_size=20"],
    "hide_prompt": [
        *("learner.alignment_epochs=1", "learner.num_centroids=2"),
        *("learner.alignment_samples_per_class=4", "learner.identity_alignment_samples=4"),
    ],
    "ran_pac": ["learner.projection_width=30"],
    "slca_pp": ["learner.alignment_epochs=1", "learner.alignment_samples_per_class=4"],
    # The preset's initialization is one of ResNet-18's.
    "expandable": ["backbone.initialization=torch", "learner.balanced_epochs=1"],
    "tcil": ["backbone.initialization=torch"],
    "bic": ["backbone.initialization=torch"],
    "ucir": ["backbone.initialization=torch"],
    "wa": ["backbone.initialization=torch"],
}


class Terminal:
    """Runs commands that must succeed and hands back what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: str | Path) -> str:
        self.capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        printed = self.capsys.readouterr()
        assert code == 0, printed.err
        return printed.out

    def json(self, *arguments: str | Path) -> Any:
        return json.loads(self(*arguments, "--json"))


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


class Miniature(NamedTuple):
    arguments: list[str]
    num_tasks: int
    num_classes: int


def miniature(benchmark: str, root: Path) -> Miniature:
    """Return a benchmark in small with its official class names; fewer of them where there are hundreds."""
    if benchmark == "cifar100":
        return Miniature(miniatures.cifar100_miniature(root, num_train=2), 10, 100)
    if benchmark == "imagenet_r":
        return Miniature(miniatures.imagenet_r_miniature(root, num_classes=60), 10, 60)
    return Miniature(miniatures.domainnet_miniature(root, num_classes=20, dataset="domainnet_domains"), 6, 20)


def walks() -> list[tuple[str, str]]:
    """Return two learners with every benchmark, and every other one with one that it takes, in turn."""
    chosen = list(itertools.product(BENCHMARKS, WITH_ALL_TASKS))
    for number, name in enumerate(sorted(set(list_learners()) - set(WITH_ALL_TASKS))):
        taken = BENCHMARKS if learner_class(name).takes_domains else BENCHMARKS[:2]
        chosen.append((taken[number % len(taken)], name))
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize(("benchmark", "learner"), walks())
def test_benchmark__from_check_to_extension(
    benchmark: str, learner: str, terminal: Terminal, tiny_weights: Path, tmp_path: Path
) -> None:
    """Check, train, evaluate, predict, export, load, extend; every step takes what the one before left."""
    small = miniature(benchmark, tmp_path)
    is_whole = learner in WITH_ALL_TASKS or benchmark == "domainnet_domains"
    num_tasks = small.num_tasks if is_whole else 4
    # One step a task: the weights of the backbone are random, so that nothing can be learned anyway.
    settings = [
        *(
            f"backbone.checkpoint={tiny_weights}",
            "backbone.name=test_vit.r160_in1k",
            "backbone.image_size=32",
        ),
        *("trainer.max_steps_per_task=1", "checkpoint.keep=all", *SMALL.get(learner, [])),
        *([] if is_whole else [f"scenario.num_tasks={num_tasks}"]),
    ]
    preset = "paper" if "paper" in preset_values(learner) else "official"  # the paper has no such row
    chosen = [
        *(*small.arguments, "--learner", learner, "--preset", preset),
        *(part for setting in settings for part in ("--set", setting)),
    ]
    found = terminal.json("check", *chosen)
    assert found["facts"]["classes"] == small.num_classes

    run = tmp_path / "run"
    terminal("train", *chosen, "--output", run)
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "finished"
    assert len(result["tasks"]) == num_tasks
    assert terminal.json("evaluate", run)["equals_training"]

    new = miniatures.write_toy_folder(tmp_path / "new", ["nothing like it", "nor this"], num_train=3)
    images = new / "test"
    predicted = terminal.json("predict", run, images)
    assert len(predicted) == 8
    assert {name["name"] for image in predicted for name in image["classes"]} <= set(result["class_names"])
    first_task = terminal.json("predict", run, images, "--task", "1")

    terminal("export", run, "--output", tmp_path / "exported")
    assert terminal.json("predict", tmp_path / "exported", images) == predicted
    if "buffer" in result["task_records"][-1]["learner_report"]:  # its images are not part of an extension
        assert main(["extend", str(run), "--dataset", str(new), "--output", str(tmp_path / "extended")]) == 2
        return
    terminal("extend", run, "--dataset", new, "--output", tmp_path / "extended")
    shutil.rmtree(run)  # neither needs the run any more
    assert terminal.json("predict", tmp_path / "exported", images) == predicted
    extended = json.loads((tmp_path / "extended/result.json").read_text())
    assert extended["class_names"] == [*result["class_names"], "nor this", "nothing like it"]
    assert extended["accuracy_counts"]["rows"][:-1] == result["accuracy_counts"]["rows"]
    assert extended["accuracy_counts"]["rows"][-1][-1]["total"] == 8
    assert terminal.json("evaluate", tmp_path / "extended")["equals_training"]
    assert terminal.json("predict", tmp_path / "extended", images, "--task", "1") == first_task
    now = terminal.json("evaluate", tmp_path / "extended", "--dataset", new)["metrics"]
    assert now["class_incremental"]["top1"]["last_accuracy"] is not None
