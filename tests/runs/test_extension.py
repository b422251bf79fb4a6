"""Finished runs that learn one more task, without the images of the tasks before."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from miniatures import write_toy_folder

from vbm_ptm.building import build
from vbm_ptm.check.preflight import survey
from vbm_ptm.cli import main
from vbm_ptm.config.run_config import compose
from vbm_ptm.engine.trainer import Trainer
from vbm_ptm.errors import TrainingInterrupted, UsageError
from vbm_ptm.experiment import run
from vbm_ptm.extending import extend
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.runs.export import export
from vbm_ptm.runs.extension import default_output, extension_config
from vbm_ptm.runs.resuming import earlier_state
from vbm_ptm.runs.stored_learner import evaluate, evaluate_on, predict

Tree = dict[str, Any]


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_folder(tmp_path_factory.mktemp("new") / "more", ["class_12", "class_13"])


@pytest.fixture
def small_tree(toy_tree: Callable[..., Tree], tmp_path: Path) -> Callable[..., Tree]:
    """As ``toy_tree``, but two tasks of two classes in a folder that may be removed."""

    def make(learner: str, **settings: Any) -> Tree:
        tree = toy_tree(learner, **settings)
        folder = tmp_path / "toy"
        if not folder.exists():
            write_toy_folder(folder, [f"class_{index:02d}" for index in range(4)])
        tree["dataset"]["path"] = str(folder)
        tree["scenario"] = {"num_tasks": 2}
        tree["trainer"] = {"max_steps_per_task": 2}
        tree["checkpoint"] = {"keep": "all"}
        return tree

    return make


def hashes(directory: Path) -> dict[str, str]:
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in directory.rglob("*")
        if file.is_file()
    }


@pytest.mark.slow
def test_extend__once_and_twice_without_what_came_before(
    small_tree: Callable[..., Tree], new_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    before = run(small_tree("slca"), output=first)
    untouched = hashes(first)
    image = tmp_path / "toy/test/class_02/0.png"
    predictions = [list(predict(first, [image], task=task)) for task in (0, 1)]
    config = extension_config(first, dataset=str(new_folder))
    assert default_output(first, config) == tmp_path / "first+more"
    with monkeypatch.context() as inside:
        inside.chdir(first / "checkpoints")
        assert default_output(Path(".."), config) == tmp_path / "first+more"
    result = run(config, output=second)
    assert hashes(first) == untouched
    again = compose(config_file=second / "config.yaml").validate()
    assert again.model_dump() == config.model_dump()
    facts = survey(compose(config_file=second / "config.yaml")).facts
    assert (facts["tasks"], facts["training images per task"]) == ("2 classes", "12")
    assert facts["steps"] == result["task_records"][2]["num_steps"]
    run(again, output=tmp_path / "again")
    file = "checkpoints/task_02/learner.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (second / file).read_bytes()

    assert result["class_names"] == [*before["class_names"], "class_12", "class_13"]
    assert result["tasks"] == [*before["tasks"], ["class_12", "class_13"]]
    rows = result["accuracy_counts"]["rows"]
    assert rows[:2] == before["accuracy_counts"]["rows"]
    assert rows[2][:2] == [None, None]
    assert rows[2][2]["total"] == 8
    numbers = result["metrics"]["class_incremental"]["top1"]
    old_numbers = before["metrics"]["class_incremental"]["top1"]
    assert numbers["curve"] == [*old_numbers["curve"], None]
    assert (numbers["last_accuracy"], numbers["forgetting"]) == (None, None)
    assert "not all tasks were measured" in result["metrics"]["note"]
    assert result["extends"]["run"] == str(first)
    assert result["task_records"][:2] == before["task_records"]
    events = [json.loads(line)["event"] for line in (second / "log.jsonl").read_text().splitlines()]
    assert events.count("task") == 3

    shutil.rmtree(first)
    shutil.rmtree(tmp_path / "toy/train")
    assert [cell and cell.total for cell in evaluate(second).rows[-1]] == [None, None, 8]
    assert evaluate(second).to_dict()["rows"][-1] == rows[2]
    write_toy_folder(tmp_path / "toy2", [f"class_{index:02d}" for index in range(4)])
    image = tmp_path / "toy2/test/class_02/0.png"
    for task in (0, 1):
        (old,) = predict(second, [image], task=task)
        (expected,) = predictions[task]
        assert (old.class_names, old.scores) == (expected.class_names, expected.scores)
    (measured,) = evaluate_on(second, str(tmp_path / "toy2"), task=1).rows
    assert measured[0] is not None
    assert measured[0].class_incremental_top1 == sum(
        cell["class_incremental_top1"] for cell in before["accuracy_counts"]["rows"][1]
    )
    folder = export(second)
    assert list(predict(folder, [image])) == list(predict(second, [image]))
    cards = [(each / "README.md").read_text() for each in (folder, export(second, task=1))]
    assert "# more by slca" in cards[0]
    assert "the first 2 were learned by the run that was extended" in cards[0]
    assert "# toy by slca" in cards[1]
    assert "- dataset: toy\n" in cards[1]
    assert "extended" not in cards[1]
    assert evaluate_on(folder, str(new_folder)).rows[0][0] == evaluate(second).rows[-1][2]

    write_toy_folder(tmp_path / "last", ["class_14"])
    twice = run(extension_config(second, dataset=str(tmp_path / "last")), output=third)
    assert twice["tasks"][2:] == [["class_12", "class_13"], ["class_14"]]
    assert twice["accuracy_counts"]["rows"][:3] == rows
    assert twice["accuracy_counts"]["rows"][3][:3] == [None, None, None]
    assert evaluate(third).to_dict()["rows"][-1] == twice["accuracy_counts"]["rows"][3]
    with pytest.raises(UsageError, match=r"task 3 is one of .*second, and its images are not part of"):
        evaluate(third, task=2)


@pytest.mark.parametrize(
    "own",
    ["", "a step", "checkpoints/task_00/notes.txt", "checkpoints/task_03/state.json", "vbm_ptm/hparams.yml"],
)
def test_extend__takes_back_the_copies_of_a_run_that_it_has_not_gone_on_from(
    own: str, two_runs: tuple[Path, Path], new_folder: Path, tmp_path: Path
) -> None:
    config = extension_config(two_runs[0], dataset=str(new_folder))
    directory = RunDirectory(tmp_path / "second")

    def begin() -> None:
        directory.carry_over(RunDirectory(two_runs[0]))
        if own == "a step":
            with (directory.path / "log.jsonl").open("a") as log:
                log.write('{"event": "step", "task": 3}\n')
        elif own:
            (directory.path / own).parent.mkdir(exist_ok=True)
            (directory.path / own).write_text("not a copy")
        raise UsageError("a column twice")

    with pytest.raises(UsageError, match="twice"), directory.claimed(config, resume=False):
        begin()
    assert directory.path.exists() == bool(own)
    if own:
        assert (directory.path / "checkpoints/task_00/state.json").exists()
        assert (directory.path / "log.jsonl").exists()


@pytest.mark.slow
def test_extend__begins_with_the_same_command_after_an_error(
    two_runs: tuple[Path, Path], new_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["trainer.trackers=[tensorboard]", "trainer.max_steps_per_task=2"]
    output = tmp_path / "second"

    def fail(self: Trainer) -> None:
        assert [*output.glob("vbm_ptm/events.out.tfevents.*")]
        raise UsageError("a column twice")

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "fit", fail)
        with pytest.raises(UsageError, match="twice"):
            extend(two_runs[0], dataset=str(new_folder), output=output, overrides=overrides)
    assert not output.exists()
    assert extend(two_runs[0], dataset=str(new_folder), output=output)["status"] == "finished"


def test_extend__goes_on_from_its_newest_whole_checkpoint(
    mean_run: Path, new_folder: Path, tmp_path: Path
) -> None:
    first, second = shutil.copytree(mean_run, tmp_path / "first"), tmp_path / "second"
    result = extend(first, dataset=str(new_folder), output=second)
    shutil.rmtree(first)
    state = second / "checkpoints/task_03/state.json"
    state.write_bytes(state.read_bytes()[:100])
    config = compose(config_file=second / "config.yaml").validate()
    again = run(config, output=second, resume=True, skip_damaged=True)
    assert again["accuracy_counts"] == result["accuracy_counts"]
    assert json.loads(state.read_bytes())["class_names"] == result["class_names"]


@pytest.mark.slow
def test_extend__command_goes_on_from_its_newest_whole_checkpoint(
    mean_run: Path, new_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = shutil.copytree(mean_run, tmp_path / "first"), tmp_path / "second"
    result = extend(first, dataset=str(new_folder), output=second)
    state = second / "checkpoints/task_03/state.json"
    state.write_bytes(state.read_bytes()[:100])
    command = ["extend", str(first), "--dataset", str(new_folder), "--output", str(second)]
    assert main([*command, "--skip-damaged"]) == 2
    assert "--skip-damaged needs --resume" in capsys.readouterr().err
    assert main([*command, "--resume", "--skip-damaged"]) == 0
    assert json.loads((second / "result.json").read_text())["accuracy_counts"] == result["accuracy_counts"]
    assert json.loads(state.read_bytes())["class_names"] == result["class_names"]


def test_extend__of_a_run_without_its_log(mean_run: Path, new_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(mean_run, tmp_path / "first")
    (tmp_path / "first/log.jsonl").unlink()
    result = extend(tmp_path / "first", dataset=str(new_folder), output=tmp_path / "second")
    assert result["status"] == "finished"


@pytest.mark.slow
def test_extend__ends_where_a_run_with_all_tasks_would_have(
    small_tree: Callable[..., Tree], new_folder: Path, tmp_path: Path
) -> None:
    tree = small_tree("nearest_mean")
    tree["scenario"]["class_order"] = "natural"
    run(tree, output=tmp_path / "first")
    run(extension_config(tmp_path / "first", dataset=str(new_folder)), output=tmp_path / "second")
    for part in ("train", "test"):
        shutil.copytree(new_folder / part, tmp_path / "toy" / part, dirs_exist_ok=True)
    tree["scenario"]["num_tasks"] = 3
    run(tree, output=tmp_path / "whole")
    images = sorted((tmp_path / "toy/test").rglob("*.png"))
    assert list(predict(tmp_path / "second", images)) == list(predict(tmp_path / "whole", images))


@pytest.mark.slow
def test_extend__goes_on_where_it_stopped(
    small_tree: Callable[..., Tree], new_folder: Path, tmp_path: Path
) -> None:
    run(small_tree("slca"), output=tmp_path / "first")
    config = extension_config(tmp_path / "first", dataset=str(new_folder))
    run(config, output=tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        run(config, output=tmp_path / "stopped", stop_after_task=2)
    shutil.rmtree(tmp_path / "first")
    result = run(config, output=tmp_path / "stopped", resume=True)
    assert result["status"] == "finished"
    file = "checkpoints/task_02/learner.safetensors"
    assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "stopped" / file).read_bytes()
    with pytest.raises(UsageError, match="exists already"):
        run(config, output=tmp_path / "stopped")


def test_extend__known_classes_need_to_be_meant(mean_run: Path, tmp_path: Path) -> None:
    before = json.loads((mean_run / "result.json").read_text())
    more = str(write_toy_folder(tmp_path / "more", ["class_02", "class_12"]))
    with pytest.raises(
        UsageError, match=r"1 of 2 classes were learned before: class_02\. .*scenario\.allow_known_classes"
    ):
        extend(mean_run, dataset=more, output=tmp_path / "second")
    assert not (tmp_path / "second").exists()
    result = extend(mean_run, dataset=more, output=tmp_path / "second", is_more_data=True)
    assert result["class_names"] == [*before["class_names"], "class_12"]
    assert result["tasks"][3] == ["class_12"]
    assert result["accuracy_counts"]["rows"][3][3]["total"] == 8
    assert evaluate(tmp_path / "second").to_dict()["rows"][-1] == result["accuracy_counts"]["rows"][3]


@pytest.mark.slow
@pytest.mark.parametrize("learner", ["slca", "s_iprompt"])
def test_extend__by_images_of_known_classes_alone(
    learner: str, small_tree: Callable[..., Tree], tmp_path: Path
) -> None:
    run(small_tree(learner), output=tmp_path / "first")
    more = str(write_toy_folder(tmp_path / "more", ["class_01", "class_03"]))
    config = extension_config(tmp_path / "first", dataset=more, is_more_data=True)
    result = run(config, output=tmp_path / "second")
    assert result["tasks"][2] == []
    assert len(result["class_names"]) == 4
    assert result["task_records"][2]["num_steps"] == 2


@pytest.mark.slow
def test_extend__refuses_known_classes_where_the_learner_is_not_defined_for_them(
    small_tree: Callable[..., Tree], tmp_path: Path
) -> None:
    run(small_tree("ease"), output=tmp_path / "first")
    more = str(write_toy_folder(tmp_path / "more", ["class_01", "class_12"]))
    config = extension_config(tmp_path / "first", dataset=more, is_more_data=True)
    with pytest.raises(UsageError, match="'ease' is not defined where a class comes back"):
        build(config, earlier=earlier_state(config))
    with pytest.raises(UsageError, match="'ease' is not defined where a class comes back"):
        extend(tmp_path / "first", dataset=more, output=tmp_path / "second", is_more_data=True)
    assert not (tmp_path / "second").exists()
    new = str(write_toy_folder(tmp_path / "new", ["class_12"]))
    config = extension_config(tmp_path / "first", dataset=new, is_more_data=True)
    assert len(build(config, earlier=earlier_state(config)).benchmark.scenario.tasks) == 3


@pytest.mark.slow
def test_extend__a_domain(small_tree: Callable[..., Tree], tmp_path: Path) -> None:
    """Without a domain of their own the new images are a domain called as the data set."""
    tree = small_tree("nearest_mean")
    root = tmp_path / "domains"
    for domain in ("clipart", "real"):
        write_toy_folder(tmp_path / domain, ["class_00", "class_01"])
        shutil.copytree(tmp_path / domain / "train", root / domain)
    tree["dataset"] |= {"path": str(root), "layout": "domains"}
    tree["scenario"] = {"kind": "domain_incremental"}
    run(tree, output=tmp_path / "first")
    sketch = str(write_toy_folder(tmp_path / "sketch", ["class_01", "class_02"]))
    result = run(extension_config(tmp_path / "first", dataset=sketch), output=tmp_path / "second")
    assert result["tasks"] == [["class_00", "class_01"], [], ["class_02"]]
    state = json.loads((tmp_path / "second/checkpoints/task_02/state.json").read_text())
    assert [task["domain"] for task in state["tasks"]] == ["clipart", "real", "sketch"]
    assert result["accuracy_counts"]["rows"][2][2]["total"] == 8
    assert evaluate(tmp_path / "second").to_dict()["rows"][-1] == result["accuracy_counts"]["rows"][2]

    real = str(tmp_path / "real")
    with pytest.raises(UsageError, match="domain 'real' was learned before"):
        run(extension_config(tmp_path / "first", dataset=real), output=tmp_path / "third")
    config = extension_config(tmp_path / "first", dataset=real, is_more_data=True)
    assert run(config, output=tmp_path / "third")["tasks"][2] == []
    config = extension_config(
        tmp_path / "first",
        dataset=str(root),
        overrides=["dataset.layout=domains"],
    )
    with pytest.raises(UsageError, match="the data set has 2 domains: clipart, real"):
        run(config, output=tmp_path / "fourth")


def test_extend__takes_settings_of_the_new_task_alone(
    mean_run: Path, new_folder: Path, tmp_path: Path
) -> None:
    config = extension_config(
        mean_run, dataset=str(new_folder), overrides=["optimization.epochs=6", "dataset.name=six"]
    )
    assert (config.optimization.epochs, config.dataset.name) == (6, "six")
    assert default_output(mean_run, config) == mean_run.with_name("run+six")
    for item in ("learner.name=l2p", "scenario.num_tasks=3", "dataset.transforms.crop_scale=[1, 1]"):
        with pytest.raises(UsageError, match="an extension keeps the settings of the run"):
            extension_config(mean_run, dataset=str(new_folder), overrides=[item])
    tree = config.model_dump(mode="json")
    tree["learner"] = {"name": "linear_probe"}
    with pytest.raises(UsageError, match=r"an extension keeps what .*run was made with: learner\.name"):
        run(compose(tree=tree).validate(), output=tmp_path / "second")


@pytest.mark.slow
def test_extend__refuses_what_has_no_next_task(
    small_tree: Callable[..., Tree], new_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(TrainingInterrupted):
        run(small_tree("nearest_mean"), output=tmp_path / "stopped", stop_after_task=1)
    tree = small_tree("nearest_mean")
    tree["scenario"]["kind"] = "joint"
    run(tree, output=tmp_path / "joint")
    for name, message in (("stopped", "is not finished"), ("joint", "was trained jointly")):
        with pytest.raises(UsageError, match=message):
            extension_config(tmp_path / name, dataset=str(new_folder))


@pytest.mark.slow
def test_extend__coda_prompt_until_there_is_no_room(
    small_tree: Callable[..., Tree], new_folder: Path, tmp_path: Path
) -> None:
    """Width 64: two planned tasks of 20 components, a third one fits, a fourth does not."""
    tree = small_tree("coda_prompt", pool_size=40)
    run(tree, output=tmp_path / "first")
    run(extension_config(tmp_path / "first", dataset=str(new_folder)), output=tmp_path / "second")
    last = str(write_toy_folder(tmp_path / "last", ["class_14"]))
    with pytest.raises(UsageError, match="4 tasks with 20 components each need 80 orthogonal keys"):
        run(extension_config(tmp_path / "second", dataset=last), output=tmp_path / "third")
    assert not (tmp_path / "third").exists()
