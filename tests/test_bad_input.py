"""Everything a user can get wrong: a readable message on stderr, exit code 2, no traceback, nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from images import noise, write_pictures
from miniatures import write_toy_folder
from PIL import Image

from vbm_ptm.cli import main

Say = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Say:
    """Return a function that runs a command which must be refused, and returns what it said."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        assert main(arguments) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "Traceback" not in said.err
        errors = [
            line.removeprefix("error: ") for line in said.err.splitlines() if line.startswith("error: ")
        ]
        assert errors
        return "\n".join(errors)

    return run


@pytest.fixture(scope="module")
def options(toy_folder: Path, tiny_weights: Path) -> list[str]:
    """A small, right command without --output: nearest class mean on the toy folder in three tasks."""
    settings = {
        "backbone.name": "test_vit.r160_in1k",
        "backbone.checkpoint": tiny_weights,
        "backbone.image_size": 32,
        "scenario.num_tasks": 3,
        "optimization.epochs": 4,
        "optimization.batch_size": 8,
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return ["--dataset", str(toy_folder), "--learner", "nearest_mean", "--preset", "none", *sets]


@pytest.fixture(scope="module")
def finished(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished") / "run"
    assert main(["train", *options, "--output", str(output)]) == 0
    return output


WRONG_OPTIONS = {
    "learner": (["--learner", "slka"], "unknown learner 'slka'. Did you mean 'slca'? Allowed: "),
    "own learner": (["--learner", "no_such:Thing"], "learner 'no_such:Thing' cannot be imported"),
    "not a learner": (["--learner", "json:JSONDecoder"], "is not a subclass of"),
    "data set": (["--dataset", "digitz"], "unknown data set 'digitz'. Did you mean 'digits'? Allowed: "),
    "preset": (["--preset", "papr"], "Did you mean 'paper'?"),
    "setting": (["--set", "optimization.epoch=3"], "Did you mean 'epochs'?"),
    "section": (["--set", "optimisation.epochs=3"], "Did you mean 'optimization'?"),
    "value": (["--set", "optimization.epochs=many"], "optimization.epochs: 'many' is not allowed: "),
    "override": (["--set", "optimization.epochs"], "is not of the form path.to.setting=value"),
    "override YAML": (["--set", "scenario.task_sizes=[1"], "is not valid YAML"),
    "batch size": (
        ["--set", "view_batch.num_views=3"],
        "nearest batch sizes that do are 6 and 9",
    ),
    "epochs": (
        ["--set", "view_batch.num_views=4", "--set", "optimization.epochs=3"],
        "Take at least 4 epochs",
    ),
    "tasks": (["--set", "scenario.num_tasks=13"], "scenario.num_tasks is 13, but 12 classes"),
    "task sizes": (
        ["--set", "scenario.num_tasks=null", "--set", "scenario.task_sizes=[5,5]"],
        "sum to 10, but the data set has 12 classes",
    ),
    "class order": (
        ["--set", "scenario.class_order=[class_00, class_00, klass_01]"],
        "unknown: klass_01 (nearest: class_01); missing: class_01",
    ),
    "number of classes": (["--set", "dataset.num_classes=11"], "dataset.num_classes=11, but 12 classes"),
    "backbone": (["--set", "backbone.name=vit_bse_patch16_224"], "vit_bse_patch16_224"),
    "image size": (["--set", "backbone.image_size=33"], "nearest: 32 and 48"),
    "weights": (["--set", "backbone.checkpoint=/nowhere/w.safetensors"], "/nowhere/w.safetensors"),
    "config file": (["--config", "nowhere.yaml"], "unknown configuration file 'nowhere.yaml'"),
    "seeds": (["--seeds", "1,x"], "--seeds '1,x' is not a list of whole numbers"),
    "no seeds": (["--seeds", ""], "--seeds '' is not a list of whole numbers"),
    "seed and seeds": (["--seeds", "1,2", "--seed", "3"], "one seed or a list of seeds, not both"),
    "lengths": (["--seeds", "1,2", "--class-order-seeds", "1"], "2 seeds and 1 class-order seeds"),
    "seeds twice": (["--seeds", "1,1"], "seeds given more than once: 1"),
    "stop of many": (["--seeds", "1,2", "--stop-after-task", "1"], "--stop-after-task is for a single run"),
    "class-order seed": (["--class-order-seed", "-1"], "scenario.class_order_seed is -1"),
    "data set path": (
        ["--dataset", "nowhere/birds"],
        f"'{Path('nowhere/birds').absolute()}' does not exist",
    ),
    "milestones": (["--set", "optimization.milestones=[-1]"], "greater than or equal to 0"),
    "domain order": (
        ["--set", "scenario.domain_order=[photo]"],
        "scenario.domain_order only orders the tasks of",
    ),
    "long data set": (["--dataset", "x" * 5000], "File name too long. Give a shorter name."),
    "data set file": (["--dataset", __file__], "is a file. Give an image folder, a parquet file"),
}


@pytest.mark.parametrize("what", WRONG_OPTIONS)
def test_train__refuses_wrong_options(what: str, options: list[str], tmp_path: Path, refused: Say) -> None:
    wrong, message = WRONG_OPTIONS[what]
    output = tmp_path / "run"
    # The given options replace those of the same name: the last one counts.
    said = refused("train", *options, *wrong, "--output", str(output))
    assert message in said
    assert not output.exists()


def test_train__refuses_several_wrong_settings_in_one_go(options: list[str], refused: Say) -> None:
    said = refused("train", *options, "--set", "seed=-1", "--set", "device=gpu", "--set", "datasets.x=1")
    assert len(said.splitlines()) == 3
    assert "device: 'gpu' is not allowed: Input should be 'auto', 'cpu', 'cuda' or 'mps'" in said


@pytest.mark.parametrize("arguments", [["train", "--bogus"], ["predict"], ["evaluate", "x", "--task", "0"]])
def test_main__refuses_unknown_options_and_missing_arguments(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "Usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimization: {epochs: 3", "mine.yaml is not valid YAML"),
        ("[1, 2]", "must hold settings as 'section: {key: value}', not a list"),
        ("optimization: {epochs: 3}\noptimization: {epochs: 4}", "'optimization' is given twice"),
        ("optimization: {epoch: 3}", "Did you mean 'epochs'?"),
        ("optimization: &all {epochs: *all}", "an alias (*name) stands inside what it is the name of"),
    ],
)
def test_train__refuses_a_wrong_configuration_file(
    text: str, message: str, options: list[str], tmp_path: Path, refused: Say
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    said = refused("train", *options, "--config", str(file))
    assert message in said
    assert str(file) in said


def test_study__refuses_a_wrong_file(tmp_path: Path, refused: Say) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("dataset: digits\nrun: []\n")
    said = refused("study", str(file), "--output", str(tmp_path / "out"))
    assert "study: unknown setting 'run'. Did you mean 'runs'?" in said
    assert all(line.endswith(f"(from {file})") for line in said.splitlines())
    file.write_text("dataset: digits\nruns: [{learner: slca, setings: {}}]\n")
    said = refused("study", str(file))
    assert (
        "study: unknown setting 'setings' in runs.0. Did you mean 'settings'? Allowed: dataset, grid, learner, name,"
        in said
    )
    file.write_text("dataset: digits\nruns: [{learner: slca}, {learner: slca}]\n")
    assert "several runs of the study would be written to" in refused("study", str(file))
    assert "unknown configuration file 'nowhere.yaml'" in refused("study", "nowhere")
    file.write_text("dataset: digits\nruns: []\n")
    assert "runs: [] is not allowed" in refused("study", str(file))
    for name in ("''", ".", ".."):
        file.write_text(f"dataset: digits\nruns: [{{learner: slca, name: {name}}}]\n")
        assert "runs.0.name: " in refused("study", str(file))
    file.write_text("dataset: digits\nruns: [{learner: slca}]\ngrid: {seed: []}\n")
    assert "grid.seed: [] is not allowed" in refused("study", str(file))


def write_classes(root: Path, *names: str, count: int = 4) -> Path:
    return write_pictures(root, *(f"{name}/{number}.jpg" for name in names for number in range(count)))


def with_dataset(options: list[str], path: Path, *more: str) -> list[str]:
    return [*options, "--dataset", str(path), "--set", "scenario.num_tasks=2", *more]


def test_train__says_what_is_wrong_with_a_folder(options: list[str], tmp_path: Path, refused: Say) -> None:
    output = tmp_path / "run"
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    write_classes(tmp_path / "birds", "crow", "owl")
    write_classes(tmp_path / "half" / "test", "crow", "owl")
    cases = {
        "empty": "no images below",
        "brids": f"Did you mean '{tmp_path / 'birds'}'?",
        "half": "reads two ways",
        "birds/crow": "holds 4 images but no class folders",
    }
    for name, message in cases.items():
        said = refused("train", *with_dataset(options, tmp_path / name), "--output", str(output))
        assert message in said, name
        assert str(tmp_path / name) in said, name
    assert not output.exists()


def test_train__names_every_bad_image_at_once_or_skips_them(
    options: list[str], tmp_path: Path, refused: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_classes(tmp_path / "birds", "crow", "owl", count=6)
    whole = (root / "crow" / "0.jpg").read_bytes()
    (root / "crow" / "half.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "owl" / "nothing.jpg").touch()
    (root / "owl" / "notes.jpg").write_text("these are no pixels")
    bad = ["crow/half.jpg", "owl/notes.jpg", "owl/nothing.jpg"]
    command = ["train", *with_dataset(options, root), "--output", str(tmp_path / "run")]
    said = refused(*command)
    assert "3 of 15 images are bad" in said
    assert "dataset.on_bad_image=skip" in said
    assert all(f"'{name}'" in said for name in bad)
    assert not (tmp_path / "run").exists()

    assert main([*command, "--set", "dataset.on_bad_image=skip"]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert sorted(result["data"]["skipped_images"]) == bad
    assert result["data"]["train"]["images"] + result["data"]["test"]["images"] == 12
    assert "skipped" in capsys.readouterr().err


def test_train__takes_images_of_every_mode(options: list[str], tmp_path: Path) -> None:
    root = write_classes(tmp_path / "birds", "crow", "owl")
    deep = Image.fromarray(np.arange(1024, dtype=np.uint16).reshape(32, 32) * 64)
    odd = {
        "grey.png": noise(height=32, width=32).convert("L"),
        "palette.png": noise(height=32, width=32).quantize(16),
        "alpha.png": noise(height=32, width=32).convert("RGBA"),
        "print.jpg": noise(height=32, width=32).convert("CMYK"),
        "deep.png": deep,
        "bits.png": noise(height=32, width=32).convert("1"),
        "grey_alpha.png": noise(height=32, width=32).convert("LA"),
    }
    for name, image in odd.items():
        image.save(root / "owl" / name)
    slca = ["--learner", "slca", "--set", "trainer.max_steps_per_task=2"]
    assert main(["train", *with_dataset(options, root, *slca), "--output", str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["data"]["train"]["images"] + result["data"]["test"]["images"] == 8 + len(odd)


def test_train__refuses_an_output_that_is_in_use(
    options: list[str], finished: Path, tmp_path: Path, refused: Say
) -> None:
    command = ["train", *options, "--output"]
    said = refused(*command, str(finished))
    assert "exists already" in said
    assert "--resume" in said
    before = (finished / "result.json").read_bytes()
    said = refused(*command, str(finished), "--resume", "--seed", "7", "--set", "objective.detach_weak=no")
    assert "(stored against given): objective.detach_weak: true against false; seed: 1993 against 7." in said
    assert (finished / "result.json").read_bytes() == before

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert "exists and is not empty" in refused(*command, str(tmp_path / "mine"))
    assert "exists and is not empty" in refused(*command, str(tmp_path / "mine"), "--resume")
    assert "is a file" in refused(*command, str(tmp_path / "mine" / "thesis.tex"))
    below = tmp_path / "mine" / "thesis.tex" / "run"
    assert f"lies below {below.parent}, which is a file" in refused(*command, str(below))
    assert "cannot be made" in refused(*command, "/proc/run")
    assert "File name too long" in refused(*command, str(tmp_path / ("x" * 300)))
    assert "exists already" in refused(*command, str(tmp_path / "mine"), "--seeds", "1,2")
    said = refused(*command, str(finished), "--resume", "--seeds", "1,2")
    assert f"{finished} is the directory of a single run; a study needs its own folder." in said
    assert os.listdir(tmp_path / "mine") == ["thesis.tex"]


def test_train__refuses_a_second_writer(options: list[str], tmp_path: Path, refused: Say) -> None:
    output = tmp_path / "run"
    output.mkdir()
    with (output / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"{output} is in use by another run" in refused("train", *options, "--output", str(output))
    assert os.listdir(output) == [".lock"]
    assert main(["train", *options, "--output", str(output)]) == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_train__says_what_it_could_not_write_and_goes_on_later(
    code: int,
    options: list[str],
    finished: Path,
    tmp_path: Path,
    refused: Say,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "run"
    real = os.fsync

    def full(descriptor: int) -> None:
        if (output / "checkpoints" / "task_00").is_dir():
            raise OSError(code, os.strerror(code))
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        said = refused("train", *options, "--output", str(output))
    assert os.strerror(code) in said
    assert len(said.splitlines()) == 1
    assert (output / "checkpoints" / "task_00").is_dir()
    assert main(["train", *options, "--output", str(output), "--resume"]) == 0
    one, two = (json.loads((path / "result.json").read_text()) for path in (output, finished))
    assert one["metrics"] == two["metrics"]
    assert one["status"] == "finished"


def test_extend__says_what_it_could_not_copy_and_begins_anew_later(
    finished: Path, tmp_path: Path, refused: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output = write_toy_folder(tmp_path / "more", ["class_12", "class_13"]), tmp_path / "run"
    command = ["extend", str(finished), "--dataset", str(folder), "--output", str(output)]
    real = shutil.copyfile

    def full(source: Path, target: Path) -> None:
        if target.name == "state.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)
        said = refused(*command)
    assert said.startswith(str(output))
    assert "state.json: No space left on device. Free some space" in said
    assert not output.exists()
    assert main(command) == 0


def test_evaluate_and_predict__need_a_run(
    options: list[str], finished: Path, toy_folder: Path, tmp_path: Path, refused: Say
) -> None:
    image = str(toy_folder / "test" / "class_00" / "0.png")
    untrained = tmp_path / "untrained"
    untrained.mkdir()
    shutil.copy(finished / "config.yaml", untrained)
    for command, *more in (["evaluate"], ["predict", image]):
        assert re.search("is not a run|neither a run", refused(command, str(tmp_path), *more))
        assert "has no finished task yet" in refused(command, str(untrained), *more)
        said = refused(command, str(finished), *more, "--task", "4")
        assert "has no checkpoint of task 4; there is one of task 1, 2, 3" in said


def test_predict__names_paths_that_are_no_images(finished: Path, tmp_path: Path, refused: Say) -> None:
    (tmp_path / "notes.jpg").write_text("no pixels")
    (tmp_path / "empty").mkdir()
    said = refused("predict", str(finished), str(tmp_path / "nowhere.jpg"), str(tmp_path / "empty"))
    assert "there is no image file or folder" in said
    assert "no images below" in said
    assert "not both" in refused("predict", str(finished), str(tmp_path / "notes.jpg"), "--json", "--csv")
    said = refused("predict", str(finished), str(tmp_path / "notes.jpg"))
    assert f"cannot read image '{tmp_path / 'notes.jpg'}': not an image in any known format" in said


DAMAGES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "half of the weights": (
        "checkpoints/statistics/task_01.safetensors",
        lambda file: file.write_bytes(file.read_bytes()[:-10]),
        "is damaged (its SHA-256 is not",
    ),
    "no weights": ("checkpoints/statistics/task_01.safetensors", Path.unlink, "is missing or empty"),
    "half of the state": (
        "checkpoints/task_02/state.json",
        lambda file: file.write_text(file.read_text()[:100]),
        "state.json is damaged",
    ),
    "no state": ("checkpoints/task_02/state.json", Path.unlink, "is missing or empty"),
    "the configuration": (
        "config.yaml",
        lambda file: file.write_text("optimization: {epoch: 1}\nlearner: {name: slca}\n"),
        "config.yaml",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_evaluate__refuses_a_damaged_run(damage: str, finished: Path, tmp_path: Path, refused: Say) -> None:
    name, harm, message = DAMAGES[damage]
    run = shutil.copytree(finished, tmp_path / "run")
    harm(run / name)
    assert message in refused("evaluate", str(run))


@pytest.mark.slow
def test_train__refuses_to_go_on_from_damage(
    options: list[str], finished: Path, tmp_path: Path, refused: Say
) -> None:
    command = ["train", *options, "--resume", "--output"]
    run = shutil.copytree(finished, tmp_path / "run")
    (run / "result.json").write_text("{")
    assert f"{run / 'result.json'} is damaged" in refused(*command, str(run))
    (run / "result.json").unlink()
    state = run / "checkpoints" / "task_02" / "state.json"
    for is_finished in (False, True):  # a finished run whose learner is damaged is of no use either
        state.write_text("{")
        if not is_finished:
            assert "--resume --skip-damaged" in refused(*command, str(run))
        assert main([*command, str(run), "--skip-damaged"]) == 0
        assert main(["evaluate", str(run)]) == 0
        one, two = (json.loads((path / "result.json").read_text()) for path in (run, finished))
        assert one["metrics"] == two["metrics"]


def test_train__refuses_other_weights_on_resume(
    options: list[str], tiny_weights: Path, tmp_path: Path, refused: Say
) -> None:
    own = tmp_path / "own.safetensors"
    shutil.copy(tiny_weights, own)
    command = ["train", *options, "--set", f"backbone.checkpoint={own}", "--output", str(tmp_path / "run")]
    assert main([*command, "--stop-after-task", "1"]) == 0
    content = bytearray(own.read_bytes())
    content[-1] ^= 1
    own.write_bytes(content)
    assert "was made with pre-trained weights of SHA-256" in refused(*command, "--resume")


def test_train__refuses_other_images_on_resume(
    options: list[str], toy_folder: Path, tmp_path: Path, refused: Say
) -> None:
    data = shutil.copytree(toy_folder, tmp_path / "toy")
    command = ["train", *options, "--dataset", str(data), "--output", str(tmp_path / "run")]
    assert main([*command, "--stop-after-task", "1"]) == 0
    log = (tmp_path / "run" / "log.jsonl").read_bytes()
    gone = data / "train" / "class_07" / "0.png"
    gone.rename(tmp_path / "0.png")
    said = refused(*command, "--resume")
    assert "the images or their split are not those that" in said
    assert "71 for training, 48 for testing" in said
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log
    (tmp_path / "0.png").rename(gone)
    assert main([*command, "--resume"]) == 0


@pytest.mark.slow
def test_evaluate__says_that_test_images_have_changed(
    options: list[str], toy_folder: Path, tmp_path: Path, refused: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shutil.copytree(toy_folder, tmp_path / "toy")
    run = tmp_path / "run"
    assert main(["train", *options, "--dataset", str(data), "--output", str(run)]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 0
    assert "warning" not in capsys.readouterr().err
    (data / "test" / "class_07" / "0.png").unlink()
    assert main(["evaluate", str(run)]) == 0
    assert "warning: the images or their split are not those that" in capsys.readouterr().err
    # Without any test folder a part of the training images would be held out: the learner has seen them.
    shutil.rmtree(data / "test")
    said = refused("evaluate", str(run))
    assert (
        "Held out of the training images: 0.2 of every class, as there is no test split now, nothing then"
        in said
    )
