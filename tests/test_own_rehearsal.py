"""The rehearsal method of docs/own_learner.md, as a reader would copy it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vbm_ptm.cli import main
from vbm_ptm.runs.directory import RunDirectory

PAGE = Path(__file__).parents[1] / "docs" / "own_learner.md"


def block(language: str) -> str:
    text = PAGE.read_text(encoding="utf-8").partition("## A rehearsal method of your own")[2]
    found = re.search(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "gentle_replay.py").write_text(block("python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("gentle_replay", None)


def test_own_rehearsal__is_one_short_file() -> None:
    assert len(block("python").splitlines()) < 120


@pytest.mark.slow
def test_own_rehearsal__trains_goes_on_and_evaluates(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, evaluate = (line.split()[1:] for line in block("bash").splitlines())
    assert main([*train, "--stop-after-task", "1"]) == 0
    assert main([*train, "--resume", "--stop-after-task", "2"]) == 0
    assert main(evaluate) == 0
    assert "the same counts as training measured" in capsys.readouterr().out
    result = RunDirectory(folder / "runs" / "gentle_replay").result()
    assert result is not None
    assert result.num_views == 4
    first, second = (record.learner_report["buffer"] for record in result.task_records)
    assert (first["stored"], second["stored"], second["capacity"]) == (20, 20, 20)
    assert {"0", "1"} & second["per_class"].keys()
    assert {"2", "3"} & second["per_class"].keys()
