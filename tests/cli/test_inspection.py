"""vbm-ptm check and vbm-ptm split on folders as users have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from miniatures import domainnet_miniature, imagenet_r_miniature

from vbm_ptm.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def learner(tiny_weights: Path) -> list[str]:
    settings = (f"checkpoint={tiny_weights}", "name=test_vit.r160_in1k", "image_size=32")
    options = [word for setting in settings for word in ("--set", f"backbone.{setting}")]
    return ["--learner", "nearest_mean", "--preset", "none", *options]


def domainnet(folder: Path) -> list[str]:
    return [
        *domainnet_miniature(folder, num_classes=4, domains=["clipart", "real", "sketch"]),
        *("--set", "scenario.num_tasks=2"),
    ]


def test_check__exits_with_2_and_names_what_is_absent_and_what_is_empty(
    learner: list[str], tmp_path: Path, capsys: Capture
) -> None:
    command = ["check", *domainnet(tmp_path), *learner]
    assert main(command) == 0
    assert "4, 4, 4 classes" not in capsys.readouterr().out
    root = tmp_path / "DomainNet"
    absent, empty = sorted((root / "real/train").iterdir())[0], sorted((root / "sketch/toe").iterdir())[0]
    absent.unlink()
    empty.write_bytes(b"")
    assert main(command) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert f"'real/train/{absent.name}': it is listed, but there is no such file" in said.err
    assert f"'sketch/toe/{empty.name}': the file is empty" in said.err
    assert main([*command, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert len(found["faults"]) == 3
    assert main([*command, "--json", "--set", "dataset.on_bad_image=skip"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["data"]["skipped_images"]) == 2
    assert found["facts"]["training images per domain"].startswith("clipart ")
    assert found["data"]["train"]["images_per_class"].keys() == {
        "t-shirt",
        "The_Eiffel_Tower",
        "toe",
        "train",
    }


def test_check__prints_json_of_a_wrong_configuration_too(learner: list[str], capsys: Capture) -> None:
    assert main(["check", "--dataset", "digitz", *learner, "--json"]) == 2
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [fault.partition(".")[0] for fault in found["faults"]] == ["unknown data set 'digitz'"]
    assert main(["check", "--dataset", "digits", *learner, "--set", "seed=x", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["faults"][0].startswith("seed: 'x' is not allowed")


def test_check__says_what_to_type(learner: list[str], capsys: Capture) -> None:
    """The advice of a part's error is not lost where the faults of all parts are collected."""
    command = ["check", "--dataset", "digits", *learner, "--set", "scenario.extends=run"]
    assert main(command) == 2
    assert "error: scenario.extends needs scenario.num_earlier_tasks. 'vbm-ptm extend' sets both." in (
        capsys.readouterr().err
    )
    assert main([*command, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["faults"][-1].endswith("'vbm-ptm extend' sets both.")


def test_main__shows_the_first_hundred_of_many_problems(
    learner: list[str], tmp_path: Path, capsys: Capture
) -> None:
    arguments = imagenet_r_miniature(tmp_path, num_classes=40)
    for file in (tmp_path / "imagenet-r").rglob("*.jpg"):
        file.write_bytes(b"")
    assert main(["check", *arguments, *learner]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 101
    assert lines[-1] == "error: and 61 more; vbm-ptm check --json lists all"


def test_split__writes_what_gives_the_same_split_anywhere(
    learner: list[str], tmp_path: Path, capsys: Capture
) -> None:
    arguments = imagenet_r_miniature(tmp_path, num_classes=20)
    file = tmp_path / "split.csv"
    command = ["split", *arguments, "--output", str(file)]
    assert main([*command, "--test-fraction", "0.5"]) == 0
    written = capsys.readouterr().out
    again = [*arguments, "--set", f"dataset.split_file={file}"]
    assert main(["check", *again, *learner, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["facts"]
    assert facts["split SHA-256"] in written
    assert facts["held out"] == "nothing"
    assert facts["test images"] == sum(line.split(",")[1] == "test" for line in file.read_text().splitlines())
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    file.unlink()
    assert main(command) == 0
    assert facts["split SHA-256"] not in capsys.readouterr().out


def test_split__refuses_a_fraction_where_nothing_is_held_out(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "split.csv"
    command = ["split", *domainnet(tmp_path), "--output", str(file)]
    assert main([*command, "--test-fraction", "0.3"]) == 2
    assert "has a test split: leave the option out" in capsys.readouterr().err
    assert not file.exists()
    assert main([*command, "--test-fraction", "2"]) == 2
    assert "dataset.test_fraction: '2.0' is not allowed" in capsys.readouterr().err
    assert main(["split", "--output", str(file)]) == 2
    assert "--dataset NAME" in capsys.readouterr().err
