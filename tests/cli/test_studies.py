"""vbm-ptm study: the runs of the paper's table, its parts, and the whole way to the table on a miniature."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from images import write_split

from vbm_ptm.cli import main

Say = Callable[..., tuple[int, str, str]]

PAPER = ("study", "studies/paper", "--published", "published/paper_table")


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Return a function that runs the paper's study and returns exit code, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*PAPER, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def listed(shown: str) -> dict[tuple[str, str], list[str]]:
    """Return the cells of every run of a dry run by name and class order."""
    lines = (line.split("│")[1:-1] for line in shown.splitlines() if "│" in line)
    cells = [[cell.strip() for cell in line] for line in lines]
    return {(name, seeds.partition(", ")[2]): rest for name, seeds, *rest in cells}


def to_run(shown: str) -> list[tuple[str, str]]:
    return [run for run, cells in listed(shown).items() if cells[-1] == "to run"]


def test_dry_run__shows_the_whole_table_without_data_or_weights(say: Say) -> None:
    code, shown, _ = say("--dry-run", "--images-per-second", "100")
    assert code == 0
    runs = listed(shown)
    # 8 lines (SLCA with 1 and 4 views, six others) on 2 benchmarks in 3 orders.
    assert len(runs) == len(to_run(shown)) == 8 * 2 * 3
    for num_views in (1, 4):
        # 20 epochs of 40 steps, 50 epochs of 19 steps, for each of 10 tasks.
        slca = f"slca-num_views={num_views}"
        assert runs[f"cifar100-{slca}", "1993"][:3] == ["10", "8,000", "1,000,000"]
        assert runs[f"imagenet_r-{slca}", "1997"][:3] == ["10", "9,500", "1,200,000"]
    assert runs["cifar100-joint", "1993"][:3] == ["1", "7,820", "1,000,000"]
    assert runs["cifar100-l2p", "1996"][:3] == ["10", "15,650", "250,000"]
    # Looked at: 50,000 for features and 10,000 x (0.1 + ... + 1) in tests, each a third.
    hours = (1_000_000 + (50_000 + 55_000) / 3) / 100 / 3600
    assert runs["cifar100-slca-num_views=1", "1993"][3] == f"{hours:.2f}"
    assert "assumed: CODA-Prompt's split, the same number of images for each class, 24,000 for" in shown
    assert shown.count("before what its settings leave out or hold out") == 2
    assert "all: 48 runs" in shown


def test_dry_run__leaves_out_what_settings_leave_out_of_published_counts(say: Say) -> None:
    some = ("cifar100.train_images_per_class=50", "cifar100.validation_fraction=0.8")
    for settings, images in ((some[:1], 50), (some, 50), (some[1:], 100)):
        only = ("--dry-run", "--only", "cifar100-slca-num_views=1/*1993")
        code, shown, _ = say(*only, *(word for each in settings for word in ("--data", each)))
        assert code == 0
        assert listed(shown)["cifar100-slca-num_views=1", "1993"][2] == f"{20 * 100 * images:,}"


@pytest.mark.slow
def test_dry_run__the_most_informative_runs_fit_first(say: Say) -> None:
    _, shown, _ = say("--dry-run", "--budget-hours", "4.6", "--images-per-second", "300")
    assert to_run(shown)[:4] == [
        (f"imagenet_r-slca-num_views={views}", order) for order in ("1993", "1996") for views in ("1", "4")
    ]
    assert "to run here: 4 runs" in shown
    _, shown, _ = say("--dry-run", "--budget-hours", "0.5", "--only", "cifar100-*")
    assert {name for name, _ in to_run(shown)} == {"cifar100-dualprompt"}  # those before it are too long


@pytest.mark.slow
def test_dry_run__parts_are_disjoint_and_complete(say: Say) -> None:
    command = ("--dry-run", "--only", "*-slca*", "--only", "*-l2p/seed_199[37]*")
    whole = to_run(say(*command)[1])
    assert len(whole) == 2 * (2 * 3 + 2)
    parts = [to_run(say(*command, "--shard", f"{part}/3")[1]) for part in (1, 2, 3)]
    assert sorted(run for part in parts for run in part) == sorted(whole)
    assert all(parts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--only", "slcaa"],
            "no run of the study matches 'slcaa'. Its lines are: 'imagenet_r-slca-num_views=1'",
        ),
        (["--data", "imagenet=/x"], "unknown data set 'imagenet'. Did you mean 'imagenet_r'?"),
        (["--data", "cifar100"], "--data 'cifar100' is not of the form NAME=PATH or NAME.SETTING=VALUE"),
        (["--shard", "0/2"], "--shard '0/2' is not of the form PART/PARTS"),
        (["--published", "studies/paper"], "published table: "),
        (
            ["--only", "imagenet_r-*"],
            "the images of data set 'imagenet_r' are needed: dataset.path is not set",
        ),
        (["--only", "imagenet_r-*"], "Give their places with --data NAME=PATH"),
        (["--data", "cifar100=/nowhere"], "data set 'cifar100': '/nowhere' does not exist"),
        (
            ["--only", "cifar100-*", "--weights", "/nowhere"],
            "the weights vit_base_patch16_224.orig_in21k are needed: there is no file "
            "/nowhere/vit_base_patch16_224.orig_in21k.safetensors",
        ),
        (
            [
                *("--only", "imagenet_r-*", "--data", "imagenet_r=/nowhere"),
                *("--data", "imagenet_r.split_file=/no.csv"),
            ],
            "cannot read the list '/no.csv'",
        ),
    ],
)
def test_study__refuses_to_start_with_what_is_wrong_or_missing(
    options: list[str], message: str, say: Say, tmp_path: Path
) -> None:
    code, shown, said = say("--output", str(tmp_path / "out"), *options)
    assert (code, shown) == (2, "")
    assert message in said
    assert not (tmp_path / "out").exists()


def place(arguments: list[str]) -> str:
    """Return NAME=PATH of a miniature."""
    return f"{arguments[1]}={arguments[3].partition('=')[2]}"


@pytest.mark.slow
def test_study__runs_part_by_part_to_the_table(
    say: Say, cifar100_arguments: list[str], tiny_weights: Path, tmp_path: Path
) -> None:
    output = tmp_path / "paper"
    command = [
        *("--output", str(output), "--data", place(cifar100_arguments)),
        *("--only", "cifar100-slca-*/seed_1996-*"),
    ]
    changes = {
        "backbone.name": "test_vit.r160_in1k",
        "backbone.checkpoint": str(tiny_weights),
        "backbone.image_size": "32",
        "optimization.epochs": "4",
        "scenario.num_tasks": "4",
        "learner.alignment_samples_per_class": "2",
    }
    for key, value in changes.items():
        command += ["--set", f"{key}={value}"]
    shown = listed(say(*command, "--dry-run")[1])
    assert {tuple(cells[:3]) for cells in shown.values()} == {("4", "16", "1,200")}  # 75 images in each task

    code, said, _ = say(*command, "--shard", "1/2")
    assert code == 0
    assert (
        f"- S-CIFAR-100, VBM-SLCA, V = 4, seed and class order 1996, 1996: `{output}/cifar100-slca-num_views=4/"
        in said
    )
    (first,) = output.rglob("result.json")
    written = first.stat().st_mtime_ns
    code, said, _ = say(*command)
    assert (code, first.stat().st_mtime_ns) == (0, written)
    results = {path.parts[-3]: json.loads(path.read_text()) for path in sorted(output.rglob("result.json"))}
    assert list(results) == ["cifar100-slca-num_views=1", "cifar100-slca-num_views=4"]
    assert {(result["num_steps"], result["num_images"]) for result in results.values()} == {(16, 1200)}
    assert {(result["seed"], result["class_order_seed"]) for result in results.values()} == {(1996, 1996)}

    assert said.startswith((output / "published.md").read_text())
    assert "view batch in 'cifar100-slca-num_views=4' against one view, 1 pair of equal seeds" in said
    compared = json.loads((output / "published.json").read_text())
    assert say(*command, "--collect")[1] == said
    plain, views = compared["benchmarks"]["cifar100"]["lines"]
    accuracy, baseline = (
        results[f"cifar100-slca-num_views={number}"]["metrics"]["class_incremental"]["top1"]["last_accuracy"]
        for number in (4, 1)
    )
    assert views["numbers"]["top-1 last"] == {
        "paper": {"mean": 91.78, "std": 0.18},
        "pooled": {"mean": accuracy, "std": None},
        "task_mean": {"mean": accuracy, "std": None},
    }
    assert (views["missing"], views["seeds"]) == ([], [[1996, 1996]])
    assert "Not a setting of the study: optimization.epochs: 20 against 4." in plain["deviations"]
    assert not any("num_views" in deviation for deviation in views["deviations"])
    assert (
        "300 training and 100 test images, not 50,000 and 10,000 (the official split)." in plain["deviations"]
    )
    (paired,) = compared["benchmarks"]["cifar100"]["paired"]
    assert paired["seeds"] == [[1996, 1996]]
    assert paired["effects"]["top-1 last"]["mean"] == pytest.approx(accuracy - baseline)
    assert paired["paper"]["top-1 last"] == pytest.approx(0.21)


def test_dry_run__domains_are_those_that_were_published(capsys: pytest.CaptureFixture[str]) -> None:
    """Without DomainNet's images: six tasks, 50 epochs of ceil(N / 128) steps of each."""
    command = [
        "study",
        "studies/paper_domain_comp",
        "--published",
        "published/domain_comp",
        "--only",
        "agem/*1996",
    ]
    assert main([*command, "--dry-run", "--images-per-second", "1000"]) == 0
    (cells,) = listed(capsys.readouterr().out).values()
    sizes = (33525, 36023, 50416, 120750, 120906, 48212)
    num_steps = 50 * sum(-(-size // 128) for size in sizes)
    assert cells[:3] == ["6", f"{num_steps:,}", f"{50 * sum(sizes):,}"]


def test_dry_run__published_counts_serve_any_order_of_the_classes(capsys: pytest.CaptureFixture[str]) -> None:
    """Class names are not known then. 170 epochs of ceil(N / 128) steps; 2,000 exemplars from the second task on."""
    command = [
        "study",
        "studies/paper_step_comp",
        "--published",
        "published/step_comp",
        "--only",
        "wa-*=10/*1996",
    ]
    assert main([*command, "--dry-run"]) == 0
    (cells,) = listed(capsys.readouterr().out).values()
    assert cells[:2] == ["10", f"{170 * (40 + 9 * 55):,}"]


def test_study__refuses_data_that_are_not_at_hand(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = [
        "study",
        "studies/paper_domain_comp",
        "--output",
        str(tmp_path / "out"),
        "--only",
        "agem/*1996",
    ]
    assert main(command) == 2
    assert "the images of data set 'domainnet' are needed: dataset.path is not set" in capsys.readouterr().err


@pytest.mark.slow
def test_study__rehearsal_and_its_cost_in_miniature(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Task-incremental accuracy and what a step takes stand beside the paper's; pairs go by seeds."""
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    write_split(tmp_path / "images", names)
    common = ["--data", f"cifar10={tmp_path / 'images'}", "--set", "backbone.channels=2", "--device", "cpu"]
    changes = {
        "scenario.num_tasks": 2,
        "optimization.epochs": 4,
        "optimization.batch_size": 32,
        "data.num_workers": 0,
    }
    common += [part for key, value in changes.items() for part in ("--set", f"{key}={value}")]
    parts = {
        "task_comp": (["--only", "cifar10-er_200*/*1996", "--set", "learner.draw_size=8"], "TIL last", 91.66),
        "computing_cost": (["--only", "icarl_[br]*/*1996"], "ms a step", 29.5),
    }
    for name, (only, heading, published) in parts.items():
        output = tmp_path / name
        command = [
            "study",
            f"studies/paper_{name}",
            "--published",
            f"published/{name}",
            "--output",
            str(output),
        ]
        assert main([*command, *only, *common, "--details"]) == 0
        said = capsys.readouterr().out
        compared = json.loads((output / "published.json").read_text())["benchmarks"]["cifar10"]
        plain, changed = compared["lines"]
        assert plain["numbers"][heading]["paper"]["mean"] == published
        assert all(line["numbers"][heading]["pooled"]["mean"] > 0 for line in (plain, changed))
        assert (plain["seeds"], changed["seeds"]) == ([[1996, 1996]], [[1996, 1996]])
        (paired,) = compared["paired"]
        assert len(paired["effects"][heading]["differences"]) == 1
        assert f"| {heading} p | ours |" in said
        assert "60 training and 40 test images, not 50,000 and 10,000 (the official split)." in said


@pytest.mark.slow
def test_study__the_whole_table_in_miniature(
    say: Say,
    cifar100_arguments: list[str],
    imagenet_r_arguments: list[str],
    tiny_weights: Path,
    tmp_path: Path,
) -> None:
    """Every row, and both benchmarks in their true shape, on tiny backbones.

    Both benchmarks have the rows that are compared with each other; the rows of prompts are those of one benchmark.
    """
    command = ["--data", place(cifar100_arguments), "--data", place(imagenet_r_arguments)]
    command += ["--data", "imagenet_r.test_fraction=0.4", "--set", "trainer.max_steps_per_task=1"]
    command += ["--set", "backbone.image_size=32", "--set", "backbone.name=test_vit.r160_in1k"]
    command += ["--set", f"backbone.checkpoint={tiny_weights}"]
    # Of 256 samples per class alignment takes minutes; no more than 64 keys of CODA-Prompt are orthogonal here.
    parts: tuple[tuple[list[str], tuple[str, ...], tuple[str, ...], int], ...] = (
        (["imagenet_r", "cifar100"], ("slca*", "joint"), ("learner.alignment_samples_per_class=2",), 3),
        (["imagenet_r"], ("s_prompt_pp", "dualprompt", "l2p", "s_iprompt"), (), 4),
        (["imagenet_r"], ("coda_prompt",), ("learner.pool_size=20",), 1),
    )
    for number, (benchmarks, rows, settings, num_lines) in enumerate(parts):
        output = tmp_path / str(number)
        only = [
            part
            for name, row in itertools.product(benchmarks, rows)
            for part in ("--only", f"{name}-{row}/seed_1993-*")
        ]
        more = [part for setting in settings for part in ("--set", setting)]
        code, said, problems = say("--output", str(output), *only, *command, *more)
        assert code == 0, problems
        compared = json.loads((output / "published.json").read_text())
        assert list(compared["benchmarks"]) == benchmarks
        for benchmark in compared["benchmarks"].values():
            assert len(benchmark["lines"]) == num_lines
            for line in benchmark["lines"]:
                assert line["seeds"] == [[1993, 1993]]
                for numbers in line["numbers"].values():
                    assert 0 <= numbers[line["weighting"]]["mean"] <= 100
            for paired in benchmark["paired"]:
                assert all(len(each["differences"]) == 1 for each in paired["effects"].values())
        assert "Not finished" not in said
        assert "Not a setting of the study: dataset.test_fraction: 0.2 against 0.4." in said
