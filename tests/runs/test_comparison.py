"""In what two runs differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vbm_ptm.cli import main
from vbm_ptm.errors import UsageError
from vbm_ptm.experiment import run
from vbm_ptm.runs.comparison import compare_runs

pytestmark = pytest.mark.slow

Tree = dict[str, Any]


def differing(compared: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {section: changes for section, changes in compared.items() if changes}


@pytest.fixture
def runs(toy_tree: Callable[..., Tree], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes a run with some changes of the toy configuration."""

    def make(name: str, **changes: Any) -> Path:
        tree = toy_tree("nearest_mean") | changes
        run(tree, output=tmp_path / name)
        return tmp_path / name

    return make


def test_compare_runs__shows_just_the_setting_that_was_changed(
    runs: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (
        runs("one"),
        runs("two", view_batch={"num_views": 4}, optimization={"epochs": 4, "batch_size": 8}),
    )
    expected = {
        "optimization.epochs": (2, 4),
        "view_batch.num_views": (2, 4),
    }
    assert differing(compare_runs(one, two)) == {"settings": expected}
    assert differing(compare_runs(one, one)) == {}
    assert main(["diff", str(one), str(two)]) == 0
    shown = capsys.readouterr().out
    assert "view_batch.num_views" in shown
    assert main(["diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_compare_runs__shows_versions_images_weights_and_machine(runs: Callable[..., Path]) -> None:
    one, two = runs("one"), runs("two")
    file = two / "result.json"
    result = json.loads(file.read_text())
    result["versions"]["torch"] = "1.0"
    result["weights"]["sha256"] = "0" * 64
    result["weights"]["file"] = "elsewhere"
    result["split_sha256"] = "1" * 64
    result["num_ranks"] = 2
    result["metrics"] = {}
    file.write_text(json.dumps(result))
    compared = differing(compare_runs(one, two))
    assert compared["versions"]["torch"][1] == "1.0"
    assert set(compared["images and weights"]) == {"split SHA-256", "weights SHA-256"}
    assert compared["machine"] == {"num_ranks": (1, 2)}
    assert set(compared) == {"versions", "images and weights", "machine"}
    file.unlink()
    assert compare_runs(one, two) == {"settings": {}}


def test_compare_runs__refuses_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run directory"):
        compare_runs(tmp_path, tmp_path)
