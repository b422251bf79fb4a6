"""The command line on real folders, in process; one subprocess for a real signal."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml
from images import noise, tinted
from PIL import Image

from vbm_ptm.cli import main
from vbm_ptm.learners.registry import list_learners
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.runs import stored_learner
from vbm_ptm.runs.measurement import Measurement
from vbm_ptm.version import __version__

NAMES = ("train", "test", "10")
SIZES = {"train": (9, 5, 7), "test": (3, 2, 4)}
COLOURS = {"train": (220, 30, 30), "test": (30, 220, 30), "10": (30, 30, 220)}

FINISHED = ("--seed", "3", "--class-order-seed", "5", "--device", "cpu", "--set", "checkpoint.keep=all")


def coloured(name: str, number: int) -> Image.Image:
    return tinted(COLOURS[name], number, spread=15)


@pytest.fixture(scope="module")
def named_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classes whose names are those of splits or numbers, of unequal sizes."""
    root = tmp_path_factory.mktemp("named") / "fruits"
    for split, counts in SIZES.items():
        for name, count in zip(NAMES, counts, strict=True):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                coloured(name, number).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def tiny(tiny_weights: Path) -> list[str]:
    """Options for the tiny backbone."""
    settings = (f"checkpoint={tiny_weights}", "name=test_vit.r160_in1k", "image_size=32")
    return [part for setting in settings for part in ("--set", f"backbone.{setting}")]


def training(folder: Path, tiny: list[str], *more: str, learner: str = "slca") -> list[str]:
    small = ("optimization.epochs=4", "optimization.batch_size=8", "trainer.max_steps_per_task=3")
    settings = [part for setting in (*small, "scenario.num_tasks=3") for part in ("--set", setting)]
    return ["train", "--dataset", str(folder), "--learner", learner, *tiny, *settings, *more]


@pytest.fixture(scope="module")
def finished(named_folder: Path, tiny: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of SLCA with four views on the named folder."""
    output = tmp_path_factory.mktemp("finished") / "run"
    assert main(training(named_folder, tiny, *FINISHED, "--output", str(output))) == 0
    return output


def result_of(directory: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


def test_train__leaves_a_complete_record(finished: Path, named_folder: Path, tiny_weights: Path) -> None:
    result = result_of(finished)
    assert (result["status"], result["learner"], result["dataset"]) == ("finished", "slca", "fruits")
    assert (result["seed"], result["class_order_seed"]) == (3, 5)
    assert sorted(result["class_names"]) == sorted(NAMES)
    order = np.random.RandomState(5).permutation(3)
    assert result["class_names"] == [sorted(NAMES)[label] for label in order]
    assert result["tasks"] == [[name] for name in result["class_names"]]
    assert (result["num_views"], result["images_per_step"], result["groups_per_step"]) == (4, 8, 2)
    assert [record["num_steps"] for record in result["task_records"]] == [
        min(3, 4 * -(-SIZES["train"][NAMES.index(name)] // 8)) for name in result["class_names"]
    ]
    assert result["num_images"] == sum(record["num_images"] for record in result["task_records"])
    weights = result["weights"]
    assert (weights["name"], weights["file"]) == ("test_vit.r160_in1k", str(tiny_weights))
    digest = subprocess.run(["sha256sum", str(tiny_weights)], capture_output=True, text=True, check=True)
    assert weights["sha256"] == digest.stdout.split()[0]
    assert len(result["split_sha256"]) == 64
    assert result["data"]["location"] == str(named_folder)
    assert (result["data"]["train"]["images"], result["data"]["test"]["images"]) == (21, 9)
    assert result["transforms"]["image_size"] == 32
    assert result["transforms"]["strong"] == "autoaugment_imagenet"
    assert result["versions"].keys() >= {"vbm_ptm", "python", "torch", "timm", "accelerate", "datasets"}
    assert (result["num_ranks"], result["device"], result["num_threads"]) == (1, "cpu", 1)
    assert result["config"] == yaml.safe_load((finished / "config.yaml").read_text())
    cells = result["accuracy_counts"]["rows"][-1]
    assert [cell["total"] for cell in cells] == [
        SIZES["test"][NAMES.index(name)] for name in result["class_names"]
    ]
    steps = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    first = next(line for line in steps if line["event"] == "step")
    assert (first["images"], first["groups"], first["views"]) == (first["groups"] * 4, first["groups"], 4)


def test_train__shows_a_table_and_the_directory(
    finished: Path, named_folder: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(training(named_folder, tiny, *FINISHED, "--output", str(finished), "--resume")) == 0
    shown = capsys.readouterr().out
    metrics = result_of(finished)["metrics"]["class_incremental"]["top1"]
    assert f"{metrics['average_incremental_accuracy']:.2f}" in shown
    assert "slca-v4" in shown
    assert str(finished) in shown


@pytest.mark.parametrize("task", [1, 2, 3, None])
def test_evaluate__gives_the_digits_of_the_training_log(
    task: int | None, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = [] if task is None else ["--task", str(task)]
    assert main(["evaluate", str(finished), *chosen, "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["equals_training"] is True
    trained = result_of(finished)["metrics"]["class_incremental"]["top1"]["matrix"]
    assert measured["metrics"]["class_incremental"]["top1"]["matrix"][-1] == trained[(task or 3) - 1]


def test_evaluate__names_classes_in_its_table(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(finished), "--task", "2"]) == 0
    shown = capsys.readouterr().out
    one, two, three = result_of(finished)["class_names"]
    assert f"1: {one} " in shown
    assert f"2: {two} " in shown
    assert f": {three} " not in shown
    assert "after task 2: the same counts as training measured" in shown


def test_evaluate__exits_1_if_the_same_images_give_other_counts(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = stored_learner.measure

    def one_less(*arguments: Any, **options: Any) -> Measurement:
        measured = measure(*arguments, **options)
        values = measured.matrix.to_dict()
        for name in ("class_incremental_top1", "task_incremental_top1"):
            values["rows"][-1][0][name] -= 1
        return replace(measured, matrix=AccuracyMatrix.from_dict(values))

    monkeypatch.setattr(stored_learner, "measure", one_less)
    assert main(["evaluate", str(finished), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["equals_training"] is False
    assert main(["evaluate", str(finished)]) == 1
    assert "OTHER counts" in capsys.readouterr().out


def changed_copy(directory: Path, to: Path, **settings: Any) -> Path:
    shutil.copytree(directory, to)
    config = yaml.safe_load((to / "config.yaml").read_text())
    config["seed"] = settings.get("seed", config["seed"])
    config["scenario"]["class_order_seed"] = settings.get(
        "class_order_seed", config["scenario"]["class_order_seed"]
    )
    config["dataset"]["path"] = settings.get("path", config["dataset"]["path"])
    (to / "config.yaml").write_text(yaml.safe_dump(config))
    return to


def test_evaluate__takes_the_class_order_from_the_checkpoint(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another training seed has no influence; another class order is refused, never silently wrong."""
    other_seed = changed_copy(finished, tmp_path / "seed", seed=99)
    assert main(["evaluate", str(other_seed), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equals_training"] is True
    other_order = changed_copy(finished, tmp_path / "order", class_order_seed=1)
    assert main(["evaluate", str(other_order)]) == 2
    assert "are in another order" in capsys.readouterr().err


def test_evaluate__after_test_images_of_a_class_are_gone(
    finished: Path, named_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shutil.copytree(named_folder, tmp_path / "fruits")
    shutil.rmtree(data / "test" / "test")
    assert main(["evaluate", str(changed_copy(finished, tmp_path / "run", path=str(data))), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    result = result_of(finished)
    expected = result["metrics"]["class_incremental"]["top1"]["matrix"][-1]
    gone = result["class_names"].index("test")
    expected[gone] = None
    assert measured["metrics"]["class_incremental"]["top1"]["matrix"][-1] == expected
    assert measured["metrics"]["tasks_without_test_images"] == [gone]
    (data / "test" / "zzz").mkdir()
    coloured("10", 0).save(data / "test" / "zzz" / "0.png")
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    assert "'zzz'" in capsys.readouterr().err


def odd_images(folder: Path) -> dict[str, str]:
    """Write images of every mode that people have; return file name -> the class it shows."""
    folder.mkdir()
    red, blue = coloured("train", 50), coloured("10", 51)
    red.quantize(64).save(folder / "palette.png")
    blue.convert("RGBA").save(folder / "alpha.png")
    red.convert("CMYK").save(folder / "print.jpg", quality=95)
    blue.convert("L").save(folder / "grey.png")
    Image.fromarray(np.full((20, 40), 40_000, np.uint16)).save(folder / "deep.png")
    Image.new("1", (40, 20), 1).save(folder / "bits.png")
    red.convert("LA").save(folder / "grey_alpha.png")
    return {"palette.png": "train", "alpha.png": "10", "print.jpg": "train"}


@pytest.mark.slow
def test_predict__prints_the_right_names(
    named_folder: Path, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(training(named_folder, tiny, "--output", str(run), learner="nearest_mean")) == 0
    expected = odd_images(tmp_path / "odd")
    capsys.readouterr()

    folder = named_folder / "test"
    assert main(["predict", str(run), str(folder), str(tmp_path / "odd" / "alpha.png"), "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert [Path(item["path"]).name for item in predicted].count("0.png") == 3
    own = [item for item in predicted if item["path"].startswith(str(folder))]
    assert len(own) == 9
    assert {item["path"]: item["classes"][0]["name"] for item in own} == {
        item["path"]: Path(item["path"]).parent.name for item in own
    }
    scores = [[ranked["score"] for ranked in item["classes"]] for item in predicted]
    assert all(len(values) == 3 and values == sorted(values, reverse=True) for values in scores)

    assert main(["predict", str(run), str(tmp_path / "odd"), "--csv", "--top-k", "1"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 7
    named = {Path(row["path"]).name: row["class"] for row in rows}
    assert {name: named[name] for name in expected} == expected
    assert set(named.values()) <= set(NAMES)

    assert main(["predict", str(run), str(tmp_path / "odd" / "print.jpg"), "--task", "3"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"│ train │.* 10: ", table)

    assert main(["predict", str(run), str(folder), "--task", "1", "--json"]) == 0
    first = result_of(run)["class_names"][0]
    assert {item["classes"][0]["name"] for item in json.loads(capsys.readouterr().out)} == {first}
    # The data may be gone by now: a run is enough to predict.
    moved = changed_copy(run, tmp_path / "moved", path="/nowhere")
    assert main(["predict", str(moved), str(tmp_path / "odd" / "alpha.png")]) == 0


@pytest.mark.slow
def test_predict__shows_class_names_as_they_are(
    tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "[data]"
    for name, colour in (("[red]", "train"), (":smile:", "10")):
        (data / name).mkdir(parents=True)
        for number in range(3):
            coloured(colour, number).save(data / name / f"{number}.png")
    run = tmp_path / "run"
    more = ("--output", str(run), "--set", "scenario.num_tasks=1")
    assert main(training(data, tiny, *more, learner="nearest_mean")) == 0
    assert "[data] (flat): train split: 4 images" in capsys.readouterr().err
    assert main(["predict", str(run), str(data)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("[red]") + shown.count(":smile:") == 6 * 2 + 6
    assert main(["evaluate", str(run)]) == 0
    assert ":smile:, [red]" in capsys.readouterr().out.replace("[red], :smile:", ":smile:, [red]")


@pytest.mark.slow
def test_train__runs_on_a_local_copy_of_cifar100(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    features = datasets.Features(
        {
            "img": datasets.Image(),
            "fine_label": datasets.ClassLabel(names=[f"fine {number}" for number in range(100)]),
            "coarse_label": datasets.ClassLabel(names=[f"coarse {number}" for number in range(20)]),
        }
    )
    for split, count in (("train", 2), ("test", 1)):
        labels = list(range(100)) * count
        columns = {
            "img": [noise(number, height=32, width=32) for number in range(len(labels))],
            "fine_label": labels,
            "coarse_label": [label // 5 for label in labels],
        }
        rows = datasets.Dataset.from_dict(columns, features=features)
        rows.to_parquet(tmp_path / "cifar100" / f"{split}-00000-of-00001.parquet")
    output = tmp_path / "run"
    local = ("--set", f"dataset.path={tmp_path / 'cifar100'}")
    command = ["train", "--dataset", "cifar100", "--learner", "nearest_mean", *tiny, *local]
    assert main([*command, "--output", str(output)]) == 0
    result = result_of(output)
    assert sorted(result["class_names"]) == sorted(f"fine {number}" for number in range(100))
    assert [len(names) for names in result["tasks"]] == [10] * 10
    assert (result["data"]["train"]["images"], result["data"]["test"]["images"]) == (200, 100)
    assert result["transforms"]["strong"] == "autoaugment_cifar10"
    assert "preset 'embedded' of nearest_mean was made for" in capsys.readouterr().err


@pytest.mark.slow
def test_train__has_a_place_for_results_by_default(
    named_folder: Path, tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(training(named_folder, tiny, learner="nearest_mean")) == 0
    assert result_of(tmp_path / "runs" / "fruits-nearest_mean-v1")["num_views"] == 1
    name = ("--set", "dataset.name=../my/fruits")
    assert main(training(named_folder, tiny, *name, learner="nearest_mean")) == 0
    assert (tmp_path / "runs" / ".._my_fruits-nearest_mean-v1").is_dir()
    # Several runs do not go where the single one is.
    assert main([*training(named_folder, tiny, learner="nearest_mean"), "--seeds", "1,2"]) == 0
    assert len(list((tmp_path / "runs" / "fruits-nearest_mean-v1-seeds").rglob("result.json"))) == 2


@pytest.mark.slow
def test_train__stops_after_a_task_as_planned_and_goes_on(
    named_folder: Path, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    command = training(named_folder, tiny, "--output", str(output), learner="nearest_mean")
    assert main([*command, "--stop-after-task", "2"]) == 0
    stopped = capsys.readouterr().err
    assert "stopped after task 2 as planned; 2 of 3 tasks are finished, saved in" in stopped
    assert "--resume, without --stop-after-task or with a later one" in stopped
    assert result_of(output)["status"] == "interrupted"
    assert main(["evaluate", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["equals_training"] is True
    assert main([*command, "--stop-after-task", "1", "--resume"]) == 0
    assert len(result_of(output)["task_records"]) == 2
    assert main([*command, "--resume"]) == 0
    assert result_of(output)["status"] == "finished"
    assert len(result_of(output)["task_records"]) == 3


def test_train__is_interrupted_by_ctrl_c_with_a_learner_of_the_users_own(
    named_folder: Path,
    tiny: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "impatient_learner.py").write_text(
        "import os, signal\n"
        "from vbm_ptm.learners.finetune import Finetune\n"
        "class Impatient(Finetune):\n"
        "    def forward(self, images, labels):\n"
        "        if self.task.index == 1:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        return super().forward(images, labels)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    output = tmp_path / "run"
    name = "impatient_learner:Impatient"
    handler = signal.getsignal(signal.SIGINT)
    assert main(training(named_folder, tiny, "--output", str(output), learner=name)) == 130
    said = capsys.readouterr().err
    assert "stopped by SIGINT; 1 of 3 tasks are finished, task 2 after 1 of " in said
    assert f"saved in {output}. Continue with the same command and --resume." in said
    assert result_of(output)["status"] == "interrupted"
    assert len(result_of(output)["task_records"]) == 1
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
def test_train__is_saved_when_terminated(named_folder: Path, tiny: list[str], tmp_path: Path) -> None:
    """With workers, to which the signal goes as well; without any, in tests/test_surroundings.py."""
    output = tmp_path / "run"
    more = ("--output", str(output), "--set", "trainer.max_steps_per_task=100000", "--set")
    loading = ("--set", "data.num_workers=2", "--set", "data.multiprocessing_context=fork")
    command = training(
        named_folder, tiny, *more, "optimization.epochs=100000", "--set", "trainer.log_every=1", *loading
    )
    with (tmp_path / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "vbm_ptm", *command], stderr=stderr, start_new_session=True
        )
        log = output / "log.jsonl"
        while process.poll() is None and not (log.exists() and b'"step"' in log.read_bytes()):
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)  # as a batch system does: to the workers as well
        assert process.wait(60) == 143
    said = (tmp_path / "stderr").read_text()
    assert re.search(r"stopped by SIGTERM; 0 of 3 tasks are finished, task 1 after \d+ of 100000 steps", said)
    assert len(list((output / "checkpoints").glob("last_*"))) in (1, 2)
    assert "Traceback" not in said
    result = result_of(output)
    assert result["status"] == "interrupted"
    assert result["metrics"]["class_incremental"] is None
    assert result["task_records"] == []


def test_train__takes_lists_of_seeds(
    named_folder: Path, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "runs"
    command = training(named_folder, tiny, "--output", str(output), learner="nearest_mean")
    assert main([*command, "--seeds", "1,2", "--class-order-seeds", "7,8"]) == 0
    directories = sorted(path.parent for path in output.rglob("result.json"))
    assert [path.name for path in directories] == ["seed_1-order_7", "seed_2-order_8"]
    shown = capsys.readouterr().out
    assert all(str(path) in shown for path in directories)
    assert "±" in shown
    collected = json.loads((output / "study.json").read_text())
    assert collected["rows"][0]["seeds"] == [[1, 7], [2, 8]]
    orders = [result_of(path)["class_names"] for path in directories]
    assert orders == [
        [sorted(NAMES)[label] for label in np.random.RandomState(seed).permutation(3)] for seed in (7, 8)
    ]


def test_train__training_seed_changes_neither_order_nor_split(
    named_folder: Path, tiny: list[str], tmp_path: Path
) -> None:
    flat = shutil.copytree(named_folder / "train", tmp_path / "flat")
    reversed_flat = tmp_path / "reversed"
    for file in sorted(flat.rglob("*.png"), reverse=True):
        target = reversed_flat / file.relative_to(flat)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    results = []
    for seed, data in ((1, flat), (2, reversed_flat)):
        more = ("--output", str(tmp_path / f"run{seed}"), "--seed", str(seed), "--set", "dataset.layout=flat")
        assert main(training(data, tiny, *more, learner="nearest_mean")) == 0
        results.append(result_of(tmp_path / f"run{seed}"))
    assert results[0]["split_sha256"] == results[1]["split_sha256"]
    assert results[0]["class_names"] == results[1]["class_names"]
    assert "20" not in results[0]["data"]["held_out"]
    assert results[0]["data"]["held_out"].startswith("0.2 of every class")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("learners", list_learners()),
        ("datasets", ["cifar100", "digits", "folder", "imagenet_r"]),
        ("backbones", ["vit_tiny_d6_patch8_64.tiny_imagenet", "vit_base_patch16_224.augreg_in21k"]),
    ],
)
@pytest.mark.slow
def test_list__names_what_other_commands_take(
    kind: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    is_json = kind == "backbones"  # they take seconds to find: once is enough
    assert main(["list", kind, *(["--json"] if is_json else [])]) == 0
    shown = capsys.readouterr().out
    names = json.loads(shown) if is_json else [line.split()[0] for line in shown.splitlines()]
    assert set(expected) <= set(names)
    assert len(names) == len(set(names))


def test_check__says_what_a_run_will_cost(
    finished: Path, named_folder: Path, tiny: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["check", *training(named_folder, tiny)[1:]]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["faults"] == []
    facts = found["facts"]
    result = result_of(finished)
    assert (facts["training images"], facts["test images"]) == (21, 9)
    assert facts["steps"] == result["num_steps"]
    assert facts["split SHA-256"] == result["split_sha256"]
    assert facts["a step"] == "8 images = 2 groups x 4 views"
    assert facts.keys() >= {"memory for weights, gradients and optimizer", "disk for checkpoints"}
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert all(key in shown for key in facts)


def test_check__explains_where_a_setting_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "--dataset", "digits", "--learner", "slca", "--set", "optimization.epochs=8"]
    assert main([*command, "--explain", "optimization", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["optimization.epochs"]["value"] == 8
    assert explained["optimization.epochs"]["source"] == "override optimization.epochs=8"
    assert "per training image" in explained["optimization.epochs"]["meaning"]
    assert explained["optimization.decay"]["source"] == "the default"
    assert explained["optimization.batch_size"]["source"].endswith("slca.yaml, preset embedded")
    assert main([*command, "--explain", "optimization.epochs"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert {"8", "override"} <= set(shown.split())
    assert "Epochs per task" in shown
    assert main([*command, "--explain", "optimization.clip_gradient_norm"]) == 0
    assert {"null", "`null`"} <= set(capsys.readouterr().out.split())
    assert main([*command, "--explain", "optimization.epoch"]) == 2
    assert "Did you mean 'optimization.epochs'?" in capsys.readouterr().err


def test_study__runs_a_file(
    named_folder: Path, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compare.yaml"
    file.write_text(
        f"dataset: {named_folder}\n"
        "preset: none\n"
        "settings:\n"
        "  scenario: {num_tasks: 3}\n"
        "  optimization: {epochs: 2, batch_size: 4}\n"
        "  trainer: {max_steps_per_task: 1}\n"
        "grid: {view_batch.num_views: [1, 2]}\n"
        "runs: [{learner: finetune}]\n"
    )
    output = tmp_path / "out"
    command = ["study", str(file), "--output", str(output), *tiny]
    assert main([*command, "--dry-run", "--shard", "2/2", "--images-per-second", "0.001"]) == 0
    states = [line.split("│")[-2].strip() for line in capsys.readouterr().out.splitlines() if "│" in line]
    assert states == ["not in this part", "to run"]
    assert not output.exists()
    assert main([*command, "--shard", "3/2"]) == 2
    assert main([*command, "--shard", "1/2"]) == 0
    assert "not finished: finetune-num_views=2" in capsys.readouterr().out
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "finetune-num_views=1" in shown
    assert "view batch in 'finetune-num_views=2' against one view, 1 pair of equal seeds" in shown
    assert sorted(path.parent.name for path in output.rglob("result.json")) == [
        "finetune-num_views=1",
        "finetune-num_views=2",
    ]


def test_study__collects_what_is_finished_and_leaves_with_1_where_a_run_failed(
    named_folder: Path, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "compare.yaml"
    file.write_text(
        f"dataset: {named_folder}\n"
        "preset: none\n"
        "settings: {scenario: {num_tasks: 3}}\n"
        "runs:\n"
        "  - {learner: nearest_mean}\n"
        "  - {learner: nearest_mean, name: nowhere, settings: {dataset: {train_split: no}}}\n"
    )
    command = ["study", str(file), "--output", str(tmp_path / "out"), *tiny]
    assert main([*command, "--collect"]) == 0
    said = capsys.readouterr().out
    assert "not finished: nearest_mean" in said
    assert not (tmp_path / "out").exists()

    assert main(command) == 1
    said = capsys.readouterr().out
    assert f"failed: {tmp_path / 'out' / 'nowhere'}: UsageError: " in said
    assert main([*command, "--collect", "--details"]) == 0
    said = capsys.readouterr().out
    assert "top-5" in said
    assert "drift" in said
    assert "not finished: nowhere, seed and class-order seed (1993, 1993)" in said
    assert f"  {tmp_path / 'out' / 'nearest_mean'}\n" in said


def test_help__is_shown_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert "train" in said.out + said.err
    assert main(["--help"]) == 0


def test_version__is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vbm_ptm {__version__}\n"


def test_main__lets_errors_of_the_program_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

    monkeypatch.setattr("vbm_ptm.check.preflight.survey", broken)
    with pytest.raises(OSError, match="Inappropriate ioctl"):
        main(["check", "--dataset", "digits", "--learner", "slca"])


def test_main__reports_a_loss_that_is_not_finite(
    named_folder: Path, tiny: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    wild = ("--set", "optimization.learning_rate=1e30", "--set", "learner.backbone_learning_rate_scale=1")
    assert main(training(named_folder, tiny, "--output", str(output), *wild)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: the loss is ")
    assert result_of(output)["status"] == "failed"


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore", "Take smaller batches"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried", "Take smaller batches"),
        ("DataLoader worker (pid 7) is killed by signal: Killed.", "use fewer data.num_workers"),
    ],
)
def test_main__says_what_to_do_where_memory_is_short(
    message: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr("vbm_ptm.runs.stored_learner.predict", fail)
    assert main(["predict", "run", __file__]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message.splitlines()[0].rstrip('.')}. ")
    assert advice in line


def test_check__finds_a_learner_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "own_methods"
    package.mkdir()
    (package / "mine.py").write_text(
        "from vbm_ptm.learners.finetune import Finetune\n\n\nclass Mine(Finetune):\n    pass\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--dataset", "digits", "--learner", "own_methods.mine:Mine"]) == 0
    assert "own_methods.mine:Mine, preset none" in capsys.readouterr().out
