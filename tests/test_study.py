"""Several configurations: planned, run once each, and collected."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vbm_ptm.analysis.spread import Spread
from vbm_ptm.config.run_config import compose
from vbm_ptm.config.study_config import StudyConfig, read_study
from vbm_ptm.data.reading.datasets import load_image_dataset, write_split
from vbm_ptm.errors import TrainingInterrupted, UsageError
from vbm_ptm.experiment import run
from vbm_ptm.runs.places import Places
from vbm_ptm.storage.run_result import read_result
from vbm_ptm.study import (
    PlannedRun,
    changed_settings,
    collect_finished,
    execute,
    fitting,
    measured_run,
    plan_runs,
    plan_study,
    shard,
)

Tree = dict[str, Any]

ANY_CONFIG = compose(dataset="digits", learner="finetune").validate()


def sources(toy_tree: Callable[..., Tree], learner: str = "nearest_mean") -> dict[str, Any]:
    return {"tree": toy_tree(learner)}


@pytest.mark.parametrize(
    ("seeds", "orders", "expected"),
    [
        ((), (), [(1993, 1993)]),
        ((1, 2), (), [(1, 1993), (2, 1993)]),
        ((), (7, 8), [(1993, 7), (1993, 8)]),
        ((1, 2), (7, 7), [(1, 7), (2, 7)]),
        ((1, 1), (7, 8), [(1, 7), (1, 8)]),
    ],
)
def test_plan_runs__walks_both_lists_side_by_side(
    seeds: tuple[int, ...],
    orders: tuple[int, ...],
    expected: list[tuple[int, int]],
    toy_tree: Callable[..., Tree],
) -> None:
    planned = plan_runs("a/b", output=Path("out"), seeds=seeds, class_order_seeds=orders, **sources(toy_tree))
    assert [item.seeds for item in planned] == expected
    folders = [Path("out/a_b") / f"seed_{seed}-order_{order}" for seed, order in expected]
    assert [item.output for item in planned] == (folders if seeds or orders else [Path("out/a_b")])


@pytest.mark.parametrize(
    ("seeds", "orders", "message"),
    [
        ((1, 2), (1,), "2 seeds and 1 class-order seeds"),
        ((3, 1, 3), (), "seeds given more than once: 3"),
        ((), (4, 4), "seeds given more than once: 4"),
        ((1, 1), (2, 2), r"seeds given more than once: \(1, 2\)"),
    ],
)
def test_plan_runs__refuses_lists_that_do_not_fit(
    seeds: tuple[int, ...], orders: tuple[int, ...], message: str, toy_tree: Callable[..., Tree]
) -> None:
    with pytest.raises(UsageError, match=message):
        plan_runs("a", output=Path("out"), seeds=seeds, class_order_seeds=orders, **sources(toy_tree))


@pytest.mark.slow
def test_execute__skips_what_is_finished_and_goes_on_with_what_is_not(
    toy_tree: Callable[..., Tree], tmp_path: Path
) -> None:
    planned = plan_runs("mean", output=tmp_path, class_order_seeds=(1, 2, 3), **sources(toy_tree))
    run(planned[0].config, output=planned[0].output)
    with pytest.raises(TrainingInterrupted):
        run(planned[1].config, output=planned[1].output, stop_after_task=2)
    finished = planned[0].output / "result.json"
    before = finished.stat().st_mtime_ns
    saved = planned[1].output / "checkpoints" / "task_00" / "state.json"
    saved_before = saved.stat().st_mtime_ns

    collected = execute(planned, output=tmp_path)
    assert finished.stat().st_mtime_ns == before
    assert saved.stat().st_mtime_ns == saved_before
    results = [json.loads((item.output / "result.json").read_text()) for item in planned]
    assert [result["status"] for result in results] == ["finished"] * 3
    whole = run(planned[1].config, output=tmp_path / "whole")
    assert results[1]["accuracy_counts"] == whole["accuracy_counts"]

    assert json.loads((tmp_path / "study.json").read_text()) == json.loads(json.dumps(collected.to_json()))
    (row,) = collected.rows
    values = [
        result["metrics"]["class_incremental"]["top1"]["average_incremental_accuracy"] for result in results
    ]
    assert (row.label, row.num_runs) == ("mean", 3)
    assert row.average_incremental_accuracy == Spread(
        pytest.approx(sum(values) / 3), pytest.approx(statistics.stdev(values))
    )
    again = execute(planned, output=tmp_path)
    assert again == collected


@pytest.mark.slow
def test_execute__a_run_that_fails_does_not_take_the_others_with_it(
    toy_tree: Callable[..., Tree], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = toy_tree("finetune"), toy_tree("nearest_mean")
    diverging = plan_runs(
        "diverging", output=tmp_path, tree=bad, overrides=["optimization.learning_rate=1e30"]
    )
    no_data = plan_runs("no_data", output=tmp_path, tree=good, overrides=["dataset.path=/nowhere"])
    fine = plan_runs("fine", output=tmp_path, tree=good, class_order_seeds=(1, 2))
    with caplog.at_level("INFO", logger="vbm_ptm"):
        collected = execute([*diverging, *no_data, *fine], output=tmp_path)
    assert [(item.label, str(item.problem).partition(":")[0]) for item in collected.failed] == [
        ("diverging", "FloatingPointError"),
        ("no_data", "UsageError"),
    ]
    assert "'/nowhere' does not exist" in str(collected.failed[1].problem)
    assert [(row.label, row.num_runs) for row in collected.rows] == [("fine", 2)]
    assert [item.label for item in collected.missing] == ["diverging", "no_data"]
    assert json.loads((tmp_path / "study.json").read_text()) == json.loads(json.dumps(collected.to_json()))
    # Both orders and the run that failed read the same images, which is said once.
    assert [record.getMessage() for record in caplog.records if "train split:" in record.getMessage()] == [
        "toy (split): train split: 72 images, 12 classes, 6 images per class."
    ]


@pytest.mark.slow
def test_execute__skips_damaged_checkpoints_when_asked(
    toy_tree: Callable[..., Tree], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planned = plan_runs("mean", output=tmp_path, **sources(toy_tree))
    with pytest.raises(TrainingInterrupted):
        run(planned[0].config, output=planned[0].output, stop_after_task=2)
    newest = planned[0].output / "checkpoints" / "task_01" / "state.json"
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"task_01/state.json is damaged") as caught:
        execute(planned, output=tmp_path)
    assert caught.value.advice == "skip_damaged"
    assert execute(planned, output=tmp_path, skip_damaged=True).rows[0].num_runs == 1
    # Of a finished run, too.
    last = planned[0].output / "checkpoints" / "task_02" / "state.json"
    last.write_bytes(last.read_bytes()[:50])
    execute(planned, output=tmp_path)
    assert last.stat().st_size == 50
    execute(planned, output=tmp_path, skip_damaged=True)
    assert last.stat().st_size > 50
    caplog.clear()
    with caplog.at_level("INFO", logger="vbm_ptm"):
        execute(planned, output=tmp_path, skip_damaged=True)
    assert "1 of 1 runs are finished" in caplog.text


def test_execute__raises_where_no_run_is_possible(
    toy_tree: Callable[..., Tree], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planned = plan_runs(
        "mean", output=tmp_path, seeds=(1, 2), overrides=["dataset.path=/nowhere"], **sources(toy_tree)
    )
    with pytest.raises(UsageError, match="'/nowhere' does not exist") as refused:
        execute(planned, output=tmp_path)
    assert len(refused.value.problems) == 1


def test_execute__a_failure_on_one_of_several_ranks_ends_the_study(
    toy_tree: Callable[..., Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan_runs("mean", output=tmp_path, seeds=(1, 2), **sources(toy_tree))
    planned[0].output.parent.mkdir(parents=True)
    planned[0].output.write_text("in the way")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UsageError, match="is a file"):
        execute(planned, output=tmp_path)
    assert not planned[1].output.exists()


def test_execute__an_interruption_stops_all(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    planned = plan_runs(
        "long",
        output=tmp_path,
        tree=toy_tree("finetune"),
        overrides=["optimization.epochs=1000"],
        seeds=(1, 2),
    )
    log = planned[0].output / "log.jsonl"

    def interrupt() -> None:
        while not (log.exists() and log.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(TrainingInterrupted):
        execute(planned, output=tmp_path)
    thread.join()
    assert not planned[1].output.exists()
    missing = collect_finished(planned).missing
    assert [item.seeds for item in missing] == [(1, 1993), (2, 1993)]


@pytest.mark.slow
def test_execute__a_part_collects_what_is_finished_of_all(
    toy_tree: Callable[..., Tree], tmp_path: Path
) -> None:
    planned = plan_runs("mean", output=tmp_path, class_order_seeds=(1, 2, 3), **sources(toy_tree))
    first = execute(planned[:1], output=tmp_path, study=planned)
    assert first.rows[0].num_runs == 1
    assert [item.seeds for item in first.missing] == [(1993, 2), (1993, 3)]
    last = execute(planned[1:], output=tmp_path, study=planned)
    assert (last.rows[0].num_runs, last.missing) == (3, ())
    assert collect_finished(planned) == last


def test_collect_finished__refuses_runs_of_another_configuration_but_not_of_another_place(
    toy_tree: Callable[..., Tree], toy_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def planned(*overrides: str) -> list[PlannedRun]:
        return plan_runs("mean", output=tmp_path / "out", overrides=overrides, **sources(toy_tree))

    execute(planned(), output=tmp_path / "out")
    moved = f"dataset.path={shutil.copytree(toy_folder, tmp_path / 'moved')}"
    collected = collect_finished(planned(moved))
    assert (collected.rows[0].num_runs, collected.missing) == (1, ())
    assert execute(planned(moved), output=tmp_path / "out").rows == collected.rows
    image = next((tmp_path / "moved").glob("train/*/*.png"))
    image.rename(image.with_name("other.png"))
    with pytest.raises(UsageError, match=r"made with data other than those at .*the images or their split"):
        collect_finished(planned(moved))
    shutil.rmtree(tmp_path / "moved")
    assert collect_finished(planned(moved)) == collected
    assert "; not checked: " in caplog.text
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"other weights")
    with pytest.raises(UsageError, match="SHA-256 of the weights"):
        collect_finished(planned(f"backbone.checkpoint={other}"))
    assert collect_finished(planned("backbone.checkpoint=null")).rows == collected.rows
    assert "made with its own weights file, which is not compared with" in caplog.text
    with pytest.raises(
        UsageError, match=r"started with another configuration .*class_order_seed: 1993 against 5"
    ):
        collect_finished(planned("scenario.class_order_seed=5"))


def test_collect_finished__takes_lists_of_the_same_content_from_another_place(
    toy_tree: Callable[..., Tree], toy_folder: Path, tmp_path: Path
) -> None:
    def planned(*overrides: str) -> list[PlannedRun]:
        return plan_runs("mean", output=tmp_path / "out", overrides=overrides, **sources(toy_tree))

    here, there = tmp_path / "split.csv", tmp_path / "there.csv"
    write_split(load_image_dataset(planned()[0].config.dataset), here)
    execute(planned(f"dataset.split_file={here}"), output=tmp_path / "out")
    shutil.copy(here, there)
    assert collect_finished(planned(f"dataset.split_file={there}")).missing == ()
    there.write_text("".join(there.read_text().splitlines(keepends=True)[:-1]))
    for other in (f"dataset.split_file={there}", "dataset.split_file=nowhere.csv", "dataset.split_file=null"):
        with pytest.raises(UsageError, match=r"another configuration .*dataset\.split_file"):
            collect_finished(planned(other))


@given(costs=st.lists(st.integers(0, 50), max_size=12), count=st.integers(1, 5))
def test_shard__parts_are_disjoint_complete_and_of_about_equal_cost(costs: list[int], count: int) -> None:
    runs = [PlannedRun(str(index), ANY_CONFIG, Path(str(index))) for index in range(len(costs))]
    parts = [shard(runs, index=index, count=count, costs=costs) for index in range(count)]
    labels = [[int(planned.label) for planned in part] for part in parts]
    assert sorted(itertools.chain(*labels)) == list(range(len(costs)))
    assert all(part == sorted(part) for part in labels)
    loads = [sum(costs[label] for label in part) for part in labels]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_shard__begins_with_the_dearest_run() -> None:
    runs = [PlannedRun(label, ANY_CONFIG, Path(label)) for label in "abc"]
    parts = [shard(runs, index=index, count=2, costs=[1, 1, 2]) for index in range(2)]
    assert [[planned.label for planned in part] for part in parts] == [["c"], ["a", "b"]]


def planned_run(label: str, *overrides: str) -> PlannedRun:
    config = compose(dataset="digits", learner="finetune", overrides=overrides).validate()
    return PlannedRun(label, config, Path("out") / label)


def test_measured_run__families_differ_in_anything_but_the_view_batch() -> None:
    result = read_result(Path(__file__).parent / "storage" / "result.json")
    slow, fast = "optimization.learning_rate=0.001", "optimization.learning_rate=0.1"
    one, four = "view_batch.num_views=1", "view_batch.num_views=4"
    runs = {
        "slow-1": planned_run("slow-1", one, slow),
        "slow-4": planned_run("slow-4", four, slow, "objective.consistency_weight=2"),
        "fast-4": planned_run("fast-4", four, fast),
        "seed-4": planned_run("seed-4", four, slow, "seed=7"),
    }
    measured = {label: measured_run(planned, result) for label, planned in runs.items()}
    families = {label: run.family for label, run in measured.items()}
    assert families["slow-1"] == families["slow-4"]
    assert len(set(families.values())) == 3
    run = measured["seed-4"]
    assert (run.label, run.seeds, run.directory, run.num_views) == ("seed-4", (7, 1993), "out/seed-4", 4)
    assert (run.num_steps, run.num_images) == (result.num_steps, result.num_images)
    assert run.matrix.rows == result.matrix.rows
    assert run.seconds == result.task_seconds


def write_study(file: Path, **parts: Any) -> StudyConfig:
    file.write_text(json.dumps({"dataset": "digits", "runs": [{"learner": "finetune"}], **parts}))
    return read_study(file)


def test_plan_study__combines_runs_grid_and_seeds(tmp_path: Path) -> None:
    study = write_study(
        tmp_path / "study.yaml",
        preset="embedded",
        settings={"optimization": {"epochs": 8, "batch_size": 32}, "seed": 4},
        runs=[
            {"learner": "finetune", "settings": {"optimization": {"epochs": 12}}},
            {"learner": "slca", "name": "mine", "preset": "paper"},
        ],
        grid={"view_batch.num_views": [1, 4], "optimization.clip_gradient_norm": [None, 1.5]},
        class_order_seeds=[1, 2],
    )
    planned = plan_study(study, output=Path("out"), overrides=["device=cpu"])
    assert len(planned) == 2 * 4 * 2
    assert [str(item.output) for item in planned[:3]] == [
        "out/finetune-num_views=1-clip_gradient_norm=None/seed_4-order_1",
        "out/finetune-num_views=1-clip_gradient_norm=1.5/seed_4-order_1",
        "out/finetune-num_views=4-clip_gradient_norm=None/seed_4-order_1",
    ]
    assert len({item.output for item in planned}) == 16
    configs = {item.label: item.config for item in planned}
    first, last = configs["finetune-num_views=1-clip_gradient_norm=None"], planned[-1].config
    assert (first.optimization.epochs, first.optimization.batch_size, first.preset) == (12, 32, "embedded")
    assert (first.view_batch.num_views, first.optimization.clip_gradient_norm) == (1, None)
    assert (last.optimization.epochs, last.view_batch.num_views, last.preset) == (8, 4, "paper")
    assert last.optimization.clip_gradient_norm == 1.5
    assert {item.config.device for item in planned} == {"cpu"}


def test_plan_study__validates_every_run_before_the_first(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study.yaml", grid={"view_batch.num_views": [1, 7]})
    with pytest.raises(UsageError, match="nearest batch sizes that do are"):
        plan_study(study, output=Path("out"))


def test_plan_study__refuses_two_runs_in_one_folder(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study.yaml", grid={"seed": [1, 1]})
    with pytest.raises(UsageError, match="several runs of the study would be written to out/finetune-seed=1"):
        plan_study(study, output=Path("out"))


def test_plan_study__runs_may_have_data_sets_of_their_own(tmp_path: Path) -> None:
    runs = [{"learner": "finetune"}, {"learner": "finetune", "dataset": "cifar100", "name": "photos"}]
    planned = plan_study(write_study(tmp_path / "study.yaml", runs=runs), output=Path("out"))
    assert [item.config.dataset.name for item in planned] == ["digits", "cifar100"]
    with pytest.raises(UsageError, match="no data set is given for finetune: set 'dataset' of the study"):
        write_study(tmp_path / "study.yaml", runs=runs, dataset=None)


def test_plan_study__a_run_may_have_a_grid_of_its_own(tmp_path: Path) -> None:
    runs = [
        {"learner": "finetune", "name": "plain", "settings": {"view_batch": {"num_views": 1}}},
        {"learner": "finetune", "name": "views", "grid": {"view_batch.num_views": [2, 4]}},
    ]
    study = write_study(tmp_path / "study.yaml", runs=runs, grid={"seed": [1, 2]})
    assert [item.label for item in plan_study(study, output=Path("out"))] == [
        *("plain-seed=1", "plain-seed=2"),
        *(f"views-seed={seed}-num_views={views}" for seed in (1, 2) for views in (2, 4)),
    ]


def test_plan_study__settings_of_one_line_are_not_those_of_the_next(tmp_path: Path) -> None:
    runs = [
        {"name": "alone", "learner": "slca", "settings": {"dataset": {"transforms": {"strong": "none"}}}},
        {"name": "both", "learner": "slca"},
    ]
    settings = {"dataset": {"transforms": {"interpolation": "bilinear"}}}
    study = write_study(tmp_path / "study.yaml", runs=runs, settings=settings)
    alone, both = plan_study(study, output=Path("out"))
    assert [each.config.dataset.transforms.strong for each in (alone, both)] == ["none", "affine"]
    assert both.config.dataset.transforms.interpolation == "bilinear"


def test_plan_study__settings_on_a_data_set_win_over_those_of_the_line(tmp_path: Path) -> None:
    study = {
        "datasets": ["digits", "cifar100"],
        "runs": [
            {
                "learner": "finetune",
                "settings": {"optimization": {"epochs": 5, "batch_size": 16}},
                "settings_on": {"cifar100": {"optimization": {"epochs": 7}}},
                "grid": {"view_batch.num_views": [1, 4]},
            }
        ],
    }
    planned = plan_study(StudyConfig.model_validate(study), output=tmp_path)
    found = {
        run.label: (run.config.optimization.epochs, run.config.optimization.batch_size) for run in planned
    }
    assert found == {
        f"{name}-finetune-num_views={views}": (epochs, 16)
        for name, epochs in (("digits", 5), ("cifar100", 7))
        for views in (1, 4)
    }
    assert {run.line for run in planned} == {"finetune-num_views=1", "finetune-num_views=4"}
    study["runs"][0]["settings_on"] = {"cifar10": {}}
    with pytest.raises(ValueError, match="finetune has settings_on cifar10, but is run on digits, cifar100"):
        StudyConfig.model_validate(study)


def test_plan_study__runs_every_line_on_every_data_set_pairs_side_by_side(tmp_path: Path) -> None:
    runs = [
        {"learner": "finetune", "name": "tune", "grid": {"view_batch.num_views": [1, 2]}},
        {"learner": "nearest_mean", "dataset": "digits"},
    ]
    file = tmp_path / "study.yaml"
    study = write_study(file, runs=runs, dataset=None, datasets=["digits", "cifar100"], seeds=[1, 2])
    planned = plan_study(study, output=Path("out"))
    assert [(item.label, item.config.seed, item.line) for item in planned] == [
        *((f"{name}-tune-num_views={views}", seed, f"tune-num_views={views}") for name in ("digits", "cifar100")
          for seed in (1, 2) for views in (1, 2)),
        *(("nearest_mean", seed, "nearest_mean") for seed in (1, 2)),
    ]  # fmt: skip
    with pytest.raises(UsageError, match="'dataset' and 'datasets' are both given"):
        write_study(file, datasets=["digits"])


def test_plan_study__places_are_of_a_data_set_and_of_a_backbone(tmp_path: Path) -> None:
    runs = [
        {"learner": "finetune", "settings": {"backbone": {"name": "vit_base_patch16_224.augreg_in21k"}}},
        {"learner": "finetune", "name": "embedded"},
    ]
    study = write_study(tmp_path / "study.yaml", runs=runs, dataset=None, datasets=["digits", "cifar100"])
    file = tmp_path / "vit_base_patch16_224.augreg_in21k.npz"
    file.touch()
    places = Places({"cifar100": {"path": "/images", "split_file": "/split.csv"}}, tmp_path)
    configs = {item.label: item.config for item in plan_study(study, output=Path("out"), places=places)}
    assert configs["cifar100-finetune"].dataset.path == Path("/images")
    assert configs["cifar100-finetune"].dataset.split_file == Path("/split.csv")
    assert configs["digits-finetune"].dataset.path is None
    assert configs["digits-finetune"].backbone.checkpoint == file
    assert configs["digits-embedded"].backbone.checkpoint is None  # it ships in the package
    with pytest.raises(UsageError, match=r"unknown data set 'cifar10'.*Did you mean 'cifar100'"):
        plan_study(study, output=Path("out"), places=Places({"cifar10": {}}))


def test_plan_study__takes_the_lines_and_seeds_that_are_asked_for(tmp_path: Path) -> None:
    study = write_study(
        tmp_path / "study.yaml", runs=[{"learner": "slca"}, {"learner": "nearest_mean"}], seeds=[1, 2]
    )

    def chosen(*patterns: str, overrides: Sequence[str] = ()) -> list[tuple[str, int]]:
        planned = plan_study(study, output=Path("out"), only=patterns, overrides=overrides)
        return [(item.label, item.config.seed) for item in planned]

    # A setting of one learner alone is no fault of the others, which are not asked for.
    only_tuned = ["learner.backbone_learning_rate_scale=0.5"]
    assert chosen("sl*", overrides=only_tuned) == [("slca", 1), ("slca", 2)]
    assert chosen("*/seed_2-*", "slca") == [("slca", 1), ("slca", 2), ("nearest_mean", 2)]
    with pytest.raises(UsageError, match=r"no run of the study matches 'l2p'\. Its lines are: 'slca', 'near"):
        chosen("l2p", "slca")
    with pytest.raises(UsageError, match="matches 'slca/seed_3"):
        chosen("slca/seed_3*")


def test_fitting__takes_what_still_fits_in_order() -> None:
    runs = [PlannedRun(label, ANY_CONFIG, Path(label)) for label in "abcd"]
    kept = fitting(runs, costs=[2, 5, 1, 2], budget=4)
    assert [planned.label for planned in kept] == ["a", "c"]


def test_changed_settings__are_those_that_may_change_a_number() -> None:
    own = planned_run("own")
    numberless = ("data.num_workers=3", "dataset.path=/x", "backbone.checkpoint=/y", "device=cpu")
    given = planned_run("own", "optimization.epochs=7", "dataset.test_fraction=0.4", *numberless)
    changed = changed_settings(given, own)
    assert [line.partition(":")[0] for line in changed] == ["dataset.test_fraction", "optimization.epochs"]
    assert changed[0].endswith("0.2 against 0.4")
