"""Readers that leave: real pipes, real descriptors, most in processes of their own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vbm_ptm.cli.streams import outlast_readers

REPOSITORY = Path(__file__).parents[2]

# Says something on both streams before and after the reader has left, then writes a file.
PROGRAM = """
import sys, time
from pathlib import Path
from vbm_ptm.cli.streams import outlast_readers
outlast_readers()
for number in range(200):
    print("out", "x" * 1000)
    sys.stderr.write("err " + "x" * 1000 + "\\n")
sys.stdout.flush()
from vbm_ptm.engine.tracking import console
console.print("said")
Path(sys.argv[1]).write_text("done")
"""


def shell(command: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which "$@" is the program."""
    program = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}", "bash", *program],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )


@pytest.mark.parametrize(
    "command",
    [
        '"$@" 2>&1 | head -c 300',
        '"$@" 2>/dev/null | head -c 300',
        '"$@" 2> >(head -c 300) >/dev/null',
        '"$@" >&-',
        '"$@" 2>&-',
        '"$@" >&- 2>&-',
        '"$@" >&- 2>&- <&-',
        '"$@" 2>/dev/full >/dev/null',
    ],
)
def test_outlast_readers__lets_a_command_go_on_and_succeed(command: str, tmp_path: Path) -> None:
    done = shell(command, tmp_path / "file")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "file").read_text() == "done"
    assert "Traceback" not in done.stderr
    assert "BrokenPipeError" not in done.stderr


def test_outlast_readers__swallows_what_nobody_reads_and_fails_once_on_a_full_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    with open("/dev/full", "w") as full, open(writing, "w") as unread:
        for name, stream in (("stdout", full), ("stderr", unread)):
            monkeypatch.setattr(sys, name, stream)
            monkeypatch.setattr(sys, f"__{name}__", stream)
        outlast_readers()
        sys.stderr.write("caf\u00e9\n")
        assert os.read(reading, 100) == "caf\u00e9\n".encode()
        os.close(reading)
        sys.stderr.write("lost\n")
        with pytest.raises(OSError, match="No space left on device"):
            sys.stdout.write("result\n")
        sys.stdout.flush()  # as the interpreter does when it ends


def test_outlast_readers__takes_closed_streams_and_leaves_those_of_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = io.StringIO()
    monkeypatch.setattr(sys, "stdout", own)
    monkeypatch.setattr(sys, "stderr", None)
    outlast_readers()
    assert sys.stdout is own
    with sys.stderr as nowhere:
        assert nowhere.write("lost") == 4


def test_outlast_readers__fails_where_results_cannot_be_written(tmp_path: Path) -> None:
    done = shell('"$@" >/dev/full', tmp_path / "file")
    assert done.returncode != 0
    assert "No space left on device" in done.stderr


def test_command__says_in_one_line_that_what_it_prints_cannot_be_written() -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" >/dev/full', "bash", sys.executable, "-m", "vbm_ptm", "list", "datasets"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line


def test_outlast_readers__loses_nothing_that_is_read(tmp_path: Path) -> None:
    done = shell('"$@"', tmp_path / "file")
    assert done.stdout.count("out") == 200
    assert done.stderr.count("err") == 200
    assert "said" in done.stderr


def test_outlast_readers__keeps_closed_descriptors_from_files(tmp_path: Path) -> None:
    """What is written to a closed standard error must not end up in the first file that is opened."""
    program = (
        "import os, sys\nfrom vbm_ptm.cli.streams import outlast_readers\noutlast_readers()\n"
        f"file = open({str(tmp_path / 'result')!r}, 'w')\nos.write(2, b'a message of C')\nfile.close()"
    )
    command = ["bash", "-c", '"$@" 2>&-', "bash", sys.executable, "-c", program]
    subprocess.run(command, check=True, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)})
    assert (tmp_path / "result").read_text() == ""


LETTERS = """
from vbm_ptm.cli.streams import outlast_readers
outlast_readers()
import os, sys
print("caf\\u00e9", os.fsdecode(b"caf\\xe9"))
sys.stderr.write("caf\\u00e9\\n")
"""


def test_outlast_readers__gives_files_and_pipes_utf_8() -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", LETTERS], capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"caf\xc3\xa9 caf\xe9\n"
    assert done.stderr == b"caf\xc3\xa9\n"


def test_outlast_readers__shows_a_replacement_on_a_screen_that_lacks_a_letter() -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "ascii"}
    screen, terminal = os.openpty()
    done = subprocess.run(
        [sys.executable, "-c", LETTERS], stdout=terminal, stderr=terminal, env=environment, timeout=60
    )
    os.close(terminal)
    assert done.returncode == 0
    assert os.read(screen, 1000).splitlines()[0] == b"caf? caf?"
    os.close(screen)
