"""The folder of one run: who may write it, and what is read back from it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vbm_ptm.config.run_config import RunConfig, compose
from vbm_ptm.errors import TrainingInterrupted, UsageError
from vbm_ptm.runs.directory import RunDirectory

Tree = dict[str, Any]


@pytest.fixture
def config(toy_tree: Callable[..., Tree]) -> RunConfig:
    return compose(tree=toy_tree()).validate()


def merged(tree: Tree, sections: dict[str, Tree]) -> Tree:
    return tree | {name: tree[name] | settings for name, settings in sections.items()}


def changed(config: RunConfig, *overrides: str) -> RunConfig:
    return compose(tree=config.model_dump(mode="json"), overrides=overrides).validate()


@pytest.fixture
def written(config: RunConfig, tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "runs" / "one")
    with directory.claimed(config, resume=False):
        pass
    return directory


def test_claimed__makes_the_folder_and_writes_the_configuration(
    written: RunDirectory, config: RunConfig
) -> None:
    assert sorted(os.listdir(written.path)) == [".lock", "config.yaml"]
    assert written.config().model_dump() == config.model_dump()
    assert written.result() is None


def test_claimed__keeps_what_the_run_was_started_with(written: RunDirectory, config: RunConfig) -> None:
    before = (written.path / "config.yaml").read_bytes()
    with written.claimed(changed(config, "data.num_workers=2"), resume=True):
        assert (written.path / "config.yaml").read_bytes() == before


def test_claimed__has_one_writer_at_a_time(written: RunDirectory, config: RunConfig) -> None:
    with written.claimed(config, resume=True):
        other = RunDirectory(written.path)
        with pytest.raises(UsageError, match="is in use by another run"), other.claimed(config, resume=True):
            pytest.fail("two writers")
    with written.claimed(config, resume=True):
        pass


def test_claimed__releases_the_lock_after_an_error(written: RunDirectory, config: RunConfig) -> None:
    def fail() -> None:
        with written.claimed(config, resume=True):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    with written.claimed(config, resume=True):
        pass


def fail(
    directory: RunDirectory,
    config: RunConfig,
    event: str,
    *,
    resume: bool = False,
    error: Exception | None = None,
    other_file: str = ".lock",
) -> None:
    error = error or UsageError("a column twice")

    def write() -> None:
        (directory.path / "log.jsonl").write_text(json.dumps({"event": event}) + "\n")
        (directory.path / "result.json").write_text("{}")
        (directory.path / "checkpoints").mkdir(exist_ok=True)
        (directory.path / other_file).write_text("mine")
        raise error

    with pytest.raises(type(error), match="twice"), directory.claimed(config, resume=resume):
        write()


@pytest.mark.parametrize(
    "error", [UsageError("twice"), TypeError("given twice"), FloatingPointError("twice")]
)
def test_claimed__leaves_nothing_of_a_run_that_fails_before_it_keeps_anything(
    config: RunConfig, tmp_path: Path, error: Exception
) -> None:
    directory = RunDirectory(tmp_path / "label" / "one")
    fail(directory, config, "begin_task", error=error)
    assert os.listdir(tmp_path) == []


def test_claimed__leaves_a_run_that_has_kept_something_or_was_interrupted(
    config: RunConfig, tmp_path: Path
) -> None:
    fail(RunDirectory(tmp_path / "one"), config, "step")
    assert (tmp_path / "one" / "log.jsonl").exists()
    fail(RunDirectory(tmp_path / "one"), config, "begin_task", resume=True)
    assert (tmp_path / "one" / "log.jsonl").exists()
    fail(RunDirectory(tmp_path / "two"), config, "begin_task", error=TrainingInterrupted(143, "twice"))
    assert (tmp_path / "two" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["empty", "link", "."])
def test_claimed__leaves_a_folder_that_was_there_before(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "empty").mkdir(mode=0o750)
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "empty" if name == "." else tmp_path)
    fail(RunDirectory(Path(name)), config, "begin_task")
    assert (tmp_path / "link").readlink() == tmp_path / "empty"
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o750
    with RunDirectory(Path(name)).claimed(config, resume=False):
        assert (tmp_path / "empty" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["out.txt", "checkpoints/notes.txt"])
def test_claimed__leaves_files_of_others(config: RunConfig, tmp_path: Path, name: str) -> None:
    directory = RunDirectory(tmp_path / "one")
    fail(directory, config, "begin_task", other_file=name)
    assert (directory.path / name).read_text() == "mine"
    assert directory.config() is not None  # so that it can be resumed


def test_claimed__takes_back_the_folders_that_it_made_however_they_were_named(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("missing/../mine/one", "missing/../missing/one", "./new/one"):
        fail(RunDirectory(Path(name)), config, "begin_task")
        assert os.listdir(tmp_path) == ["mine"]


def test_claimed__masks_no_error_where_the_folder_is_gone(config: RunConfig, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "one")

    def lose() -> None:
        shutil.rmtree(directory.path)
        raise UsageError("a column twice")

    with pytest.raises(UsageError, match="twice"), directory.claimed(config, resume=False):
        lose()


def test_claimed__waits_for_who_asks_whether_the_run_is_alive(
    written: RunDirectory, config: RunConfig
) -> None:
    with (written.path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        timer = threading.Timer(0.15, fcntl.flock, (lock, fcntl.LOCK_UN))
        timer.start()
        with written.claimed(config, resume=True):
            pass
        timer.join()


def test_claimed__never_leaves_half_a_configuration(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path / "run")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("vbm_ptm.storage.durable_files.os.fsync", full)
        with pytest.raises(OSError, match="No space left"), directory.claimed(config, resume=False):
            pytest.fail("claimed without a configuration")
    assert not (directory.path / "config.yaml").exists()
    with directory.claimed(config, resume=False):
        assert directory.config() is not None


@pytest.mark.parametrize(
    "override",
    [
        *("data.num_workers=1", "data.evaluation_batch_size=7", "checkpoint.keep=all", "device=cpu"),
        *("dataset.verify=none", "backbone.gradient_checkpointing=true", "trainer.rank_timeout_minutes=3"),
        *("dataset.path=/elsewhere", "backbone.checkpoint=/elsewhere.safetensors"),
    ],
)
def test_check__permits_what_changes_no_number(
    override: str, written: RunDirectory, config: RunConfig
) -> None:
    written.check(changed(config, override), resume=True)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("seed=7", "seed: 1993 against 7"),
        ("dataset.transforms.horizontal_flip=0", "dataset.transforms.horizontal_flip: 0.5 against 0.0"),
        ("trainer.mixed_precision=bf16", "trainer.mixed_precision: no against bf16"),
        ("trainer.compile=true", "trainer.compile: false against true"),
        ("scenario.class_order_seed=3", "scenario.class_order_seed: 1993 against 3"),
    ],
)
def test_check__lists_what_differs(
    override: str, line: str, written: RunDirectory, config: RunConfig
) -> None:
    with pytest.raises(UsageError, match="was started with another configuration") as raised:
        written.check(changed(config, override), resume=True)
    assert line in str(raised.value)
    assert ";" not in str(raised.value).partition("(stored against given)")[2].partition(". Resume")[0]


def test_check__takes_new_empty_and_abandoned_folders(config: RunConfig, tmp_path: Path) -> None:
    for names in ([], [".lock"], [".lock", ".config.yaml.partial"]):
        folder = tmp_path / str(len(names))
        RunDirectory(folder).check(config, resume=False)
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        RunDirectory(folder).check(config, resume=False)
        RunDirectory(folder).check(config, resume=True)


def test_check__refuses_a_place_without_permission(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(UsageError, match=f"no permission to write in {tmp_path}"):
        RunDirectory(tmp_path / "a" / "b").check(config, resume=False)


def test_result__is_read_or_told_to_be_damaged(written: RunDirectory) -> None:
    file = written.path / "result.json"
    values = json.loads((Path(__file__).parents[1] / "storage" / "result.json").read_text())
    values["class_names"][0] = "café"
    file.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    result = written.result()
    assert result is not None
    assert (result.status, result.class_names[0]) == ("finished", "café")
    file.write_text('{"status": ')
    with pytest.raises(UsageError, match=r"result\.json is damaged"):
        written.result()


def test_config__belongs_to_a_run(tmp_path: Path, written: RunDirectory) -> None:
    with pytest.raises(UsageError, match=r"is not a run directory: it has no config\.yaml"):
        RunDirectory(tmp_path).config()
    with pytest.raises(UsageError, match="has no finished task yet"):
        written.checkpoint()
    shutil.copy(written.path / "config.yaml", tmp_path / "config.yaml")
    with (tmp_path / "config.yaml").open("a") as file:
        file.write("sed: 3\n")
    with pytest.raises(UsageError, match="Did you mean 'seed'") as raised:
        RunDirectory(tmp_path).config()
    assert str(tmp_path / "config.yaml") in str(raised.value)


def test_check__says_why_an_existing_folder_is_not_that_of_the_run(
    written: RunDirectory, config: RunConfig
) -> None:
    with pytest.raises(UsageError, match=r"exists already"):
        written.check(config, resume=False)
    other = changed(config, "optimization.epochs=7")
    with pytest.raises(
        UsageError, match=r"optimization\.epochs: 2 against 7\. Give this run a folder of its own"
    ):
        written.check(other, resume=False)
    with pytest.raises(UsageError, match="was started with another configuration"):
        written.check(other, resume=True)
    sections = {"optimization": {"epochs": 9, "batch_size": 24, "learning_rate": 1.0, "momentum": 0.1}}
    names = {
        "dataset": {"name": "x", "path": "/x", "image_column": "y", "label_column": "y", "domain_column": "y"}
    }
    tree = config.model_dump(mode="json") | {"seed": 1, "preset": "embedded"}
    other = compose(tree=merged(tree, sections | names)).validate()
    with pytest.raises(UsageError, match=r"; and 1 more\. Give"):
        written.check(other, resume=False)


def test_claimed__waits_for_the_loader_workers_of_a_run_that_was_killed(
    written: RunDirectory, config: RunConfig
) -> None:
    """They share its lock, and need some seconds to see that it is gone."""
    program = (
        "import fcntl, os, subprocess\n"
        f"lock = open({str(written.path / '.lock')!r}, 'a+')\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "lock.truncate(0); lock.write(str(os.getpid())); lock.flush()\n"
        "subprocess.Popen(['sleep', '1'], pass_fds=[lock.fileno()])\n"
        "os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", program])
    with (written.path / ".lock").open("a+") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with written.claimed(config, resume=True):
        assert (written.path / ".lock").read_text() == str(os.getpid())


@pytest.mark.parametrize("text", ["", "{}", "dataset: {name: a}"])
def test_config__that_has_lost_its_text_is_called_damaged(text: str, written: RunDirectory) -> None:
    (written.path / "config.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"config\.yaml is damaged.*result\.json"):
        written.config()


def test_config__stored_without_a_precision_was_in_fp32(written: RunDirectory, config: RunConfig) -> None:
    file = written.path / "config.yaml"
    file.write_text(file.read_text().replace("  mixed_precision: 'no'\n", ""))
    assert "mixed_precision" not in file.read_text()
    assert written.config().trainer.mixed_precision == "no"
    written.check(config.with_precision("auto"), resume=True)
    with pytest.raises(UsageError, match="no against bf16"):
        written.check(config.with_precision("bf16"), resume=True)
