"""The published table beside our runs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vbm_ptm.analysis.spread import Spread
from vbm_ptm.config.study_config import read_study
from vbm_ptm.config.tree import find_config, read_yaml
from vbm_ptm.metrics import AccuracyCell
from vbm_ptm.report.published import (
    BenchmarkComparison,
    Cell,
    PublishedTable,
    TableRun,
    compare_with_published,
    markdown,
)
from vbm_ptm.storage.run_result import RunResult, read_result

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
        "slow": {
            "title": "SLOW",
            "line": "Slow",
            "weighting": "task_mean",
            "published": {"photos": {"top1": {"average": [80.0, 1.0], "last": [70.0, 0.5]}}},
            "deviations": ["Weights differ."],
            "with_views": {
                "title": "VIEWS",
                "line": "Ours",
                "published": {"photos": {"top1": {"average": [82.0, 1.0]}}},
                "deviations": ["V is not stated."],
            },
        }
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
    found = None if accuracy is None else result(accuracy, **others)
    return TableRun("slow", "photos", num_views, order, f"out/v{num_views}/{order}", result=found)


def compared(*runs: TableRun) -> BenchmarkComparison:
    return compare_with_published(PublishedTable.model_validate(PUBLISHED), runs).benchmarks["photos"]


def test_compare_with_published__each_number_under_the_weighting_of_its_method() -> None:
    plain, views = compared(a_run(1, 1, 60), a_run(1, 2, 64), a_run(4, 1, 70), a_run(4, 2)).lines
    assert (plain.title, plain.line, views.title, views.line) == ("SLOW", "Slow", "VIEWS, V = 4", "Ours")
    assert plain.numbers["top-1 average"] == Cell(
        paper=Spread(80.0, 1.0),
        pooled=Spread(62.0, pytest.approx(8**0.5)),
        task_mean=Spread(64.5, pytest.approx(8**0.5)),
    )
    assert plain.numbers["top-1 last"].pooled.mean == pytest.approx(52.0)
    assert plain.numbers["top-1 last"].task_mean.mean == pytest.approx(57.0)
    assert plain.numbers["top-5 last"].paper is None
    assert views.numbers["top-1 last"].paper is None
    assert (plain.orders, plain.missing) == ((1, 2), ())
    assert (views.orders, views.missing) == ((1,), ((2, "out/v4/2"),))
    assert plain.deviations == ("Weights differ.",)
    assert views.deviations == ("Weights differ.", "V is not stated.")


def test_compare_with_published__pairs_orders_on_the_same_images_and_weights_alone() -> None:
    (paired,) = compared(
        *(a_run(1, 1, 60), a_run(1, 2, 64), a_run(1, 3), a_run(1, 4, 50)),
        *(a_run(4, 1, 61), a_run(4, 2, 67), a_run(4, 3, 89), a_run(4, 4, 89, split_sha256="c" * 64)),
    ).paired
    assert paired.title == "VIEWS, V = 4, minus SLOW"
    assert paired.orders == (1, 2)
    average = paired.effects["top-1 average"]
    assert average.differences == pytest.approx((1.0, 3.0))
    assert (average.mean, average.std) == (pytest.approx(2.0), pytest.approx(2**0.5))
    assert paired.paper == {
        "top-1 average": 2.0,
        **dict.fromkeys(("top-1 last", "top-5 average", "top-5 last")),
    }


def test_compare_with_published__leaves_out_lines_that_were_not_published() -> None:
    other = TableRun("own", "photos", 1, 1, "out/own")
    assert [line.row for line in compared(a_run(1, 1, 60), other).lines] == ["slow"]


def test_compare_with_published__says_what_was_changed_and_which_images_differ() -> None:
    changed = TableRun("slow", "photos", 1, 1, "out", ("optimization.epochs: 20 against 2",), result(60))
    other = a_run(1, 2, 60, num_train=4000, held_out="a fifth")
    (line,) = compared(changed, other).lines
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
        "| method | top-1 average p | ours | top-1 last p | ours | top-5 average p | ours | top-5 last p | ours | "
        "mean | runs |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| SLOW | 80.00 ± 1.00 | 64.50 ± 2.83 | 70.00 ± 0.50 | 57.00 ± 2.83 | - | 64.50 ± 2.83 | - | 57.00 ± 2.83 "
        "| task mean | 2 |\n"
        "| VIEWS, V = 4 | 82.00 ± 1.00 | 63.50 | - | 56.00 | - | 63.50 | - | 56.00 | task mean | 1 |\n"
    ) in page
    assert (
        "| published (of the means) | +2.00 | n/a | n/a | n/a |\n| 1 | +1.00 | +1.00 | +1.00 | +1.00 |\n"
        in page
    )
    assert "| ours | +1.00 | +1.00 | +1.00 | +1.00 |\n" in page
    assert "- Seeds are ours.\n- The split is a guess.\n- **SLOW**\n" in page
    assert "## Not finished\n\n- S-Photos, VIEWS, V = 4, order 2: `out/v4/2`\n" in page


def test_published_table__is_complete() -> None:
    """Every row of the paper's table on both benchmarks, a line of the study; Joint has no average there."""
    table = PublishedTable.model_validate(read_yaml(find_config("published/paper_table")))
    study = read_study(find_config("studies/paper"))
    assert {entry.line for entry in study.runs} == set(table.rows)
    assert set(study.datasets) == set(table.benchmarks)
    lines = [line for row in table.rows.values() for line in (row, row.with_views) if line]
    assert {line.line for line in lines} == {
        *("Joint", "L2P", "DualPrompt", "CODA-Prompt", "S-iPrompt", "SLCA", "VBM-SLCA"),
    }
    for line in lines:
        assert set(line.published) == set(table.benchmarks) == {"cifar100", "imagenet_r"}
        for numbers in line.published.values():
            for accuracy in (numbers.top1, numbers.top5):
                assert accuracy.last
                assert (accuracy.average is None) == (line.line == "Joint")
            assert numbers.top5.last > numbers.top1.last
    gains = [
        round(
            views.published["imagenet_r"].top1.average[0] - plain.published["imagenet_r"].top1.average[0], 2
        )
        for plain, views in [(table.rows["slca"], table.rows["slca"].with_views)]
    ]
    assert gains == [1.03]  # what the paper's text says of ImageNet-R


def test_task_comp__has_the_lines_and_gains_of_the_paper() -> None:
    """Every row is a line of the study; gains on S-CIFAR-10 and S-Tiny-ImageNet as the table's columns tell."""
    table = PublishedTable.model_validate(read_yaml(find_config("published/task_comp_200")))
    study = read_study(find_config("studies/paper_task_comp_200"))
    assert {entry.line for entry in study.runs} == set(table.rows)
    assert set(study.datasets) == set(table.benchmarks)
    gains = {
        name: tuple(
            round(row.with_views.published[on].top1.last[0] - row.published[on].top1.last[0], 2)
            for on in ("cifar10", "tiny_imagenet")
        )
        for name, row in table.rows.items()
    }
    assert gains == {"icarl": (5.62, 2.30), "der_pp": (5.32, 1.19), "er": (2.29, 0.16)}
