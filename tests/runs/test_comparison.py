"""In what two runs differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from vbm_ptm.cli import main
from vbm_ptm.errors import UsageError
from vbm_ptm.runs.comparison import compare_runs


def differing(compared: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {section: changes for section, changes in compared.items() if changes}


@pytest.fixture(name="two")
def another_run(mean_run: Path, tmp_path: Path) -> Path:
    """What another run with the same settings left, of which tests change what they will."""
    folder = tmp_path / "two"
    folder.mkdir()
    for name in ("config.yaml", "result.json"):
        shutil.copyfile(mean_run / name, folder / name)
    return folder


def test_compare_runs__shows_just_the_setting_that_was_changed(
    mean_run: Path, two: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((two / "config.yaml").read_text())
    config["view_batch"]["num_views"] = config["optimization"]["epochs"] = 4
    (two / "config.yaml").write_text(yaml.safe_dump(config))
    expected = {
        "optimization.epochs": (2, 4),
        "view_batch.num_views": (2, 4),
    }
    assert differing(compare_runs(mean_run, two)) == {"settings": expected}
    assert differing(compare_runs(mean_run, mean_run)) == {}
    assert main(["diff", str(mean_run), str(two)]) == 0
    shown = capsys.readouterr().out
    assert "view_batch.num_views" in shown
    assert main(["diff", str(mean_run), str(two), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["optimization.epochs"] == [2, 4]
    assert main(["diff", str(mean_run), str(mean_run)]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_compare_runs__of_two_seeds_differ_in_these_alone(two_runs: tuple[Path, Path]) -> None:
    assert differing(compare_runs(*two_runs)) == {"settings": {"seed": (1, 2)}}


def test_compare_runs__shows_versions_images_weights_and_machine(mean_run: Path, two: Path) -> None:
    file = two / "result.json"
    result = json.loads(file.read_text())
    result["versions"]["torch"] = "1.0"
    result["weights"]["sha256"] = "0" * 64
    result["weights"]["file"] = "elsewhere"
    result["split_sha256"] = "1" * 64
    result["num_ranks"] = 2
    result["metrics"] = {}
    file.write_text(json.dumps(result))
    compared = differing(compare_runs(mean_run, two))
    assert compared["versions"]["torch"][1] == "1.0"
    assert set(compared["images and weights"]) == {"split SHA-256", "weights SHA-256"}
    assert compared["machine"] == {"num_ranks": (1, 2)}
    assert set(compared) == {"versions", "images and weights", "machine"}
    file.unlink()
    assert compare_runs(mean_run, two) == {"settings": {}}


def test_compare_runs__refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run directory"):
        compare_runs(tmp_path, tmp_path)
