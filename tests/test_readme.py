"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from vbm_ptm.cli import main
from vbm_ptm.runs.directory import RunDirectory

README = Path(__file__).parents[1] / "README.md"


def section(title: str) -> str:
    """Return a section of the README, without its title."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", README.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert found, title
    return found[1]


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def own_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the example's two files and go there."""
    text = section("Own learner")
    (tmp_path / "cosine_probe.py").write_text(blocks(text, "python")[0])
    (tmp_path / "cosine_probe.yaml").write_text(blocks(text, "yaml")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "cosine_probe", raising=False)
    return tmp_path


@pytest.mark.parametrize("is_short", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_own_learner__trains_goes_on_and_evaluates(
    is_short: bool, own_learner: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, evaluate = (line.split()[1:] for line in blocks(section("Own learner"), "bash")[0].splitlines())
    if is_short:
        short = ("trainer.max_steps_per_task=2", "dataset.train_images_per_class=9", "backbone.image_size=32")
        train += [part for setting in short for part in ("--set", setting)]
    assert main([*train, "--stop-after-task", "1"]) == 0
    assert main([*train, "--resume", "--stop-after-task", "2"]) == 0
    assert main(evaluate) == 0
    assert "the same counts as training measured" in capsys.readouterr().out

    directory = RunDirectory(own_learner / "runs" / "cosine_probe")
    result = directory.result()
    assert result is not None
    assert result.config["learner"] == {"name": "cosine_probe:CosineProbe", "scale": 16.0}
    assert result.num_views == 4
    if is_short:
        return
    first, second = result.metrics["class_incremental"]["top1"]["curve"]
    assert first > 80  # chance is 50
    assert second > 30  # chance is 25


@pytest.mark.slow
def test_own_learner__that_is_refused_begins_again_with_the_same_command(
    own_learner: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train = blocks(section("Own learner"), "bash")[0].splitlines()[0].split()[1:]
    file = own_learner / "cosine_probe.py"
    file.write_text(file.read_text().replace("auxiliary={}", "auxiliary={'cross_entropy': scores.sum()}"))
    for _ in range(2):
        assert main(train) == 2
        assert "'cross_entropy', a name of the objective" in capfd.readouterr().err
    assert not (own_learner / "runs").exists()


def test_own_learner__a_setting_it_does_not_have_is_named(
    own_learner: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train = blocks(section("Own learner"), "bash")[0].splitlines()[0].split()[1:]
    assert main([*train, "--set", "learner.scael=3"]) == 2
    assert "scael" in capfd.readouterr().err
