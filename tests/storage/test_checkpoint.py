"""Checkpoints: exact, whole or not there, small, and without a pickle."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from vbm_ptm.backbones import WeightsRecord
from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import TrainingError, UsageError
from vbm_ptm.learners.base import Learner, TaskStatistics
from vbm_ptm.randomness import seeded
from vbm_ptm.storage.checkpoint import Checkpoint, CheckpointStore, read_checkpoint, restore
from vbm_ptm.storage.checkpoint_state import FORMAT_VERSION, RunState
from vbm_ptm.storage.task_position import ReadingsPosition, TaskPosition

TASKS = tuple(Task(index, (index,), (index,), index + 1) for index in range(4))
STATE = RunState(
    class_names=("Grüße", "Mütze", "Öl", "Tür"),
    split_sha256="b" * 64,
    held_out=None,
    num_planned_tasks=4,
    tasks=TASKS,
    evaluation_tasks=TASKS,
    matrix={"rows": []},
    records=(),
    log_position=0,
    gradient_scaler=None,
    num_ranks=1,
    num_threads=1,
)
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
    learner = new_learner("nearest_mean")
    store = CheckpointStore(directory, fresh=learner, **options)
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
    learner = new_learner(name)
    store = CheckpointStore(tmp_path, fresh=learner)
    for task in TASKS[:3]:
        live_through(learner, task)
        store.save(learner, STATE.model_copy(update={"log_position": task.index + 1}))
    checkpoint = read(store)
    assert checkpoint.task_index == 2
    assert checkpoint.state.log_position == 3
    assert checkpoint.state.class_names[0] == "Grüße"
    assert checkpoint.state.tasks == TASKS
    restored = new_learner(name)
    restore(restored, checkpoint)
    assert restored.tasks == list(TASKS[:3])
    expected, found = learner.state_dict(), restored.state_dict()
    assert set(expected) == set(found)
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    kept = {key: tuple(tensor.shape) for key, tensor in restored.statistics_of(TASKS[1]).items()}
    assert kept == {"mean": (4,), "empty": (0, 4)}


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
    assert set(found) == set(states[1])
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
        "task_00/SHA256SUMS",
        "task_00/learner.safetensors",
        "task_00/state.json",
        "task_01/SHA256SUMS",
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
    assert len(checkpoint.state.files) == 5


def test_checkpoint__names_task_10_after_task_1(new_learner: NewLearner, tmp_path: Path) -> None:
    """Statistics of task 1 and task 10 must not be mistaken for each other."""
    store, learner = CheckpointStore(tmp_path), new_learner("nearest_mean", num_tasks=12)
    tasks = [Task(index, (index,), (index,), index + 1) for index in range(12)]
    for task in tasks:
        live_through(learner, task)
        store.save(learner, STATE.model_copy(update={"tasks": tuple(tasks)}))
    assert store.tasks() == list(range(12))
    assert names_in(tmp_path / "statistics" / "task_01.safetensors") == {
        "statistics.1.mean",
        "statistics.1.empty",
    }
    restored = new_learner("nearest_mean", num_tasks=12)
    restore(restored, read(store))
    assert torch.equal(restored.statistics_of(tasks[10])["mean"], learner.statistics_of(tasks[10])["mean"])


@pytest.mark.parametrize("name", ["finetune", "nearest_mean"])
def test_checkpoint__holds_of_the_backbone_what_has_changed(
    new_learner: NewLearner, tmp_path: Path, name: str
) -> None:
    """Frozen or not, and on its way from task to task; without a fresh learner everything is stored."""
    learner = new_learner(name)
    store = CheckpointStore(tmp_path / "parts", fresh=learner)
    live_through(learner, TASKS[0])
    names = {key for key in learner.state_dict() if key.startswith("backbone.")}
    for task, changed in enumerate(("norm.weight", "blocks.1.attn.qkv.bias")):
        if task:
            live_through(learner, TASKS[task])
        with torch.no_grad():
            learner.backbone.vit.get_parameter(changed).add_(0.1)
        checkpoint = store.save(learner, STATE)
        stored = {key.removeprefix("backbone.vit.") for key in checkpoint.tensors() if key in names}
        assert stored == {"norm.weight", changed}
        restored = new_learner(name)
        restore(restored, read(store, task))
        found = restored.state_dict()
        assert all(torch.equal(tensor, found[key]) for key, tensor in learner.state_dict().items())
    whole = CheckpointStore(tmp_path / "whole").save(learner, STATE)
    assert names <= set(whole.tensors())
    assert whole.state.left_out_sha256 is None
    restore(new_learner(name), whole)


def test_checkpoint__of_slow_norms_and_biases_is_small(new_learner: NewLearner, tmp_path: Path) -> None:
    learner = new_learner("slca_pp", drift="none")
    store = CheckpointStore(tmp_path, fresh=learner)
    live_through(learner, TASKS[0])
    with torch.no_grad():
        for parameter in learner.backbone.parameters():
            parameter.add_(0.1 * parameter.requires_grad)
    tensors = store.save(learner, STATE).tensors()
    trained = {name for name, each in learner.backbone.named_parameters() if each.requires_grad}
    assert {name.removeprefix("backbone.") for name in tensors if name.startswith("backbone.")} == trained
    assert not any(name.endswith("qkv.weight") for name in trained)
    assert "vit.cls_token" in trained


def test_restore__refuses_other_tensors_in_place_of_what_was_left_out(
    new_learner: NewLearner, tmp_path: Path
) -> None:
    checkpoint = read(saved_run(new_learner, tmp_path))
    other = new_learner("nearest_mean")
    with torch.no_grad():
        other.backbone.vit.pos_embed.mul_(1.001)
    with pytest.raises(UsageError, match=r"leaves out .* makes other tensors from the same weights"):
        restore(other, checkpoint)
    assert other.tasks == []


def test_checkpoint__refuses_other_weights(new_learner: NewLearner, tmp_path: Path) -> None:
    def with_weights(digest: str) -> Learner:
        learner = new_learner("nearest_mean")
        learner.backbone.weights = WeightsRecord("vit", "vit.tag", "vit.safetensors", digest)
        return learner

    learner = with_weights("a" * 64)
    live_through(learner, TASKS[0])
    checkpoint = CheckpointStore(tmp_path).save(learner, STATE)
    assert checkpoint.state.weights_sha256 == "a" * 64
    restore(with_weights("a" * 64), checkpoint)
    for other in (with_weights("b" * 64), new_learner("nearest_mean")):
        with pytest.raises(UsageError, match=r"pre-trained weights of SHA-256 aaaa.*backbone.checkpoint"):
            restore(other, checkpoint)
        assert other.tasks == []


FILES = [
    "task_01/learner.safetensors",
    "task_01/state.json",
    "task_01/SHA256SUMS",
    "statistics/task_00.safetensors",
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "damage", ["first bit", "middle bit", "last bit", "truncated", "half", "empty", "missing"]
)
def test_checkpoint__names_the_damaged_file(
    new_learner: NewLearner, tmp_path: Path, file: str, damage: str
) -> None:
    store = saved_run(new_learner, tmp_path)
    read(store).verify()
    path = tmp_path / file
    content = bytearray(path.read_bytes())
    places = {"first bit": 0, "middle bit": len(content) // 2, "last bit": -1}
    if damage in places:
        content[places[damage]] ^= 1
        path.write_bytes(content)
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: {"truncated": -1, "half": len(content) // 2, "empty": 0}[damage]])
    # Damaged sums speak of the files whose sums they are.
    named = r"\S+" if "SUMS" in file else file
    word = "missing or empty" if damage in ("missing", "empty") else "damaged"
    word = r"(damaged|missing or empty)" if "SUMS" in file else word
    learner = new_learner("nearest_mean")
    with pytest.raises(UsageError, match=rf"{named} is {word}") as caught:
        read(store).verify()
    assert caught.value.advice == "skip_damaged"
    with pytest.raises(UsageError):
        restore(learner, read(store))
    assert learner.tasks == []
    assert read(store, 0).task_index == 0


def test_verify__says_which_files_do_not_belong_there(
    new_learner: NewLearner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = saved_run(new_learner, tmp_path)
    (tmp_path / "task_01" / "random_states_0.pkl").write_bytes(b"")
    read(store).verify()
    assert "random_states_0.pkl" in caplog.text


def rewrite_state(directory: Path, **changes: Any) -> None:
    """Change a state as somebody would who also writes its sum anew."""
    state, sums = directory / "state.json", directory / "SHA256SUMS"
    before = hashlib.sha256(state.read_bytes()).hexdigest()
    state.write_text(json.dumps(json.loads(state.read_text()) | changes))
    sums.write_text(sums.read_text().replace(before, hashlib.sha256(state.read_bytes()).hexdigest()))


@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": 5},
        # Version 4 had the shapes of what tasks leave behind in place of how many are finished.
        {"format_version": 4, "num_finished": None, "finished_shapes": [{}, {}]},
    ],
)
def test_read__takes_the_versions_before(
    new_learner: NewLearner, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """They left out a frozen backbone without a fingerprint."""
    store = saved_run(new_learner, tmp_path)
    rewrite_state(tmp_path / "task_01", left_out_sha256=None, **changes)
    checkpoint = read(store)
    assert (checkpoint.is_finished, checkpoint.state.num_finished) == (True, 2)
    restored = new_learner("nearest_mean")
    restore(restored, checkpoint)
    assert len(restored.tasks) == 2


@pytest.mark.parametrize("version", [0, 3, FORMAT_VERSION + 1])
@pytest.mark.parametrize("has_sums", [True, False])
def test_read__refuses_another_format(
    new_learner: NewLearner, tmp_path: Path, version: int, has_sums: bool
) -> None:
    store = saved_run(new_learner, tmp_path)
    rewrite_state(tmp_path / "task_01", format_version=version)
    if not has_sums:  # as before version 4
        (tmp_path / "task_01" / "SHA256SUMS").unlink()
    with pytest.raises(
        UsageError,
        match=f"format version {version}; this version of vbm_ptm reads versions 4, 5, {FORMAT_VERSION}",
    ):
        store.read()
    assert read(store, 0).task_index == 0


def test_read__names_the_file_that_is_missing(new_learner: NewLearner, tmp_path: Path) -> None:
    store = saved_run(new_learner, tmp_path)
    (tmp_path / "task_01" / "SHA256SUMS").unlink()
    with pytest.raises(UsageError, match=r"task_01/SHA256SUMS is missing") as raised:
        store.read()
    assert "state.json" not in str(raised.value)


def test_read__knows_what_is_there(new_learner: NewLearner, tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "absent").read() is None
    assert CheckpointStore(tmp_path / "absent").tasks() == []
    store = saved_run(new_learner, tmp_path, tasks=3)
    assert store.tasks() == [0, 1, 2]
    with pytest.raises(UsageError, match=r"no checkpoint of task 8 in .*There are: 1, 2, 3\."):
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
    learner = new_learner(name)
    store = CheckpointStore(tmp_path, keep=keep, fresh=learner)
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
            patch.setattr("vbm_ptm.storage.durable_files.os.fsync", cut)
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
    lines = (tmp_path / "task_01" / "SHA256SUMS").read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == [
        "../statistics/task_00.safetensors",
        "../statistics/task_01.safetensors",
        "learner.safetensors",
        "state.json",
    ]
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "task_01", check=True)


OPTIMIZER = {"momentum/heads.0.weight": torch.randn(3, 4), "step/heads.0.weight": torch.tensor(7.0)}


class TestInsideATask:
    """Checkpoints between two steps."""

    def begun(self, new_learner: NewLearner, directory: Path) -> tuple[CheckpointStore, Learner]:
        store, learner = CheckpointStore(directory, config={"seed": 3}), new_learner("finetune")
        live_through(learner, TASKS[0])
        store.save(learner, STATE)
        with seeded(1):
            learner.begin_task(TASKS[1])
        return store, learner

    def save(self, store: CheckpointStore, learner: Learner, num_steps: int, **optimizer: Any) -> None:
        position = TaskPosition(
            epoch=1,
            step=2,
            num_steps=num_steps,
            seconds=0.5,
            frozen_sha256="",
            readings=ReadingsPosition(epoch={}, num_epoch_steps=0, tracker_step=3, num_skipped=0),
            measures={"retention": None},
        )
        state = STATE.model_copy(update={"training": position})
        store.save_inside_task(
            learner, state, num_steps=num_steps, optimizer=optimizer.get("optimizer", OPTIMIZER)
        )

    def test_bring_everything_back(self, new_learner: NewLearner, tmp_path: Path) -> None:
        store, learner = self.begun(new_learner, tmp_path)
        self.save(store, learner, 12)
        path = store.newest_first()[0]
        assert path.name == "last_000012"
        checkpoint = read_checkpoint(path)
        checkpoint.verify()
        assert (checkpoint.task_index, checkpoint.is_finished) == (1, False)
        assert (read(store).task_index, read(store).is_finished) == (0, True)
        assert checkpoint.state.config == {"seed": 3}
        stored = checkpoint.optimizer_tensors()
        assert set(stored) == set(OPTIMIZER)
        assert all(torch.equal(stored[name], tensor) for name, tensor in OPTIMIZER.items())
        restored = new_learner("finetune")
        restore(restored, checkpoint)
        assert restored.tasks == list(TASKS[:2])
        expected, found = learner.state_dict(), restored.state_dict()
        assert set(expected) == set(found)
        assert all(torch.equal(expected[key], found[key]) for key in expected)
        assert checkpoint.state.training is not None
        assert (checkpoint.state.training.num_steps, checkpoint.state.training.readings.tracker_step) == (
            12,
            3,
        )

    def test_two_of_them_stay_until_the_task_is_saved(self, new_learner: NewLearner, tmp_path: Path) -> None:
        store, learner = self.begun(new_learner, tmp_path)
        for num_steps, names in ((9, ["last_000009"]), (10, ["last_000010", "last_000009"])):
            self.save(store, learner, num_steps)
            assert [path.name for path in store.newest_first()] == [*names, "task_00"]
        self.save(store, learner, 1000000, optimizer={})
        assert [path.name for path in store.newest_first()] == ["last_1000000", "last_000010", "task_00"]
        assert read_checkpoint(store.newest_first()[0]).optimizer_tensors() == {}
        store.save(learner, STATE)
        assert [path.name for path in store.newest_first()] == ["task_01", "task_00"]

    def test_of_a_finished_task_are_never_the_newest(self, new_learner: NewLearner, tmp_path: Path) -> None:
        """As after a kill between the task's checkpoint and the removal of these."""
        store, learner = self.begun(new_learner, tmp_path)
        self.save(store, learner, 5)
        shutil.copytree(tmp_path / "last_000005", tmp_path / "kept")
        store.save(learner, STATE)
        (tmp_path / "kept").rename(tmp_path / "last_000005")
        assert [path.name for path in store.newest_first()] == ["task_01", "last_000005", "task_00"]
        CheckpointStore(tmp_path).go_on_from(read(store))
        assert [path.name for path in store.newest_first()] == ["task_01", "task_00"]

    def test_that_are_damaged_come_first(self, new_learner: NewLearner, tmp_path: Path) -> None:
        store, learner = self.begun(new_learner, tmp_path)
        self.save(store, learner, 5)
        (tmp_path / "last_000005" / "state.json").write_text("{")
        assert [path.name for path in store.newest_first()] == ["last_000005", "task_00"]

    def test_go_on_from__an_older_one_removes_what_comes_after_it(
        self, new_learner: NewLearner, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store, learner = self.begun(new_learner, tmp_path)
        self.save(store, learner, 5)
        self.save(store, learner, 6)
        partials = [
            tmp_path / ".last_000007.partial",
            tmp_path / "statistics" / ".task_01.safetensors.partial",
        ]
        partials[0].mkdir()
        partials[1].touch()
        again = CheckpointStore(tmp_path)
        again.go_on_from(read_checkpoint(tmp_path / "last_000005"))
        assert [path.name for path in again.newest_first()] == ["last_000005", "task_00"]
        assert not any(path.exists() for path in partials)
        assert "last_000006" in caplog.text
        again.save(learner, STATE)  # knows of the statistics of the task before
        assert "statistics/task_00.safetensors" in read(again).digests

    def test_that_do_not_fit_on_the_disk_leave_the_one_before(
        self, new_learner: NewLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, learner = self.begun(new_learner, tmp_path)
        self.save(store, learner, 5)
        before = files_under(tmp_path)

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("vbm_ptm.storage.durable_files.os.fsync", full)
            with pytest.raises(OSError, match="No space left"):
                self.save(store, learner, 6)
        assert files_under(tmp_path) == before  # what was half-written is gone, its space is free again


@pytest.mark.parametrize("lost", ["", "statistics"])
def test_save__refuses_to_go_on_where_earlier_tasks_are_gone(
    lost: str, new_learner: NewLearner, tmp_path: Path
) -> None:
    """A run would end with exit code 0, and nobody could read it."""
    store, learner = CheckpointStore(tmp_path / "checkpoints"), new_learner("nearest_mean")
    live_through(learner, TASKS[0])
    store.save(learner, STATE)
    shutil.rmtree(tmp_path / "checkpoints" / lost)
    live_through(learner, TASKS[1])
    with pytest.raises(TrainingError, match="removed while it was running"):
        store.save(learner, STATE)
