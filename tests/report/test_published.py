"""The published table beside our runs of it."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from vbm_ptm.analysis.spread import Spread
from vbm_ptm.config.study_config import read_study
from vbm_ptm.config.tree import find_config, list_configs, read_yaml
from vbm_ptm.metrics import AccuracyCell
from vbm_ptm.report.published import (
    BenchmarkComparison,
    Cell,
    MeasureName,
    PublishedTable,
    TableRun,
    compare_with_published,
    markdown,
)
from vbm_ptm.storage.run_result import RunResult, read_result
from vbm_ptm.study import PlannedRun, plan_study

PUBLISHED = {
    "source": "A paper, table 1",
    "hyper_parameters": "its appendix",
    "benchmarks": {
        "photos": {
            "title": "S-Photos",
            "num_classes": 4,
            "num_train": 40,
            "num_test": 8,
            "origin": "the split of the paper",
            "deviations": ["The split is a guess."],
        }
    },
    "deviations": ["Seeds are ours."],
    "rows": {
        "old": {
            "title": "OLD",
            "line": "Old",
            "weighting": "pooled",
            "published": {"photos": {"average": 50.0}},
            "is_run": False,
        },
        "slow": {
            "title": "SLOW",
            "line": "Slow",
            "weighting": "task_mean",
            "published": {"photos": {"average": [80.0, 1.0], "last": [70.0, 0.5]}},
            "deviations": ["Weights differ."],
        },
        "slow-num_views=4": {
            "title": "VIEWS, V = 4",
            "line": "Ours",
            "weighting": "task_mean",
            "published": {"photos": {"average": [82.0, 1.0]}},
            "against": "slow",
            "deviations": ["V is not stated."],
        },
    },
}


STORED = read_result(Path(__file__).parents[1] / "storage" / "result.json")


def counts(percents: Sequence[float]) -> list[dict[str, int]]:
    """Return the cells of a row: the first task has 3,000 test images, the second 1,000; top-5 is top-1."""
    cells = (
        AccuracyCell(total, round(total * percent / 100), round(total * percent / 100))
        for total, percent in zip((3000, 1000), percents, strict=False)
    )
    return [asdict(cell) for cell in cells]


def result(accuracy: float, *, num_train: int = 40, held_out: str | None = None, **others: Any) -> RunResult:
    """Average ``accuracy``, last 10 less; as a mean over tasks 2.5 more on average and 5 more at the end."""
    last = accuracy - 10
    stored = STORED.to_json()
    optimization = {
        "schedule": "multistep",
        "milestones": [18],
        "optimizer": "sgd",
        "learning_rate": 0.01,
        "epochs": 20,
        "batch_size": 128,
        "weight_decay": 5e-4,
        "clip_gradient_norm": None,
    }
    transforms = {"interpolation": "bicubic", "normalization": "imagenet", "strong": "autoaugment_cifar10"}
    config = {
        "optimization": optimization,
        "dataset": {"transforms": transforms},
        "trainer": {"mixed_precision": "no"},
    }
    data = stored["data"] | {"held_out": held_out}
    data["train"]["images"], data["test"]["images"] = num_train, 8
    changes = {
        "accuracy_counts": {"rows": [counts([accuracy + 10]), counts([last - 5, last + 15])]},
        "config": config,
        "weights": stored["weights"] | {"name": "vit.tag", "sha256": "a" * 64},
        "split_sha256": "b" * 64,
        "data": data,
    }
    return RunResult.model_validate(stored | changes | others)


def a_run(num_views: int, order: int, accuracy: float | None = None, **others: Any) -> TableRun:
    row = "slow" if num_views == 1 else f"slow-num_views={num_views}"
    found = None if accuracy is None else result(accuracy, **others)
    return TableRun(row, "photos", (7, order), f"out/v{num_views}/{order}", result=found)


def compared(*runs: TableRun) -> BenchmarkComparison:
    return compare_with_published(PublishedTable.model_validate(PUBLISHED), runs).benchmarks["photos"]


def test_compare_with_published__takes_results_from_before_a_setting() -> None:
    now = a_run(1, 1, 60)
    assert now.result is not None
    config = deepcopy(now.result.config)
    del config["trainer"]["mixed_precision"]
    assert compared(now, a_run(1, 2, 64, config=config)).lines[1].protocol == compared(now).lines[1].protocol
    del config["optimization"]["milestones"]
    config["optimization"]["schedule"] = "cosine"
    (protocol,) = compared(a_run(1, 2, 64, config=config)).lines[1].protocol
    assert "cosine, weight decay" in protocol


def test_compare_with_published__each_number_under_the_weighting_of_its_method() -> None:
    _, plain, views = compared(a_run(1, 1, 60), a_run(1, 2, 64), a_run(4, 1, 70), a_run(4, 2)).lines
    assert (plain.title, plain.line, views.title, views.line) == ("SLOW", "Slow", "VIEWS, V = 4", "Ours")
    assert plain.numbers["top-1 average"] == Cell(
        paper=Spread(80.0, 1.0),
        pooled=Spread(62.0, pytest.approx(8**0.5)),
        task_mean=Spread(64.5, pytest.approx(8**0.5)),
    )
    assert plain.numbers["top-1 last"].pooled.mean == pytest.approx(52.0)
    assert plain.numbers["top-1 last"].task_mean.mean == pytest.approx(57.0)
    assert views.numbers["top-1 last"].paper is None
    assert (plain.seeds, plain.missing) == (((7, 1), (7, 2)), ())
    assert (views.seeds, views.missing) == (((7, 1),), (((7, 2), "out/v4/2"),))
    assert plain.deviations == ("Weights differ.",)
    assert views.deviations == ("Weights differ.", "V is not stated.")


def test_compare_with_published__rows_that_are_not_run_stand_beside_ours() -> None:
    old, *_ = compared(a_run(1, 1, 60)).lines
    assert old.numbers["top-1 average"].paper == Spread(50.0, None)
    assert (old.numbers["top-1 average"].pooled, old.seeds, old.missing) == (Spread(None, None), (), ())
    assert not compare_with_published(PublishedTable.model_validate(PUBLISHED), []).benchmarks


def test_compare_with_published__every_measure_that_has_a_number() -> None:
    """A table has the columns that were published, and ours are those of result.json."""
    numbers = {"til_last": 90.0, "degree_of_forgetting": 1.73, "latency": 29.5, "memory": 0.235}
    row = PUBLISHED["rows"]["slow"] | {"published": {"photos": numbers}, "weighting": "pooled"}
    table = PublishedTable.model_validate(PUBLISHED | {"rows": {"slow": row}})
    stored = result(60).to_json()
    (facts, *_), (first, *more) = stored["task_records"], stored["timings"]["tasks"]
    timings = {
        "total_seconds": 1,
        "tasks": [first | {"step_seconds": 6, "peak_memory_bytes": 2e8}]
        + [each | {"step_seconds": 0, "peak_memory_bytes": 3e8} for each in more],
    }
    cell = {
        "total": 10,
        **{f"{scope}_incremental_top{top}": 4 for scope in ("class", "task") for top in (1, 5)},
    }
    changed = stored | {
        "accuracy_counts": {"rows": [[cell | {"task_incremental_top1": 3}]]},
        "task_records": [facts | {"degree_of_forgetting": {"train": 9.0, "test": 2.5}}],
        "num_steps": 200,
        "timings": timings,
    }
    (line,) = (
        compare_with_published(
            table, [TableRun("slow", "photos", (7, 1), "out", result=RunResult.model_validate(changed))]
        )
        .benchmarks["photos"]
        .lines
    )
    assert {heading: (cell.paper.mean, cell.pooled.mean) for heading, cell in line.numbers.items()} == {
        "TIL last": (90.0, 30.0),
        "degree of forgetting": (1.73, 2.5),
        "ms a step": (29.5, 30.0),
        "peak memory, GB": (0.235, pytest.approx(0.3)),
    }


def test_compare_with_published__pairs_seeds_on_the_same_images_and_weights_alone() -> None:
    (paired,) = compared(
        *(a_run(1, 1, 60), a_run(1, 2, 64), a_run(1, 3), a_run(1, 4, 50)),
        *(a_run(4, 1, 61), a_run(4, 2, 67), a_run(4, 3, 89), a_run(4, 4, 89, split_sha256="c" * 64)),
    ).paired
    assert paired.title == "VIEWS, V = 4, minus SLOW"
    assert paired.seeds == ((7, 1), (7, 2))
    average = paired.effects["top-1 average"]
    assert average.differences == pytest.approx((1.0, 3.0))
    assert (average.mean, average.std) == (pytest.approx(2.0), pytest.approx(2**0.5))
    assert paired.paper == {"top-1 average": 2.0, "top-1 last": None}


def test_compare_with_published__runs_of_one_class_order_are_pairs_by_their_training_seeds() -> None:
    runs = [
        TableRun(row, "photos", (seed, 1993), f"out/{row}/{seed}", result=result(accuracy))
        for row, accuracies in (("slow", (60, 64)), ("slow-num_views=4", (61, 67)))
        for seed, accuracy in enumerate(accuracies)
    ]
    (paired,) = compared(*runs).paired
    assert paired.seeds == ((0, 1993), (1, 1993))
    assert paired.effects["top-1 last"].differences == pytest.approx((1.0, 3.0))


def test_compare_with_published__leaves_out_lines_that_were_not_published() -> None:
    other = TableRun("own", "photos", (7, 1), "out/own")
    assert [line.row for line in compared(a_run(1, 1, 60), other).lines] == ["old", "slow"]


def test_compare_with_published__says_what_was_changed_and_which_images_differ() -> None:
    changed = TableRun("slow", "photos", (7, 1), "out", ("optimization.epochs: 20 against 2",), result(60))
    other = a_run(1, 2, 60, num_train=4000, held_out="a fifth")
    _, line = compared(changed, other).lines
    assert line.deviations == (
        "Weights differ.",
        "Not a setting of the study: optimization.epochs: 20 against 2.",
        "4,000 training and 8 test images, not 40 and 8 (the split of the paper).",
    )
    for held_out in ("a fifth", "nothing, the data set has a test split"):
        assert any(protocol.endswith(f", held out for testing: {held_out}") for protocol in line.protocol)
    assert line.protocol[0].rpartition(",")[0] == (
        "vit.tag (SHA-256 aaaaaaaaaaaa); inputs: bicubic, normalization imagenet, strong view autoaugment_cifar10; "
        "sgd 0.01, 20 epochs of batches of 128, multistep at 18, weight decay 0.0005, clipping none; precision no; "
        "split SHA-256 bbbbbbbbbbbb"
    )


def test_markdown__shows_both_numbers_the_pairs_and_what_is_missing() -> None:
    runs = (a_run(1, 1, 60), a_run(1, 2, 64), a_run(4, 1, 61), a_run(4, 2))
    page = markdown(compare_with_published(PublishedTable.model_validate(PUBLISHED), runs))
    assert (
        "| method | top-1 average p | ours | top-1 last p | ours | mean | runs |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| OLD | 50.00 | n/a | - | n/a | pooled | 0 |\n"
        "| SLOW | 80.00 ± 1.00 | 64.50 ± 2.83 | 70.00 ± 0.50 | 57.00 ± 2.83 | task mean | 2 |\n"
        "| VIEWS, V = 4 | 82.00 ± 1.00 | 63.50 | - | 56.00 | task mean | 1 |\n"
    ) in page
    assert "| published (of the means) | +2.00 | n/a |\n| 7, 1 | +1.00 | +1.00 |\n" in page
    assert "| ours | +1.00 | +1.00 |\n" in page
    assert "- Seeds are ours.\n- The split is a guess.\n- **OLD**\n" in page
    assert "## Not finished\n\n- S-Photos, VIEWS, V = 4, seed and class order 7, 2: `out/v4/2`\n" in page


@pytest.mark.parametrize("name", ["against", "published"])
def test_published_table__refuses_rows_that_name_what_is_not_there(name: str) -> None:
    value = {"against": "fast", "published": {"fast": {"last": 1.0}}}[name]
    rows = {"slow": PUBLISHED["rows"]["slow"] | {name: value}}
    with pytest.raises(ValueError, match="row slow names fast, which the table does not have"):
        PublishedTable.model_validate(PUBLISHED | {"rows": rows})


def table_of(name: str) -> PublishedTable:
    return PublishedTable.model_validate(read_yaml(find_config(f"published/{name}")))


@cache
def planned_of(name: str) -> list[PlannedRun]:
    """Return the runs of a study under its first seeds."""
    study = read_study(find_config(f"studies/{name}"))
    one = {"seeds": study.seeds[:1], "class_order_seeds": study.class_order_seeds[:1]}
    return plan_study(study.model_copy(update=one), output=Path("out"))


TABLES = {"paper": "paper_table"} | {
    f"paper_{name}": name for name in list_configs("published") if name != "paper_table"
}


@pytest.mark.parametrize("study", TABLES)
def test_published_table__every_line_of_its_study_is_a_row_of_the_table(study: str) -> None:
    """Each row of each benchmark is planned once, in three runs, and has a number of every column but for gaps."""
    table, runs = table_of(TABLES[study]), planned_of(study)
    rows = {(run.line, run.config.dataset.name) for run in runs}
    assert len(rows) == len(runs)
    assert rows == {
        (name, where) for name, row in table.rows.items() if row.is_run for where in row.published
    }
    assert {where for _, where in rows} == set(table.benchmarks)
    assert len(read_study(find_config(f"studies/{study}")).seeds) == 3
    assert {run.config.preset for run in runs} <= {"paper", "none"}
    assert "(label tab:" in table.source


def points(table: PublishedTable, name: str, where: str, measure: MeasureName) -> float | None:
    number = table.rows[name].number(where, measure)
    return None if number is None else number.mean


def gain(table: PublishedTable, name: str, where: str, *measures: MeasureName) -> float:
    """Return by how much a row exceeds the one that it is against, in the mean of some columns."""
    means = [
        sum(points(table, row, where, measure) for measure in measures) / len(measures)
        for row in (name, table.rows[name].against)
    ]
    return round(means[0] - means[1], 3)


# What the paper prints beside its rows, by row and benchmark: the difference of the means of both columns.
AVG_GAINS = {
    "task_comp": {
        "cifar10": {
            "er_200-num_views=4": 2.10, "icarl_200-num_views=4": 4.09, "der_pp_200-num_views=3": 4.51,
            "er_500-num_views=4": 3.54, "icarl_500-num_views=4": 5.50, "der_pp_500-num_views=3": 3.30,
            "er_5120-num_views=4": 2.61, "icarl_5120-num_views=4": 1.08, "der_pp_5120-num_views=3": 1.02,
        },
        "tiny_imagenet": {
            "er_200-num_views=4": 3.08, "icarl_200-num_views=4": 2.77, "der_pp_200-num_views=3": 2.18,
            "er_500-num_views=4": 1.94, "icarl_500-num_views=4": 3.34, "der_pp_500-num_views=3": -0.92,
            "er_5120-num_views=4": 3.16, "icarl_5120-num_views=4": 2.17, "der_pp_5120-num_views=3": 1.66,
        },
    },
    "factor_analysis_extended": {
        "cifar10": {
            "icarl_strong": -1.05, "icarl_replay": 2.53, "icarl_replay_strong": 1.83, "icarl_views": 4.09,
            "der_pp_strong": 0.76, "der_pp_replay": 2.63, "der_pp_replay_strong": 2.77, "der_pp_views": 4.51,
        }
    },
    "sample_type_analysis": {
        "cifar10": {
            "icarl-views_for=current": 2.22, "icarl-views_for=buffer": 2.44, "icarl-views_for=all": 4.09,
            "der_pp-views_for=current": 2.91, "der_pp-views_for=buffer": 2.28, "der_pp-views_for=all": 4.51,
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("name", AVG_GAINS)
def test_published_table__gains_of_both_protocols_are_those_printed(name: str) -> None:
    """The paper rounds each mean before it subtracts: half a hundredth each."""
    table = table_of(name)
    for where, printed in AVG_GAINS[name].items():
        found = {row: gain(table, row, where, "last", "til_last") for row in printed}
        assert found == {row: pytest.approx(value, abs=0.0101) for row, value in printed.items()}
        assert set(found) == {
            row for row, each in table.rows.items() if each.against and points(table, row, where, "last")
        }


# Average and last gain of each row as printed, by number of steps.
STEP_GAINS = {
    "step_comp": {
        "expandable-num_tasks=5-num_views=4": (1.83, 2.54), "expandable-num_tasks=10-num_views=4": (2.40, 2.72),
        "expandable-num_tasks=20-num_views=4": (1.99, 2.49), "tcil-num_tasks=5-num_views=4": (1.90, 1.75),
        "tcil-num_tasks=10-num_views=4": (1.69, 2.48), "tcil-num_tasks=20-num_views=4": (2.51, 4.62),
        "expandable_replay-num_tasks=5": (0.86, 1.15),  # the last one is printed as 1.25
        "expandable_replay-num_tasks=10": (0.81, 1.17), "expandable_replay-num_tasks=20": (0.59, 0.85),
        "tcil_replay-num_tasks=5": (1.09, 0.87), "tcil_replay-num_tasks=10": (0.69, 2.05),
        "tcil_replay-num_tasks=20": (0.75, 1.39),
    },
    "non_rehearsal_step_comp": {
        "expandable-num_tasks=5-num_views=4": (0.42, 0.36), "expandable-num_tasks=10-num_views=4": (0.28, 0.19),
        "tcil-num_tasks=5-num_views=4": (2.00, 2.32), "tcil-num_tasks=10-num_views=4": (4.28, 5.61),
    },
    "domain_comp": {
        "er-num_views=4": (3.42, 2.70),
        "der_pp-num_views=4": (7.60, 7.06),  # the first one is printed as 7.24
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STEP_GAINS)
def test_published_table__gains_in_average_and_last_are_those_printed(name: str) -> None:
    table = table_of(name)
    (where,) = table.benchmarks
    printed = STEP_GAINS[name]
    found = {row: (gain(table, row, where, "average"), gain(table, row, where, "last")) for row in printed}
    assert found == printed
    assert set(found) == {row for row, each in table.rows.items() if each.against}


def test_published_table__recall_interval_has_the_numbers_of_the_other_tables() -> None:
    """RI = 4 of iCaRL and RI = 3 of DER++ are the rows with views of the main table."""
    intervals, main = table_of("extended_recall_interval_analysis"), table_of("task_comp")
    for row, best in (("icarl", 4), ("der_pp", 3)):
        for num_views in (1, best):
            for measure in ("last", "til_last"):
                own = points(intervals, f"{row}-num_views={num_views}", "cifar10", measure)
                assert own == points(main, f"{row}_200-num_views={num_views}", "cifar10", measure)
        curve = [points(intervals, f"{row}-num_views={views}", "cifar10", "last") for views in range(1, 6)]
        assert max(curve) == curve[best - 1]


def test_published_table__on_pretrained_models_has_the_papers_lines() -> None:
    table = table_of("paper_table")
    assert {row.line for row in table.rows.values()} == {
        *("Joint", "L2P", "DualPrompt", "CODA-Prompt", "S-iPrompt", "SLCA", "VBM-SLCA"),
    }
    assert gain(table, "slca-num_views=4", "imagenet_r", "average") == 1.03  # what the paper's text says
    for row in table.rows.values():
        for where in row.published:
            assert (row.number(where, "average") is None) == (row.line == "Joint")
            assert row.number(where, "last_top5").mean > row.number(where, "last").mean
