from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vbm_ptm.cli import main
from vbm_ptm.engine.acceleration import build_accelerator
from vbm_ptm.launch import (
    is_main_process,
    launch_problems,
    look_here_last,
    num_nodes,
    num_processes,
    shadowed_libraries,
)

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "ACCELERATE_", "OMPI_", "PMI_", "SLURM_")
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        monkeypatch.delenv(name)


def test_is_main_process__is_rank_0_or_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_main_process()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "0")
    assert is_main_process()
    monkeypatch.setenv("RANK", "1")
    assert not is_main_process()


@pytest.mark.parametrize("world_size", [None, "1", "", "2", "abc"])
def test_is_main_process__is_a_process_of_its_own_whatever_a_shell_still_holds(
    world_size: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    assert is_main_process()
    assert main(["list", "learners"]) == 0
    assert main(["train", "--dataset", "nowhere", "--learner", "slca"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_num_processes__is_one_without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_processes() == 1
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert num_processes() == 4


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_launch_problems__tell_of_copies_that_do_not_know_each_other(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "4")
    (problem,) = launch_problems(num_ranks=1, mixed_precision="no")
    assert "asked for 4 processes, but this run has 1" in problem
    assert launch_problems(num_ranks=4, mixed_precision="no") == []


def test_num_nodes__follows_from_the_processes_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_nodes() == 1
    monkeypatch.setenv("WORLD_SIZE", "5")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert num_nodes() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert num_nodes() == 3
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert num_nodes() == 2


def test_launch_problems__tell_of_processes_that_accelerate_did_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert launch_problems(num_ranks=1, mixed_precision="no") == []  # somebody's shell, no launcher
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    (problem,) = launch_problems(num_ranks=1, mixed_precision="no")
    assert "asked for several processes, but this run has 1" in problem
    assert "multi_gpu" in problem
    assert launch_problems(num_ranks=2, mixed_precision="no") == []


def test_launch_problems__tell_of_another_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert launch_problems(num_ranks=1, mixed_precision="bf16") == []
    (problem,) = launch_problems(num_ranks=1, mixed_precision="no")
    assert "asked for bf16, but the run's own setting decides: trainer.mixed_precision=no" in problem


def test_launch_problems__tell_of_accumulation_that_is_the_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    (problem,) = launch_problems(num_ranks=1, mixed_precision="no")
    assert "the run's own setting decides: optimization.gradient_accumulation_steps" in problem


def test_main__marks_what_another_rank_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for rank, mark in (("0", ""), ("3", "rank 3: ")):
        monkeypatch.setenv("RANK", rank)
        assert main(["train", "--dataset", "nowhere", "--learner", "slca"]) == 2
        assert capsys.readouterr().err.startswith(f"{mark}error: unknown data set 'nowhere'")


@pytest.fixture(name="launch")
def launcher(toy_tree: Callable[..., dict[str, Any]], tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Return a function that starts a short training under Accelerate's launcher."""
    tree = toy_tree("linear_probe")
    tree["trainer"] = {"max_steps_per_task": 1}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(tree))

    def start(*options: str, output: Path, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "accelerate.commands.launch", *options, "-m", "vbm_ptm", "train"]
        return subprocess.Popen(
            [*command, "--config", str(config), "--output", str(output)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.mark.slow
@pytest.mark.distributed
def test_train__under_accelerate_on_two_ranks(launch: Callable[..., Any], tmp_path: Path) -> None:
    """Into a folder several levels deep that neither rank finds; every line is said once."""
    output = tmp_path / "several" / "levels" / "deep"
    process = launch("--multi_gpu", "--num_processes", "2", output=output, ACCELERATE_USE_CPU="1")
    _, said = process.communicate()
    assert process.returncode == 0, said
    result = json.loads((output / "result.json").read_text())
    assert (result["num_ranks"], result["status"]) == (2, "finished")
    expected = (
        "2 ranks on 1 node, device cpu, precision no; of a step each rank has 4 images = 2 groups x 2 views",
        "learner linear_probe, preset none, seed 1993",
        "task 3/3 done: 4 classes, 24 samples",
    )
    for line in expected:
        assert said.count(line) == 1
    assert "asked for" not in said
    assert "deprecated" not in said
    tasks = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert [event["task"] for event in tasks if event["event"] == "begin_task"] == [0, 1, 2]


FAILING = """
import multiprocessing, os, signal
import torch
from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.learners.linear_probe import LinearProbe

image, has_begun = ImageSplit.image, False

def full(storage):
    raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

def kill_worker(split, index):
    if has_begun and multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return image(split, index)

if os.environ["RANK"] == "1":
    torch.UntypedStorage._share_fd_cpu_ = full
    ImageSplit.image = kill_worker

class Failing(LinearProbe):
    def begin_task(self, task):
        super().begin_task(task)
        global has_begun
        has_begun = task.index == 1
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_train__ends_on_both_ranks_where_a_worker_of_one_is_killed(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    """Rank 1 cannot share memory, says so and goes on; in the second task one of its workers is killed."""
    (tmp_path / "failing.py").write_text(FAILING)
    tree = yaml.safe_load((tmp_path / "config.yaml").read_text())
    tree["learner"] = {"name": "failing:Failing"}
    tree["data"] = {"num_workers": 2, "multiprocessing_context": "fork"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    where = {"ACCELERATE_USE_CPU": "1", "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    process = launch("--multi_gpu", "--num_processes", "2", output=tmp_path / "run", **where)
    _, said = process.communicate(timeout=300)  # a rank that waited for the other would wait for ten minutes
    assert process.returncode == 1, said
    assert said.count("rank 1: warning: workers cannot share memory") == 1
    assert said.count("rank 1: error: a worker process that loads images has failed") == 1
    # The launcher ends rank 0 as soon as rank 1 is gone: now and then before it has noticed.
    has_noticed = said.count("\nerror: another rank has left this run") == 1
    assert has_noticed or "closing signal SIGTERM" in said
    assert "[rank" not in said  # a traceback of one of ours; the launcher has one of its own
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] in (("failed",) if has_noticed else ("failed", "interrupted"))
    assert len(result["task_records"]) == 1


@pytest.mark.slow
def test_train__says_that_accelerate_has_started_one_process(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    process = launch("--cpu", "--num_processes", "2", output=tmp_path / "run")
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert json.loads((tmp_path / "run" / "result.json").read_text())["num_ranks"] == 1
    assert "1 rank on 1 node" in said
    assert "warning: the launcher was asked for several processes, but this run has 1." in said


@pytest.mark.slow
@pytest.mark.distributed
def test_train__on_two_machines(launch: Callable[..., Any], tmp_path: Path, free_port: int) -> None:
    where = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port))
    machines = [
        launch(
            *("--multi_gpu", "--num_machines", "2", "--num_processes", "2", "--machine_rank", rank, *where),
            output=tmp_path / "run",
            ACCELERATE_USE_CPU="1",
        )
        for rank in ("1", "0")
    ]
    (_, quiet), (_, said) = [machine.communicate() for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert "2 ranks on 2 nodes" in said
    assert "ranks on" not in quiet
    assert json.loads((tmp_path / "run" / "result.json").read_text())["num_ranks"] == 2


@pytest.mark.slow
@pytest.mark.distributed
def test_train__on_the_first_of_two_machines_alone_ends(
    launch: Callable[..., Any], tmp_path: Path, free_port: int
) -> None:
    where = ("--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port))
    process = launch(
        *("--multi_gpu", "--num_machines", "2", "--num_processes", "2", "--machine_rank", "0", *where),
        *("--rdzv_conf", "timeout=2"),
        output=tmp_path / "run",
        ACCELERATE_USE_CPU="1",
    )
    _, said = process.communicate()
    assert process.returncode != 0
    assert "waiting for clients. 1/2 clients joined" in said
    assert not (tmp_path / "run").exists()


def test_build_accelerator__of_one_process_meets_nobody(
    monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    """Another job of one process may use the same port; and what a launcher has left names no other ranks."""
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for leftovers in (group, group | {"RANK": "3", "LOCAL_RANK": "3"}, {"LOCAL_RANK": "3"}, {"RANK": "3"}):
        for name in group:
            monkeypatch.delenv(name, raising=False)
        for name, value in (leftovers | {"MASTER_PORT": str(free_port)}).items():
            monkeypatch.setenv(name, value)
        with socket.socket() as other:
            other.bind(("127.0.0.1", free_port))
            other.listen()
            for device in ("cpu", "auto"):
                accelerator = build_accelerator(device=device)
                assert (accelerator.num_processes, accelerator.is_main_process) == (1, True)
        assert not torch.distributed.is_initialized()
        assert os.environ["MASTER_PORT"] == str(free_port)


@pytest.mark.parametrize("name", ["TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "OTHER"])
@pytest.mark.parametrize("is_leftover", [False, True])
def test_follow_launcher__ends_with_the_launcher_alone(name: str, is_leftover: bool) -> None:
    """A launcher that is killed takes the process along; without one, nothing is tied to the parent.

    What a shell has been given itself, and passes on, does not make it a launcher.
    """
    child = (
        "import os, time; from vbm_ptm.launch import follow_launcher; follow_launcher();"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = (
        f"import os, subprocess, sys; os.environ[{name!r}] = 'no';"
        f"subprocess.run([sys.executable, '-c', {child!r}])"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", parent],
        env=os.environ | ({name: "no"} if is_leftover else {}),
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert launcher.stdout is not None
    process = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    is_tied = name != "OTHER" and not is_leftover and sys.platform == "linux"
    # The pipe ends with the last process that could write into it.
    has_ended, _, _ = select.select([launcher.stdout], [], [], 60 if is_tied else 0.5)
    assert bool(has_ended) == is_tied
    if not is_tied:
        os.kill(process, signal.SIGKILL)
    launcher.stdout.close()


def test_main__where_the_current_directory_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "path", ["/a", "/b"])
        look_here_last()
        assert sys.path == ["/a", "/b"]
    assert main(["--version"]) == 0
    assert main(["check", "--dataset", "./images", "--learner", "slca"]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message == "error: the current directory has been removed: change to one that exists"


@pytest.mark.slow
def test_main__as_a_module_is_not_misled_by_the_current_directory(tmp_path: Path) -> None:
    """``python -m vbm_ptm``, which launchers start, finds the current directory first."""
    for shadow in ("datasets.py", "timm/__init__.py", "numpy/__init__.py", "rich.py", "random.py"):
        file = tmp_path / shadow
        file.parent.mkdir(exist_ok=True)
        file.write_text("raise ImportError('not the library')")
    done = subprocess.run(
        [sys.executable, "-m", "vbm_ptm", "check", "--dataset", "digits", "--learner", "nearest_mean"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "nearest_mean" in done.stdout


def test_shadowed_libraries__are_files_found_before_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shadowed_libraries(["datasets", "timm"]) == []
    (tmp_path / "datasets.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = shadowed_libraries(["datasets", "timm"])
    assert str(tmp_path / "datasets.py") in line


@pytest.mark.slow
@pytest.mark.parametrize("shadow", ["datasets.py", "timm/__init__.py"])
def test_main__names_the_file_that_stands_in_the_place_of_a_library(shadow: str, tmp_path: Path) -> None:
    file = tmp_path / shadow
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "vbm_ptm", "check", "--dataset", "digits", "--learner", "nearest_mean"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: '{file}'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("module", "large"),
    [("builtins", "bytearray(2**24)"), pytest.param("torch", "torch.ones(2**23)", marks=pytest.mark.slow)],
)
def test_keep_freed_memory__keeps_the_pages_of_what_is_large(module: str, large: str) -> None:
    """Pages that are made anew are counted as faults; the user's own choice is left alone."""
    program = f"""
import resource, {module}
from vbm_ptm.launch import keep_freed_memory
keep_freed_memory()
counts = []
for _ in range(10):  # the heap needs a few rounds until it is as large as it has to be
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        {large}
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(counts))
"""
    faults = []
    for settings in ({}, {"MALLOC_MMAP_THRESHOLD_": "1000000"}):
        environment = os.environ | settings
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        faults.append(int(done.stdout))
    kept, given_back = faults
    assert kept < given_back / 10
