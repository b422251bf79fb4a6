"""The results kept in docs/results are whole, name no place of their own, and the page shows them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vbm_ptm.metrics import AccuracyMatrix

ROOT = Path(__file__).parents[1]
KEPT = sorted((ROOT / "docs" / "results" / "runs").rglob("result.json"))


@pytest.fixture
def results() -> ModuleType:
    """Return scripts/results.py as a module."""
    spec = importlib.util.spec_from_file_location("results", ROOT / "scripts" / "results.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page__shows_what_is_kept(results: ModuleType) -> None:
    page = (ROOT / "docs" / "results.md").read_text()
    assert results.page_with_tables(page) == page
    studies = {file.relative_to(results.KEPT).parts[0] for file in KEPT}
    assert studies
    assert all(f"<!-- {study} -->" in page for study in studies)


@pytest.mark.parametrize("file", KEPT, ids=lambda file: "-".join(file.parent.parts[-3:]))
def test_kept_result__is_whole(file: Path) -> None:
    text = file.read_text()
    result = json.loads(text)
    assert result["status"] == "finished"
    counted = AccuracyMatrix.from_dict(result["accuracy_counts"]).summary()
    assert {name: counted[name] for name in result["metrics"]} == result["metrics"]
    path = result["config"]["dataset"]["path"]
    assert path is None or path.startswith("$DATA/")
    assert "timings" not in result


def test_keep__leaves_out_timings_and_unfinished_runs(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, target in (("KEPT", "runs"), ("SECONDS", "seconds.json")):
        monkeypatch.setattr(results, name, tmp_path / "docs" / target)
    (tmp_path / "docs").mkdir()
    whole = json.loads(KEPT[0].read_text())
    task = {"training_seconds": 1.0, "end_task_seconds": 0.5, "evaluation_seconds": 0.25}
    whole["timings"] = {"total_seconds": 9.0, "tasks": [task, task]}
    whole["config"]["dataset"]["path"] = "/somewhere/pictures"
    for name, status in (("slca-V1", "finished"), ("slca-V4", "finished"), ("l2p", "interrupted")):
        folder = tmp_path / "digits" / name / "seed_1"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({**whole, "status": status}))
    monkeypatch.setattr(
        sys, "argv", ["results.py", "keep", str(tmp_path / "digits"), "--data", "/somewhere/"]
    )
    results.main()
    kept = sorted(
        path.relative_to(tmp_path / "docs").as_posix() for path in tmp_path.glob("docs/**/result.json")
    )
    assert kept == ["runs/digits/slca-V1/seed_1/result.json", "runs/digits/slca-V4/seed_1/result.json"]
    text = (tmp_path / "docs" / kept[0]).read_text()
    assert json.loads(text)["config"]["dataset"]["path"] == "$DATA/pictures"
    assert "timings" not in text
    assert json.loads((tmp_path / "docs" / "seconds.json").read_text())["digits/slca-V1/seed_1"] == 3.5
    assert "| `slca` | +0.0 |" in results.tables("digits")


def test_tables__of_numbers_by_hand(
    results: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, target in (("KEPT", "runs"), ("SECONDS", "seconds.json")):
        monkeypatch.setattr(results, name, tmp_path / target)
    numbers = {
        "a-V1": [(70.0, 50.0, 20.0), (74.0, 54.0, 20.0)],
        "a-V4": [(71.0, 53.0, 18.0), (73.0, 56.0, None)],
    }
    seconds = {}
    for label, runs in numbers.items():
        for index, (average, last, forgetting) in enumerate(runs):
            top1 = {"average_incremental_accuracy": average, "last_accuracy": last, "forgetting": forgetting}
            metrics = {"class_incremental": {"top1": top1, "top5": {"last_accuracy": 90.0}}}
            folder = tmp_path / "runs" / "toy" / label / f"seed_{index}"
            folder.mkdir(parents=True)
            (folder / "result.json").write_text(json.dumps({"metrics": metrics, "num_images": 1200}))
            seconds[f"toy/{label}/seed_{index}"] = 10.0 + 6 * index
    (tmp_path / "seconds.json").write_text(json.dumps(seconds))
    text = results.tables("toy")
    assert "| `a-V1` | 72.0 ± 2.8 | 52.0 ± 2.8 | 20.0 ± 0.0 | 90.0 ± 0.0 | 10 | 1,200 | 2 |" in text
    assert "| `a` | +0.0 (+1.0, -1.0) | +2.5 (+3.0, +2.0) | -2.0 | 2 |" in text
