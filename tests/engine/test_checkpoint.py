"""Checkpoints: exact, whole or not there, small, and without a pickle."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from vbm_ptm.backbones.vit import WeightsRecord
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.checkpoint import FORMAT_VERSION, Checkpoint, CheckpointStore, restore, write_json
from vbm_ptm.errors import UsageError
from vbm_ptm.learners.base import Learner, TaskStatistics
from vbm_ptm.randomness import seeded

TASKS = tuple(Task(index, (index,), (index,), index + 1) for index in range(4))
STATE = {"tasks": [asdict(task) for task in TASKS], "note": "Grüße"}
IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
NewLearner = Callable[..., Learner]


def live_through(learner: Learner, task: Task) -> None:
    """Begin a task and leave statistics behind, without training."""
    with seeded(task.index):
        learner.begin_task(task)
        learner.statistics[str(task.index)] = TaskStatistics(
            {"mean": torch.randn(4), "empty": torch.zeros(0, 4)}
        )


def saved_run(new_learner: NewLearner, directory: Path, *, tasks: int = 2, **options: Any) -> CheckpointStore:
    store, learner = CheckpointStore(directory, **options), new_learner("nearest_mean")
    for task in TASKS[:tasks]:
        live_through(learner, task)
        store.save(learner, STATE)
    return store


def read(store: CheckpointStore, task_index: int | None = None) -> Checkpoint:
    checkpoint = store.read(task_index)
    assert checkpoint is not None
    return checkpoint


def files_under(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def names_in(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as content:
        assert content.metadata() is None  # several entries would be written in random order
        return set(content.keys())


@pytest.mark.parametrize("name", ["finetune", "nearest_mean"])
def test_checkpoint__brings_everything_back(new_learner: NewLearner, tmp_path: Path, name: str) -> None:
    store, learner = CheckpointStore(tmp_path), new_learner(name)
    for task in TASKS[:3]:
        live_through(learner, task)
        store.save(learner, STATE | {"tasks_done": task.index + 1})
    checkpoint = read(store)
    assert checkpoint.task_index == 2
    assert checkpoint.state["tasks_done"] == 3
    assert checkpoint.state["note"] == "Grüße"
    restored = new_learner(name)
    restore(restored, checkpoint)
    assert restored.tasks == list(TASKS[:3])
    expected, found = learner.state_dict(), restored.state_dict()
    assert list(expected) == list(found)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert restored.finished_shapes(TASKS[1]) == {"mean": [4], "empty": [0, 4]}


def test_checkpoint__of_an_earlier_task_knows_nothing_of_later_ones(
    new_learner: NewLearner, tmp_path: Path
) -> None:
    store, learner = CheckpointStore(tmp_path), new_learner("finetune")
    states = []
    for task in TASKS[:3]:
        live_through(learner, task)
        store.save(learner, STATE)
        states.append({key: tensor.clone() for key, tensor in learner.state_dict().items()})
    restored = new_learner("finetune")
    restore(restored, read(store, 1))
    assert restored.tasks == list(TASKS[:2])
    found = restored.state_dict()
    assert list(found) == list(states[1])
    assert all(torch.equal(found[key], states[1][key]) for key in found)


def test_checkpoint__equal_tensors_give_equal_bytes(new_learner: NewLearner, tmp_path: Path) -> None:
    for name in ("one", "two"):
        saved_run(new_learner, tmp_path / name, tasks=3)
    assert files_under(tmp_path / "one") == files_under(tmp_path / "two")


def test_checkpoint__holds_safetensors_and_json_only(new_learner: NewLearner, tmp_path: Path) -> None:
    saved_run(new_learner, tmp_path)
    assert list(files_under(tmp_path)) == [
        "statistics/task_00.safetensors",
        "statistics/task_01.safetensors",
        "task_00/learner.safetensors",
        "task_00/state.json",
        "task_01/learner.safetensors",
        "task_01/state.json",
    ]


def test_checkpoint__writes_statistics_once(new_learner: NewLearner, tmp_path: Path) -> None:
    saved_run(new_learner, tmp_path / "short", tasks=1)
    store = saved_run(new_learner, tmp_path / "long", tasks=3)
    first = tmp_path / "long" / "statistics" / "task_00.safetensors"
    assert names_in(first) == {"statistics.0.mean", "statistics.0.empty"}
    assert first.read_bytes() == (tmp_path / "short" / "statistics" / "task_00.safetensors").read_bytes()
    assert names_in(first.with_name("task_02.safetensors")) == {"statistics.2.mean", "statistics.2.empty"}
    inode = first.stat().st_ino  # a file that is written again gets another one
    learner = new_learner("nearest_mean")
    restore(learner, read(store))
    live_through(learner, TASKS[3])
    checkpoint = store.save(learner, STATE)
    assert first.stat().st_ino == inode
    assert names_in(tmp_path / "long" / "task_03" / "learner.safetensors") == set()
    assert len(checkpoint.state["files"]) == 5


def test_checkpoint__names_task_10_after_task_1(new_learner: NewLearner, tmp_path: Path) -> None:
    """Statistics of task 1 and task 10 must not be mistaken for each other."""
    store, learner = CheckpointStore(tmp_path), new_learner("nearest_mean", num_tasks=12)
    tasks = [Task(index, (index,), (index,), index + 1) for index in range(12)]
    for task in tasks:
        live_through(learner, task)
        store.save(learner, {"tasks": [asdict(one) for one in tasks]})
    assert store.tasks() == list(range(12))
    assert names_in(tmp_path / "statistics" / "task_01.safetensors") == {
        "statistics.1.mean",
        "statistics.1.empty",
    }
    restored = new_learner("nearest_mean", num_tasks=12)
    restore(restored, read(store))
    assert torch.equal(restored.statistics_of(tasks[10])["mean"], learner.statistics_of(tasks[10])["mean"])


@pytest.mark.parametrize("name", ["finetune", "nearest_mean"])
def test_checkpoint__leaves_a_frozen_backbone_out(new_learner: NewLearner, tmp_path: Path, name: str) -> None:
    learner = new_learner(name)
    live_through(learner, TASKS[0])
    checkpoint = CheckpointStore(tmp_path).save(learner, STATE)
    stored = {key for key in checkpoint.tensors() if key.startswith("backbone.")}
    expected = set() if name == "nearest_mean" else {key for key in learner.state_dict() if "backbone" in key}
    assert stored == expected


def test_checkpoint__refuses_other_weights(new_learner: NewLearner, tmp_path: Path) -> None:
    def with_weights(digest: str) -> Learner:
        learner = new_learner("nearest_mean")
        learner.backbone.weights = WeightsRecord("vit", "vit.tag", "vit.safetensors", digest)
        return learner

    learner = with_weights("a" * 64)
    live_through(learner, TASKS[0])
    checkpoint = CheckpointStore(tmp_path).save(learner, STATE)
    assert checkpoint.state["weights_sha256"] == "a" * 64
    restore(with_weights("a" * 64), checkpoint)
    for other in (with_weights("b" * 64), new_learner("nearest_mean")):
        with pytest.raises(UsageError, match=r"pre-trained weights of SHA-256 aaaa.*backbone.checkpoint"):
            restore(other, checkpoint)
        assert other.tasks == []


@pytest.mark.parametrize("file", ["task_01/learner.safetensors", "statistics/task_00.safetensors"])
@pytest.mark.parametrize("damage", ["bit", "truncated", "empty", "missing"])
def test_checkpoint__names_the_damaged_file(
    new_learner: NewLearner, tmp_path: Path, file: str, damage: str
) -> None:
    store = saved_run(new_learner, tmp_path)
    path = tmp_path / file
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[-1] ^= 1
        path.write_bytes(content)
    elif damage == "truncated":
        path.write_bytes(content[:-1])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    checkpoint = read(store)
    learner = new_learner("nearest_mean")
    word = "damaged" if damage in ("bit", "truncated") else "missing or empty"
    with pytest.raises(UsageError, match=f"{file.split('/')[1]} is {word}"):
        restore(learner, checkpoint)
    assert learner.tasks == []


@pytest.mark.parametrize("content", ["", "{", '{"format_version": 1', "null", "[1]", None])
def test_read__names_an_unreadable_state(
    new_learner: NewLearner, tmp_path: Path, content: str | None
) -> None:
    store = saved_run(new_learner, tmp_path)
    state = tmp_path / "task_01" / "state.json"
    if content is None:
        state.unlink()
    else:
        state.write_text(content)
    with pytest.raises(UsageError, match=r"task_01 cannot be read.*Remove it"):
        store.read()
    assert read(store, 0).task_index == 0


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, None])
def test_read__refuses_another_format(new_learner: NewLearner, tmp_path: Path, version: int | None) -> None:
    store = saved_run(new_learner, tmp_path)
    state = tmp_path / "task_01" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format_version": version}))
    with pytest.raises(
        UsageError, match=f"format version {version}; this version of vbm_ptm reads version {FORMAT_VERSION}"
    ):
        store.read()


def test_read__knows_what_is_there(new_learner: NewLearner, tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "absent").read() is None
    assert CheckpointStore(tmp_path / "absent").tasks() == []
    store = saved_run(new_learner, tmp_path, tasks=3)
    assert store.tasks() == [0, 1, 2]
    with pytest.raises(UsageError, match=r"no checkpoint of task 7 in .*There are: 0, 1, 2\."):
        store.read(7)


@pytest.mark.parametrize(
    ("name", "keep", "expected"),
    [
        ("nearest_mean", "auto", [0, 1, 2, 3]),
        ("finetune", "auto", [2, 3]),
        ("finetune", "all", [0, 1, 2, 3]),
        ("nearest_mean", "last", [2, 3]),
    ],
)
def test_checkpoint__keeps_what_it_is_told(
    new_learner: NewLearner, tmp_path: Path, name: str, keep: Any, expected: list[int]
) -> None:
    store, learner = CheckpointStore(tmp_path, keep=keep), new_learner(name)
    for task in TASKS:
        live_through(learner, task)
        store.save(learner, STATE)
    assert store.tasks() == expected
    restored = new_learner(name)
    restore(restored, read(store, expected[0]))  # its statistics are still there
    assert len(restored.tasks) == expected[0] + 1


@pytest.mark.parametrize("stage", ["fsync of a file", "rename"])
def test_checkpoint__that_was_cut_off_leaves_the_one_before(
    new_learner: NewLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    store = saved_run(new_learner, tmp_path, tasks=1)
    before = files_under(tmp_path)
    learner = new_learner("nearest_mean")
    restore(learner, read(store))
    live_through(learner, TASKS[1])

    class PowerCut(BaseException):
        pass

    def cut(*args: Any) -> None:
        raise PowerCut

    with monkeypatch.context() as patch:
        if stage == "rename":
            patch.setattr(Path, "rename", cut)
        else:
            patch.setattr("vbm_ptm.engine.checkpoint.os.fsync", cut)
        with pytest.raises(PowerCut):
            store.save(copy.deepcopy(learner), STATE)
    assert store.tasks() == [0]
    assert {name: files_under(tmp_path)[name] for name in before} == before
    store.save(learner, STATE)  # over what was left behind
    assert store.tasks() == [0, 1]
    assert not [name for name in files_under(tmp_path) if "partial" in name]
    restore(new_learner("nearest_mean"), read(store))


def test_checkpoint__records_the_hash_of_every_file(new_learner: NewLearner, tmp_path: Path) -> None:
    saved_run(new_learner, tmp_path)
    recorded = json.loads((tmp_path / "task_01" / "state.json").read_text())["files"]
    assert set(recorded) == {
        "statistics/task_00.safetensors",
        "statistics/task_01.safetensors",
        "task_01/learner.safetensors",
    }
    for name, digest in recorded.items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest


def test_write_json__replaces_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "result.json"
    write_json(path, {"name": "Tür"})
    write_json(path, {"name": "Tür", "values": [1, 2]})
    assert json.loads(path.read_text(encoding="utf-8")) == {"name": "Tür", "values": [1, 2]}
    assert "Tür" in path.read_text(encoding="utf-8")
    assert [child.name for child in path.parent.iterdir()] == ["result.json"]
