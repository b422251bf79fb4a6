"""The SLURM examples, in an environment in which srun, scontrol, python and accelerate only say what they were told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    commands = {
        "srun": 'exec "$@"',
        "scontrol": 'if [ "$1" = show ]; then printf "first\\nsecond\\n"; else echo "scontrol $*"; fi',
        "python": 'echo "python $*"; exit "${PYTHON_CODE:-0}"',
        "accelerate": 'for argument in "$@"; do echo "[$argument]"; done',
    }
    for name, body in commands.items():
        file = tmp_path / name
        file.write_text(f"#!/bin/bash\n{body}\n")
        file.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def start(script: str, *arguments: str, environment: dict[str, str]) -> tuple[int, list[str]]:
    command = ["bash", str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts__are_valid(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("code", [0, 1, 143])
def test_slurm_paper__runs_one_part_and_comes_back_where_time_was_short(
    code: int, environment: dict[str, str]
) -> None:
    job = {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_JOB_ID": "77", "PARTS": "6", "PYTHON_CODE": str(code)}
    given = ("--data", "cifar100=a folder", "--weights", "w")
    left, said = start("slurm_paper.sh", *given, environment=environment | job)
    assert left == code
    requeued = ["scontrol requeue 77_3"] if code == 143 else []
    assert said == [
        "python -m vbm_ptm study studies/paper --published published/paper_table --shard 3/6 "
        "--data cifar100=a folder --weights w",
        *requeued,
    ]


def test_slurm_ranks__launches_once_for_each_node(environment: dict[str, str]) -> None:
    job = {
        "SLURM_JOB_NODELIST": "first,second",
        "SLURM_JOB_ID": "40007",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "1",
        "GPUS_PER_NODE": "4",
    }
    code, said = start("slurm_ranks.sh", "train", "--output", "a folder", environment=environment | job)
    assert code == 0
    assert [line.strip("[]") for line in said] == [
        *("launch", "--multi_gpu", "--num_machines", "2", "--machine_rank", "1", "--num_processes", "8"),
        *("--main_process_ip", "first", "--main_process_port", "20007"),
        *("-m", "vbm_ptm", "train", "--output", "a folder"),
    ]
