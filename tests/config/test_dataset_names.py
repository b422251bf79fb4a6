"""What the name of a data set means, and that paths and names are text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from miniatures import write_toy_folder

from vbm_ptm.config.dataset_names import resolve_dataset
from vbm_ptm.config.run_config import compose, dataset_spec, override
from vbm_ptm.data.reading.datasets import load_image_dataset
from vbm_ptm.errors import UsageError


@pytest.mark.parametrize("name", ["digits", "cifar100"])
@pytest.mark.parametrize("form", ["./{}", "{}/", "../here/{}"])
def test_resolve_dataset__takes_what_is_written_as_a_path_as_one(
    name: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    write_toy_folder(here / name, ["own_a", "own_b"])
    monkeypatch.chdir(here)
    given = form.format(name)
    assert load_image_dataset(dataset_spec(given)).class_names == ("own_a", "own_b")
    section: dict[str, Any] = compose(dataset=given).tree["dataset"]
    assert Path(section["path"]).resolve() == here / name
    assert "source" not in section


def test_resolve_dataset__says_which_of_two_a_bare_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    meant = resolve_dataset("digits")
    assert meant.place is None
    assert "digits.yaml" in caplog.text
    assert "./digits" in caplog.text
    caplog.clear()
    (tmp_path / "digits").rmdir()
    resolve_dataset("digits")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_dataset_settings__tell_what_a_name_was_taken_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    ours, place = (
        compose(dataset=name, learner="nearest_mean", overrides=["dataset.name=mine", "scenario.num_tasks=2"])
        for name in ("digits", "./digits")
    )
    assert ours.validate().dataset_settings.endswith("configs/datasets/digits.yaml")
    assert place.validate().dataset_settings == "argument dataset=./digits"


def test_resolve_dataset__a_folder_called_like_a_yaml_file_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set.yaml").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_dataset("set.yaml").place == tmp_path / "set.yaml"
    with pytest.raises(UsageError, match=r"none\.yaml"):
        resolve_dataset("./none.yaml")


def test_source__that_is_a_path_or_a_folder_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hugging Face would read the folder."""
    write_toy_folder(tmp_path / "owner" / "pictures", ["a"])
    monkeypatch.chdir(tmp_path)
    for source in ("owner/pictures", "./owner/none"):
        spec = dataset_spec("cifar100", overrides=[f"dataset.source={source}"])
        with pytest.raises(UsageError, match=r"dataset\.path"):
            load_image_dataset(spec)


@pytest.mark.parametrize(
    "name",
    [
        "set #1",
        "*x",
        "%x",
        "[a]",
        "{a: b}",
        "a: b",
        "'quoted'",
        "&x",
        "!x",
        "- x",
        "@x",
        "| x",
        "?",
        "no",
        " x ",
    ],
)
def test_override__of_a_path_or_a_name_is_text(name: str) -> None:
    for key in ("dataset.path", "dataset.name", "dataset.image_column", "backbone.checkpoint"):
        *_, setting = key.split(".")
        (section,) = override(f"{key}={name}").values()
        assert section[setting] == name


def test_override__null_unsets_what_may_be_unset() -> None:
    assert override("dataset.path=null") == {"dataset": {"path": None}}
    assert override("dataset.name=null") == {"dataset": {"name": "null"}}
    assert override("dataset.expected=null") == {"dataset": {"expected": None}}


def test_override__of_anything_else_keeps_lists_and_mappings() -> None:
    assert override("dataset.domains=[real, 'a, b']") == {"dataset": {"domains": ["real", "a, b"]}}
    assert override("a.b={c: 1}") == {"a": {"b": {"c": "1"}}}
    assert override("dataset.train_list=a #1.txt") == {"dataset": {"train_list": "a #1.txt"}}
    assert override("a.b= 5 ") == {"a": {"b": "5"}}
    with pytest.raises(UsageError, match="not valid YAML"):
        override("a.b=[1, 2")


def test_path__of_a_tilde_is_a_home_and_of_a_dot_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for given, meant in (("~/x", "x"), ("./~x", "~x"), ("x/../y", "x/../y")):
        assert dataset_spec("digits", overrides=[f"dataset.path={given}"]).path == tmp_path / meant
    assert resolve_dataset("./~x").place == tmp_path / "~x"
    with pytest.raises(UsageError, match=r"\./~nobody_here"):
        resolve_dataset("~nobody_here")


@pytest.mark.parametrize("key", ["dataset.path", "dataset.split_file", "backbone.checkpoint"])
def test_path__that_is_empty_is_not_the_current_directory(key: str) -> None:
    """As where a variable of the shell is not set."""
    composed = compose(
        dataset="digits", learner="nearest_mean", overrides=["scenario.num_tasks=2", f"{key}="]
    )
    with pytest.raises(UsageError, match=f"{key}.*empty"):
        composed.validate()
