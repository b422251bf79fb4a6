"""What is known before training."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from miniatures import domainnet_miniature
from safetensors.torch import load_file

from vbm_ptm.check import preflight
from vbm_ptm.check.preflight import ExplainedSetting, Survey, explain_setting, survey
from vbm_ptm.config.run_config import compose
from vbm_ptm.errors import UsageError
from vbm_ptm.experiment import run
from vbm_ptm.learners.linear_probe import LinearProbe

Tree = dict[str, Any]


def as_file(tree: Tree, folder: Path) -> Path:
    file = folder / "all.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def mebibytes(text: str) -> float:
    number, unit = text.split()
    return float(number.replace(",", "")) * {"MiB": 1, "KiB": 2**-10}[unit]


def test_survey__foretells_what_a_run_takes(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    tree = toy_tree()
    tree["checkpoint"] = {"keep": "all"}
    facts = survey(compose(config_file=as_file(tree, tmp_path))).facts
    result = run(tree, output=tmp_path / "run")
    assert (facts["training images"], facts["test images"], facts["classes"]) == (72, 48, 12)
    assert facts["tasks"] == "4, 4, 4 classes"
    assert facts["training images per task"] == "24, 24, 24"
    assert (facts["steps"], facts["images to train on"]) == (result["num_steps"], result["num_images"])
    assert facts["split SHA-256"] == result["split_sha256"]
    assert facts["backbone"].endswith(result["weights"]["sha256"])
    assert facts["a step"] == "8 images = 4 groups x 2 views"
    assert facts["view batch"].endswith(f", from {tmp_path / 'all.yaml'}")

    for which, record in (("first", result["task_records"][0]), ("last", result["task_records"][-1])):
        parameters = record["parameters"]
        counts = ", ".join(f"{name} {count:,}" for name, count in parameters.items())
        assert facts[f"parameters of the {which} task"] == counts
    trained = sum(parameters.values()) - parameters["frozen"]
    # fp32 weights and gradients, and one average of SGD with momentum.
    expected = 4 * (parameters["frozen"] + 3 * trained) / 2**20
    assert mebibytes(facts["memory for weights, gradients and optimizer"]) == pytest.approx(
        expected, abs=0.051
    )
    files = [file for file in (tmp_path / "run" / "checkpoints").rglob("*") if file.is_file()]
    stored = sum(file.stat().st_size for file in files) / 2**20
    assert mebibytes(facts["disk for checkpoints"]) == pytest.approx(stored, rel=0.1)


def test_survey__counts_the_steps_of_a_smoke_run(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    tree = toy_tree("finetune")
    tree["trainer"] = {"max_steps_per_task": 2}
    tree["scenario"]["num_tasks"] = 4  # 9 samples of an epoch make steps of 3 groups, not of 4
    facts = survey(compose(config_file=as_file(tree, tmp_path))).facts
    result = run(tree, output=tmp_path / "run")
    assert (facts["steps"], facts["images to train on"]) == (8, 48)
    assert (result["num_steps"], result["num_images"]) == (8, 48)


def test_survey__adam_needs_two_averages_and_the_last_two_checkpoints_stay(
    toy_tree: Callable[..., Tree], tmp_path: Path
) -> None:
    one = survey(compose(config_file=as_file(toy_tree(), tmp_path))).facts
    adam = ["optimization.optimizer=adam", "checkpoint.keep=all"]
    two = survey(compose(config_file=as_file(toy_tree(), tmp_path), overrides=adam)).facts
    memory, disk = "memory for weights, gradients and optimizer", "disk for checkpoints"
    assert mebibytes(two[memory]) == pytest.approx(mebibytes(one[memory]) * 4 / 3, abs=0.11)
    assert mebibytes(two[disk]) == pytest.approx(mebibytes(one[disk]) * 3 / 2, rel=0.1)


def test_survey__knows_a_learner_that_is_not_trained(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    facts = survey(compose(config_file=as_file(toy_tree("nearest_mean"), tmp_path))).facts
    assert (facts["steps"], facts["images to train on"]) == (0, 0)
    assert mebibytes(facts["disk for checkpoints"]) < 0.1


def test_survey__counts_the_statistics_of_classes(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    """SLCA keeps a mean and a factor per class: 10 x (1 + 64) vectors of 64 numbers, every class having > 64 images."""
    tree = toy_tree()
    tree["dataset"] = {"name": "digits"}
    tree["scenario"] = {"num_tasks": 1}
    facts = survey(compose(config_file=as_file(tree, tmp_path))).facts
    stored = 300_096 + 10 * 64 + 10  # backbone, one head
    expected = 4 * (stored + 10 * (1 + 64) * 64) / 2**20
    assert mebibytes(facts["disk for checkpoints"]) == pytest.approx(expected, abs=0.051)


@pytest.mark.parametrize("learner", ["slca", "slca_pp"])
def test_survey__counts_the_features_that_drift_holds_while_a_task_is_trained(
    learner: str, toy_tree: Callable[..., Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the 24 images of a task, 64 wide, in fp32, in each of three checkpoints."""
    monkeypatch.setattr(preflight, "_size", lambda num_bytes: num_bytes)
    file = as_file(toy_tree(learner), tmp_path)
    plain, drifting = (
        survey(compose(config_file=file, overrides=[f"learner.drift={kind}"])).facts[
            "disk in addition while a task is trained"
        ]
        for kind in ("none", "linear")
    )
    assert drifting - plain == 3 * 4 * 24 * 64


def test_survey__counts_the_statistics_of_every_domain(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    arguments = domainnet_miniature(tmp_path, num_classes=4, domains=["clipart", "real", "sketch"])
    tree = toy_tree() | {"checkpoint": {"keep": "all"}}
    del tree["dataset"], tree["scenario"]
    file = as_file(tree, tmp_path)
    sources: dict[str, Any] = {
        "dataset": "domainnet_domains",
        "config_file": file,
        "overrides": arguments[3::2],
    }
    facts = survey(compose(**sources)).facts
    run(compose(**sources).validate(), output=tmp_path / "run")
    files = (tmp_path / "run" / "checkpoints" / "statistics").iterdir()
    stored = sum(sum(tensor.numel() for tensor in load_file(each).values()) for each in files)
    counts = [int(word) for word in facts["training images per domain"].replace(",", "").split()[1::2]]
    assert stored == 64 * sum(counts)  # of n images a mean and n - 1 directions
    assert mebibytes(facts["of it for class statistics"]) == pytest.approx(4 * stored / 2**20, abs=1e-4)


def test_survey__finds_all_faults_of_all_parts_at_once(toy_tree: Callable[..., Tree], tmp_path: Path) -> None:
    tree = toy_tree()
    tree["scenario"]["num_tasks"] = 13
    found = survey(compose(config_file=as_file(tree, tmp_path)))
    assert [fault.partition(",")[0] for fault in found.faults] == ["scenario.num_tasks is 13"]
    assert found.facts["training images"] == 72
    tree["dataset"]["path"] = "/nowhere"
    tree["backbone"]["checkpoint"] = "/nowhere/weights.safetensors"
    found = survey(compose(config_file=as_file(tree, tmp_path)))
    assert [word in fault for word, fault in zip(("dataset.path", "weights"), found.faults, strict=True)] == [
        True,
        True,
    ]
    tree["optimization"]["epochs"] = "many"
    faults = survey(compose(config_file=as_file(tree, tmp_path))).faults
    assert [fault.partition(":")[0] for fault in faults] == ["optimization.epochs", "dataset.path"]
    tree["dataset"]["verify"] = "maybe"
    faults = survey(compose(config_file=as_file(tree, tmp_path))).faults
    assert sorted(fault.partition(":")[0] for fault in faults) == ["dataset.verify", "optimization.epochs"]


def test_survey__sees_files_that_cannot_be_used_and_images_in_both_splits(
    toy_tree: Callable[..., Tree], toy_folder: Path, tmp_path: Path
) -> None:
    tree = toy_tree("nearest_mean")
    folder = tmp_path / "images"
    shutil.copytree(toy_folder, folder)
    shutil.copy(folder / "train/class_03/2.png", folder / "test/class_05/other name.png")
    tree["dataset"]["path"] = str(folder)
    found = survey(compose(config_file=as_file(tree, tmp_path)))
    assert found.faults == []
    assert found.data["shared_images"] == [["train/class_03/2.png", "test/class_05/other name.png"]]
    assert found.facts["test images that are training images"] == 1
    assert [warning for warning in found.warnings if "comes back" not in warning] == found.warnings[-1:]
    assert "'test/class_05/other name.png = train/class_03/2.png'" in found.warnings[-1]
    assert found.facts["training images per class"] == "6"
    assert found.facts["test images per class"] == "4 to 5"

    (folder / "train/class_00/0.png").write_bytes(b"")
    (folder / "train/class_00/1.png").write_bytes(b"no image")
    picture = (folder / "test/class_01/0.png").read_bytes()
    (folder / "test/class_01/0.png").write_bytes(picture[: len(picture) // 2])
    (folder / "test/zzz").mkdir()
    shutil.copy(folder / "train/class_00/2.png", folder / "test/zzz")
    faults = "\n".join(survey(compose(config_file=as_file(tree, tmp_path))).faults)
    for words in (
        "'train/class_00/0.png': the file is empty",
        "'train/class_00/1.png': not an image",
        "'zzz'",
    ):
        assert words in faults
    assert "'test/class_01/0.png': broken" in faults
    assert faults.count("cannot read image") == 3


@pytest.mark.slow
def test_survey__other_numbers_than_published_are_a_fault_and_of_an_own_split_a_warning(
    cifar100_arguments: list[str],
    imagenet_r_arguments: list[str],
    toy_tree: Callable[..., Tree],
    tmp_path: Path,
) -> None:
    tree = toy_tree("nearest_mean")
    del tree["dataset"], tree["scenario"]
    file = as_file(tree, tmp_path)

    def surveyed(arguments: list[str], *more: str) -> Survey:
        overrides = [*(each for each in arguments[3::2] if "expected" not in each), *more]
        return survey(compose(dataset=arguments[1], config_file=file, overrides=overrides))

    found = surveyed(cifar100_arguments)
    assert [fault.partition(";")[0] for fault in found.faults] == [
        "data set 'cifar100': not the images of 'cifar100': 300 training images where 50,000 were expected"
    ]
    assert found.facts["tasks"] == ", ".join(["10"] * 10) + " classes"
    assert surveyed(cifar100_arguments, "dataset.expected=null").faults == []
    own = surveyed(imagenet_r_arguments)
    assert own.faults == []
    assert [warning for warning in own.warnings if "where 30,000 were expected" in warning] != []


def test_survey__knows_domainnet_and_which_domains_are_there(
    toy_tree: Callable[..., Tree], tmp_path: Path
) -> None:
    arguments = domainnet_miniature(tmp_path, num_classes=5, domains=["sketch", "clipart", "real"])
    tree = toy_tree("s_iprompt")
    del tree["dataset"], tree["scenario"]
    published = [each for each in arguments[3::2] if "expected" not in each]
    found = survey(
        compose(dataset="domainnet_domains", config_file=as_file(tree, tmp_path), overrides=published)
    )
    assert found.facts["domains in order"] == "clipart, real, sketch"
    assert found.facts["tasks"] == "5, 5, 5 classes"
    assert found.facts["training images per domain"] == "clipart 7, real 7, sketch 6"
    assert found.facts["variant"] == "unknown, most like cleaned"
    assert any(
        warning.startswith("3 of 6 domains are there; without: 'infograph'") for warning in found.warnings
    )
    chosen = survey(
        compose(
            dataset="domainnet",
            config_file=as_file(tree, tmp_path),
            overrides=[
                *arguments[3::2],
                "dataset.domains=[real]",
                "dataset.expected=null",
                "scenario.num_tasks=5",
            ],
        )
    )
    assert chosen.faults == []
    expected = ("comes back", "has one class", "samples: ")  # of so few images
    assert [warning for warning in chosen.warnings if not any(part in warning for part in expected)] == []
    assert chosen.facts["training images per domain"] == "real 7"


def test_survey__the_split_depends_on_no_seed(
    imagenet_r_arguments: list[str], toy_tree: Callable[..., Tree], tmp_path: Path
) -> None:
    tree = toy_tree("nearest_mean")
    del tree["dataset"], tree["scenario"]
    file = as_file(tree, tmp_path)
    hashes: set[str] = set()
    for seeds in (["seed=1"], ["seed=2", "scenario.class_order_seed=1996"]):
        overrides = [*imagenet_r_arguments[3::2], "dataset.verify=none", *seeds]
        found = survey(compose(dataset="imagenet_r", config_file=file, overrides=overrides))
        hashes.add(found.facts["split SHA-256"])
    assert len(hashes) == 1


def test_explain_setting__names_value_source_and_meaning() -> None:
    sources: dict[str, Any] = {
        "dataset": "cifar100",
        "learner": "slca",
        "preset": "paper",
        "overrides": ["seed=5"],
    }

    def explained(key: str) -> ExplainedSetting:
        (setting,) = explain_setting(key, compose(**sources)).values()
        return setting

    assert (explained("seed").value, explained("seed").source) == (5, "override seed=5")
    assert explained("seed").meaning.startswith("Training seed")
    assert (explained("device").value, explained("device").source) == ("auto", "the default")
    assert (explained("preset").value, explained("preset").source) == ("paper", "argument preset=paper")
    assert explained("learner.name").source.endswith("learners/slca.yaml")
    assert "slow learner" in explained("learner.backbone_learning_rate_scale").meaning
    assert explained("dataset.image_column").source.endswith("datasets/cifar100.yaml")
    assert explained("view_batch.num_views").source.endswith("learners/slca.yaml, preset paper")
    assert explained("dataset.transforms.normalization").source.endswith(
        "learners/slca.yaml, preset paper for cifar100"
    )
    below = explain_setting("view_batch", compose(**sources))
    assert {"view_batch.num_views", "view_batch.order"} <= set(below)
    assert all(path.startswith("view_batch.") for path in below)
    with pytest.raises(UsageError, match=r"Did you mean 'view_batch\.num_views'\?"):
        explain_setting("view_batch.num_view", compose(**sources))
    with pytest.raises(UsageError) as raised:
        explain_setting("optimisation", compose(**sources))
    assert str(raised.value) == (
        "unknown setting 'optimisation'. Did you mean 'optimization'? Allowed: backbone, checkpoint, data, dataset, "
        "device, learner, objective, optimization, preset, scenario, seed, trainer, view_batch."
    )


def test_survey__a_parameter_without_a_group_is_a_fault(
    toy_tree: Callable[..., Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinearProbe, "parameter_groups", lambda learner: [])
    found = survey(compose(config_file=as_file(toy_tree("linear_probe"), tmp_path)))
    (fault,) = found.faults
    assert "'heads.tasks.0.weight', 'heads.tasks.0.bias'" in fault


def test_survey__warns_of_what_training_will_warn_of(
    toy_tree: Callable[..., Tree], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tasks of one class, and tasks with fewer samples than views: the same code says both."""
    tree = toy_tree("linear_probe") | {"scenario": {"task_sizes": [1, 1, 10]}, "view_batch": {"num_views": 8}}
    tree["optimization"] |= {"epochs": 8, "batch_size": 16}
    tree["trainer"] = {"max_steps_per_task": 1}
    found = survey(compose(config_file=as_file(tree, tmp_path)))
    assert not found.faults
    expected = {f"task {index} has one class" for index in (1, 2)}
    expected |= {f"task {index} has 6 samples: 6 views in place of 8" for index in (1, 2)}
    assert all(any(note.startswith(start) for note in found.warnings) for start in expected)
    with caplog.at_level(logging.WARNING):
        run(tree, output=tmp_path / "run")
    said = {record.getMessage() for record in caplog.records}
    assert {note for note in found.warnings if note.startswith("task ")} <= said
