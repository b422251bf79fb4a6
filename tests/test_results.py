"""The runs kept in docs/results give every number of the pages, and what is kept is whole."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vbm_ptm.errors import UsageError
from vbm_ptm.metrics import AccuracyCell, AccuracyMatrix
from vbm_ptm.storage.summary import summary

ROOT = Path(__file__).parents[1]


@pytest.fixture(name="results", scope="module")
def results_module() -> ModuleType:
    """Return scripts/results.py as a module."""
    spec = importlib.util.spec_from_file_location("results", ROOT / "scripts" / "results.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["results"] = module  # its dataclasses look their types up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stored() -> dict[str, Any]:
    values: dict[str, Any] = json.loads((ROOT / "tests" / "storage" / "result.json").read_text())
    return values


def test_pages__show_what_is_kept(results: ModuleType) -> None:
    kept = results.read_kept()
    pages = [(ROOT / "docs" / name).read_text() for name in results.PAGES]
    assert [results.page_with_tables(page, kept) for page in pages] == pages
    assert len(kept) >= 95
    assert all(
        sum(f"<!-- {study} -->" in page for page in pages) == 1 for study in {run.study for run in kept}
    )
    # The tables are made of the counts.
    first = kept[0].matrix.rows[-1][0]
    assert first
    changed = AccuracyMatrix(
        [*kept[0].matrix.rows[:-1], [AccuracyCell(first.total, 0, 0, 0, 0), *kept[0].matrix.rows[-1][1:]]]
    )
    kept[0] = results.KeptRun(**{**vars(kept[0]), "matrix": changed})
    assert [results.page_with_tables(page, kept) for page in pages] != pages


def test_pictures__show_every_difference_of_their_study(results: ModuleType) -> None:
    kept = results.read_kept()
    page = (ROOT / "docs" / "results.md").read_text()
    for study in results.PICTURES:
        assert f"](results/{study}.svg)" in page
        stored = (ROOT / "docs" / "results" / f"{study}.svg").read_text()
        effects = results.effects_of([run for run in kept if run.study == study])
        assert len(effects) >= 4
        assert all(results.in_words(effect) in stored for effect in effects)
    # It is drawn of the counts, and follows the theme of its reader.
    drawn = results.picture(kept, study)
    assert "prefers-color-scheme: dark" in drawn
    others = [run for run in kept if run.seed != 3]
    assert results.picture(others, study) != drawn


def test_conclusions__quote_intervals_that_stand_in_the_tables() -> None:
    page = (ROOT / "docs" / "results.md").read_text().replace("\N{MINUS SIGN}", "-")
    conclusions, studies = page.split("\n## Recalls", maxsplit=1)
    interval = re.compile(r"([+-]?\d+\.\d) \[([+-]?\d+\.\d), ([+-]?\d+\.\d)\]")

    def found(text: str) -> list[tuple[float, float, float]]:
        """Mean and bounds, without the sign: a fall by a number is a negative difference."""
        numbers = [tuple(map(float, match)) for match in interval.findall(text)]
        return [max((mean, low, high), (-mean, -high, -low)) for mean, low, high in numbers]

    quoted = found(conclusions)
    assert len(quoted) > 10
    assert set(quoted) <= set(found(studies))


def test_differences_figure__marks_intervals_that_leave_0_out(results: ModuleType) -> None:
    kept = [run for run in results.read_kept() if run.study == "recalls_digits"]
    decided = {
        effect.label: effect.average_incremental_accuracy.interval for effect in results.effects_of(kept)
    }
    assert decided["er-num_views=4-epochs=16"][1] < 0 < decided["er-num_views=4-epochs=48"][1]
    with results.styled():
        axes, _ = results.differences_figure(results.effects_of(kept)).axes
    labels = [text.get_text() for text in axes.get_yticklabels()]
    colors = {
        labels[round(line.get_ydata()[0])]: line.get_color()
        for line in axes.lines
        if line.get_marker() == "D"
    }
    assert colors["er-num_views=4-epochs=16"] == results.ACCENT
    assert colors["er-num_views=4-epochs=48"] == results.SOFT


def test_kept__numbers_in_the_rows_follow_from_the_counts(results: ModuleType) -> None:
    with (ROOT / "docs" / "results" / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    kept = results.read_kept()
    assert [run.row() for run in kept] == rows
    assert len({run.key for run in kept}) == len(kept)
    for run in kept:
        assert run.matrix.rows
        assert not run.matrix.rows_with_gaps
        assert run.matrix.average_incremental() is not None
        assert len(run.split_sha256) == 64
        assert len(run.weights_sha256) in (0, 64)  # none: trained from scratch


def test_keep__adds_finished_runs_and_replaces_the_same_ones(
    results: ModuleType, stored: dict[str, Any], tmp_path: Path
) -> None:
    def write(label: str, *, seed: int = 1, **changes: Any) -> None:
        folder = tmp_path / "digits" / label / f"seed_{seed}-order_1"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps(stored | {"seed": seed, **changes}))

    docs = tmp_path / "docs"
    other = results.KeptRun(**{**vars(results.read_kept()[0]), "study": "other"})
    results.write_kept([other], docs)
    write("l2p-V1", num_views=1)
    write("l2p-V4")
    write("l2p-V4", seed=2, status="interrupted")
    assert results.keep(tmp_path / "digits", docs) == 2
    kept = results.read_kept(docs)
    assert [run.key[:3] for run in kept] == [
        *(("digits", label, 1) for label in ("l2p-V1", "l2p-V4")),
        ("other", other.run, other.seed),
    ]
    run = kept[1]
    assert summary(run.matrix)["class_incremental"] == stored["metrics"]["class_incremental"]
    seconds = sum(sum(task.values()) for task in stored["timings"]["tasks"])
    assert (run.seconds, run.num_views, run.epochs) == (pytest.approx(seconds, abs=0.06), 4, 4)
    assert (run.split_sha256, run.num_steps) == (stored["split_sha256"], stored["num_steps"])
    assert f"torch={stored['versions']['torch']}" in run.versions
    assert "| `l2p-V4` | +0.0 | +0.0 | +0.0 | +0.0 | +0.0 | +0.0 | -, - | 1 |" in results.tables(kept[:2])
    assert results.keep(tmp_path / "digits", docs) == 2
    assert [each.row() for each in results.read_kept(docs)] == [each.row() for each in kept]
    (tmp_path / "digits").rename(tmp_path / "elsewhere")  # a part of the same study, run in another place
    write("l2p-V4", seed=3)
    assert results.keep(tmp_path / "digits", docs) == 1
    assert [run.seed for run in results.read_kept(docs)[:-1]] == [1, 1, 3]
    extended = tmp_path / "digits" / "l2p-V4" / "seed_3-order_1+more"
    extended.mkdir()
    config = stored["config"] | {"scenario": stored["config"]["scenario"] | {"extends": "seed_3-order_1"}}
    (extended / "result.json").write_text(json.dumps(stored | {"seed": 3, "config": config}))
    assert results.keep(tmp_path / "digits", docs) == 1
    (extended / "result.json").write_text(json.dumps(stored | {"seed": 3}))
    with pytest.raises(UsageError, match=r"seed_3-order_1 and .*\+more are the same run"):
        results.keep(tmp_path / "digits", docs)


def test_tables__of_numbers_by_hand(results: ModuleType) -> None:
    def a_run(label: str, seed: int, first: int, last: tuple[int, int]) -> Any:
        """Two tasks of 100 test images; 90 of them among the five best at the end."""
        matrix = AccuracyMatrix(
            [[AccuracyCell(100, first, 100)], [AccuracyCell(100, count, 90) for count in last]]
        )
        common = {"study": "toy", "learner": "a", "dataset": "toy", "images_per_step": 8, "epochs": 1}
        hashes = {"split_sha256": "", "weights_sha256": "", "versions": ""}
        return results.KeptRun(
            **common,
            **hashes,
            run=label,
            seed=seed,
            class_order_seed=seed,
            num_views=int(label[-1]),
            num_steps=5,
            num_images=1200,
            seconds=4.0 + 6 * seed,
            matrix=matrix,
        )

    # Average, last and forgetting: (70, 50, 20), (74, 54, 20), and with views (71, 53, 18), (73, 56, 22). A third pair
    # like the first makes an interval: the differences of the average are 1, -1 and 1, their deviation 2 / sqrt(3), and
    # Student's t with two degrees of freedom is 4.303.
    runs = [
        a_run("a-V1", 1, 90, (70, 30)),
        a_run("a-V1", 2, 94, (74, 34)),
        a_run("a-V4", 1, 89, (71, 35)),
        a_run("a-V4", 2, 90, (68, 44)),
    ]
    text = results.tables(runs)
    assert "| `a-V1` | 72.0 ± 2.8 | 52.0 ± 2.8 | 20.0 ± 0.0 | - | - | - | 1 | 10 | 2 |" in text
    assert "| `a-V4` | 72.0 ± 1.4 | 54.5 ± 2.1 | 20.0 ± 2.8 | - | - | - | 0.25 | 10 | 2 |" in text
    assert (
        "| `a-V4` | +0.0 (+1.0, -1.0) | +2.5 (+3.0, +2.0) | +0.0 (-2.0, +2.0) | - | - | - | -, - | 2 |"
        in text
    )
    third = [a_run("a-V1", 3, 90, (70, 30)), a_run("a-V4", 3, 89, (71, 35))]
    text = results.tables([*runs, *third])
    assert "| `a-V4` | +0.3 [-2.5, +3.2] |" in text
    # t = (1 / 3) / (2 / 3) = 0.5, and P(|t| > 0.5) is 1 - 0.5 / sqrt(2 + 0.25) with two degrees of freedom.
    assert f"| {1 - 0.5 / 2.25**0.5:.3f}, " in text


def test_factor_effects__compare_the_arms_of_each_learner(results: ModuleType) -> None:
    run = next(run for run in results.read_kept() if run.study == "digits" and run.run == "slca-V1")
    other = next(run for run in results.read_kept() if run.study == "digits" and run.run == "slca-V4")

    def arm(name: str, of: Any, seed: int) -> Any:
        return results.KeptRun(**{**vars(of), "run": name, "seed": seed})

    text = results.tables(
        [
            *(arm("er-baseline", run, seed) for seed in (1, 2)),
            arm("er-replay", other, 2),
            *(arm("er-view-batch", other, seed) for seed in (1, 2)),
            arm("icarl-baseline", other, 1),
            arm("icarl-view-batch", run, 1),
        ]
    )
    lines = [line for line in text.splitlines() if " minus `" in line]
    gain = other.matrix.average_incremental() - run.matrix.average_incremental()
    assert [line.split("|")[1].strip() for line in lines] == [
        "`er-replay` minus `er-baseline`",
        "`er-view-batch` minus `er-baseline`",
        "`icarl-view-batch` minus `icarl-baseline`",
    ]
    assert [line.split("|")[-2].strip() for line in lines] == ["1", "2", "1"]
    assert [float(line.split("|")[2].split()[0]) for line in lines] == [
        pytest.approx(value, abs=0.051) for value in (gain, gain, -gain)
    ]


def test_tables__of_a_grid_name_the_line_of_every_number_of_views(results: ModuleType) -> None:
    run = next(run for run in results.read_kept() if run.run == "slca-V1")
    lines = [
        results.KeptRun(**{**vars(run), "run": f"slca-num_views={views}-epochs=4", "num_views": views})
        for views in (1, 2, 4)
    ]
    text = results.tables(lines)
    assert "Differences in pairs, views minus one view:" in text
    assert "| `slca-num_views=2-epochs=4` | +0.0 |" in text
    assert "| `slca-num_views=1-epochs=4` | +0.0 |" not in text
