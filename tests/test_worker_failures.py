"""Workers that fail while a command runs: each ends within seconds with a message of its own, and no traceback."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vbm_ptm.cli import main
from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.experiment import run
from vbm_ptm.storage.run_result import read_result

pytestmark = pytest.mark.slow

Tree = dict[str, Any]


def run_short() -> None:
    raise MemoryError


def send(number: signal.Signals) -> Callable[[], None]:
    def kill_myself() -> None:
        os.kill(os.getpid(), number)

    return kill_myself


FAULTS = {
    "killed": (send(signal.SIGKILL), "Killed"),
    "bus error": (send(signal.SIGBUS), "/dev/shm"),
    "no memory": (run_short, "memory was short"),
}


@pytest.fixture(name="fail_once", params=FAULTS)
def _fail_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function after which the first image that a worker loads ends it, and the word that tells why."""
    act, word = FAULTS[request.param]
    image = ImageSplit.image

    def failing(self: ImageSplit, index: int) -> Any:
        if multiprocessing.parent_process() is not None:
            try:
                (tmp_path / "has failed").touch(exist_ok=False)
            except FileExistsError:
                return image(self, index)
            act()
        return image(self, index)

    def arm() -> str:
        monkeypatch.setattr(ImageSplit, "image", failing)
        return word

    return arm


@pytest.fixture(name="tree")
def _tree(toy_tree: Callable[..., Tree]) -> Tree:
    return toy_tree("nearest_mean") | {"data": {"num_workers": 2, "multiprocessing_context": "fork"}}


def as_file(tree: Tree, file: Path) -> Path:
    file.write_text(yaml.safe_dump(tree))
    return file


def assert_says(said: str, word: str) -> None:
    assert word in said
    assert "data.num_workers" in said
    assert "Traceback" not in said


def test_train_and_evaluate__end_where_a_worker_fails(
    fail_once: Callable[[], str], tree: Tree, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run(tree, output=tmp_path / "run")
    word = fail_once()
    started = time.monotonic()
    assert main(["evaluate", str(tmp_path / "run")]) == 1
    assert_says(capfd.readouterr().err, word)
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    (tmp_path / "has failed").unlink()
    train = [
        "train",
        "--config",
        str(as_file(tree, tmp_path / "all.yaml")),
        "--output",
        str(tmp_path / "again"),
    ]
    assert main(train) == 1
    assert_says(capfd.readouterr().err, word)
    assert not (tmp_path / "again").exists()  # nothing was trained yet: what was written is taken back
    assert main([*train, "--resume"]) == 0
    again = read_result(tmp_path / "again/result.json")
    assert again.accuracy_counts == result["accuracy_counts"]
    assert time.monotonic() - started < 60


def test_study__goes_on_with_its_other_runs(
    fail_once: Callable[[], str], tree: Tree, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {key: value for key, value in tree.items() if key not in ("dataset", "learner", "preset")}
    runs = [{"name": name, "learner": "nearest_mean", "preset": "none"} for name in ("one", "two")]
    study = {"dataset": tree["dataset"]["path"], "settings": settings, "runs": runs}
    command = ["study", str(as_file(study, tmp_path / "both.yaml")), "--output", str(tmp_path / "both")]
    word = fail_once()
    assert main(command) == 1
    captured = capfd.readouterr()
    assert_says(captured.err, word)
    assert "WorkerError" in captured.out
    assert (
        not (tmp_path / "both/one/result.json").exists()
        or not read_result(tmp_path / "both/one/result.json").is_finished
    )
    assert read_result(tmp_path / "both/two/result.json").is_finished
    assert main(command) == 0
    assert read_result(tmp_path / "both/one/result.json").is_finished


def test_evaluate__goes_on_where_memory_cannot_be_shared(
    tree: Tree, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    run(tree, output=tmp_path / "run")
    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    captured = capfd.readouterr()
    assert "the same counts as training measured" in captured.out
    assert "/dev/shm is too small" in captured.err
