"""How a configuration is put together, what wins, and how everything wrong is reported at once."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from vbm_ptm.backbones.embedded import EMBEDDED_NAME
from vbm_ptm.config.run_config import compose, dataset_spec, override
from vbm_ptm.config.study_config import read_study
from vbm_ptm.config.tree import (
    as_text,
    change_lines,
    changes,
    find_config,
    is_within,
    list_configs,
    read_yaml,
)
from vbm_ptm.data.task_division import build_scenario
from vbm_ptm.errors import UsageError
from vbm_ptm.learners.registry import list_learners
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.study import plan_study

Tree = dict[str, Any]

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / "configs"
NAMES = ["10", "no", "12:30", "010", "train", "test tube", "1e3", "0x1F", "2026-01-01", "~x", "On"]


@pytest.fixture(autouse=True)
def _logger_as_it_was() -> Iterator[None]:
    logger = logging.getLogger("vbm_ptm")
    before = logger.propagate
    logger.propagate = True
    yield
    logger.propagate = before


def problems_of(**sources: Any) -> list[str]:
    with pytest.raises(UsageError) as raised:
        compose(**sources).validate()
    return list(raised.value.problems)


def presets_of(learner: str) -> list[str]:
    return [*read_yaml(CONFIGS / "learners" / f"{learner}.yaml").get("presets", {}), "none"]


@pytest.mark.parametrize("learner", list_learners())
def test_configs__every_learner_with_every_preset_and_data_set(learner: str) -> None:
    for preset, dataset in itertools.product(presets_of(learner), list_configs("datasets")):
        config = compose(dataset=dataset, learner=learner, preset=preset).validate()
        name = read_yaml(CONFIGS / "datasets" / f"{dataset}.yaml").get("base", dataset)  # the same images
        assert (config.dataset.name, config.learner.name, config.preset) == (name, learner, preset)


def test_configs__all_files_are_of_a_known_kind_and_valid() -> None:
    files = sorted(CONFIGS.rglob("*.yaml"))
    assert files
    learners = {file.stem for file in files if file.parent.name == "learners"}
    assert learners == set(list_learners())
    parts = ("datasets", "learners", "published", "transforms")
    studies = [file for file in files if file.parent.name not in parts]
    assert CONFIGS / "quickstart.yaml" in studies
    for file in studies:
        assert plan_study(read_study(file), output=Path("out"))
    for file in (file for file in files if file.parent.name == "transforms"):
        chosen = compose(dataset="digits", learner="slca", config_file=file).validate().dataset.transforms
        assert {key: getattr(chosen, key) for key in read_yaml(file)["dataset"]["transforms"]}


def test_configs__presets_name_data_sets_and_weights_that_exist() -> None:
    known = {*list_configs("datasets"), "domainnet"}
    for learner in list_learners():
        presets = read_yaml(CONFIGS / "learners" / f"{learner}.yaml").get("presets", {})
        assert "embedded" in presets
        for preset in presets.values():
            assert set(preset.get("datasets", {})) <= known
            assert preset["backbone"]["name"]


def test_compose__later_sources_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "datasets/toy.yaml": """
            dataset: {name: toy, path: here}
            optimization: {epochs: 11, batch_size: 22, decay: 0.11, momentum: 0.11, weight_decay: 0.11}
        """,
        "learners/finetune.yaml": """
            optimization: {batch_size: 32, decay: 0.12, momentum: 0.12, weight_decay: 0.12}
            presets:
              mine:
                optimization: {decay: 0.13, momentum: 0.13, weight_decay: 0.13}
                datasets:
                  toy: {optimization: {momentum: 0.14, weight_decay: 0.14}}
                  other: {optimization: {momentum: 0.99}}
        """,
        "last.yaml": "optimization: {weight_decay: 0.15, learning_rate: 0.15}",
    }
    for name, text in files.items():
        (tmp_path / "configs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "configs" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    composed = compose(
        dataset="toy",
        learner="finetune",
        preset="mine",
        config_file=Path("last.yaml"),
        overrides=["optimization.learning_rate=0.16", "optimization.learning_rate=0.17"],
    )
    chosen = composed.validate().optimization
    assert chosen.schedule == "constant"
    assert (chosen.epochs, chosen.batch_size, chosen.decay) == (11, 32, 0.13)
    assert (chosen.momentum, chosen.weight_decay, chosen.learning_rate) == (0.14, 0.15, 0.17)

    learner_file = "configs/learners/finetune.yaml"
    assert {name: composed.origin(f"optimization.{name}") for name in type(chosen).model_fields} == {
        "epochs": "configs/datasets/toy.yaml",
        "batch_size": learner_file,
        "gradient_accumulation_steps": None,
        "optimizer": None,
        "fused": None,
        "learning_rate": "override optimization.learning_rate=0.17",
        "momentum": f"{learner_file}, preset mine for toy",
        "weight_decay": "last.yaml",
        "schedule": None,
        "milestones": None,
        "schedule_unit": None,
        "decay": f"{learner_file}, preset mine",
        "clip_gradient_norm": None,
        "minimum_learning_rate": None,
        "warmup_epochs": None,
    }


def test_compose__paper_preset_takes_over_what_it_merges() -> None:
    official = compose(dataset="imagenet_r", learner="slca", preset="official").validate()
    paper = compose(dataset="imagenet_r", learner="slca", preset="paper").validate()
    assert paper.optimization == official.optimization
    assert paper.learner == official.learner
    assert (official.dataset.transforms.strong, paper.dataset.transforms.strong) == (
        "autoaugment_imagenet",
        "autoaugment_cifar10",
    )


@pytest.mark.parametrize(
    ("dataset", "backbone", "expected"),
    [
        ("cifar100", None, "official"),
        ("cifar100", "vit_base_patch16_224.augreg_in21k", "official"),
        ("cifar100", "vit_base_patch16_224.mae", "embedded"),
        ("digits", None, "embedded"),
        ("digits", "vit_base_patch16_224.augreg_in21k", "embedded"),
    ],
)
def test_compose__default_preset_fits_data_set_and_weights(
    dataset: str, backbone: str | None, expected: str
) -> None:
    overrides = [f"backbone.name={backbone}"] if backbone else []
    config = compose(dataset=dataset, learner="slca", overrides=overrides).validate()
    assert config.preset == expected
    tuned = {"official": "vit_base_patch16_224.augreg_in21k", "embedded": EMBEDDED_NAME}[expected]
    assert config.backbone.name == backbone or tuned
    assert len(config.notes) == (backbone not in (None, tuned))
    assert all(f"preset '{expected}'" in line and str(backbone) in line for line in config.notes)


def test_compose__names_may_stand_in_a_file_or_a_tree(tmp_path: Path) -> None:
    names: Tree = {"dataset": {"name": "digits"}, "learner": {"name": "slca"}}
    expected = compose(dataset="digits", learner="slca").validate().model_dump()
    assert compose(tree=names).validate().model_dump() == expected
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(names))
    assert compose(config_file=file).validate().model_dump() == expected
    own: Tree = {"dataset": {"name": "anything", "path": "here"}, "learner": {"name": "slca"}}
    assert compose(tree=own).validate().preset == "embedded"
    own["dataset"].pop("path")
    (problem,) = problems_of(tree=own)
    assert problem.startswith("unknown data set 'anything'.")


@pytest.mark.parametrize("where", ["option", "override", "file"])
def test_compose__preset_can_be_given_anywhere(where: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("preset: paper\n")
    sources = {
        "option": {"preset": "paper"},
        "override": {"overrides": ["preset=paper"]},
        "file": {"config_file": file},
    }
    config = compose(dataset="digits", learner="slca", **sources[where]).validate()  # type: ignore[arg-type]
    assert (config.preset, config.view_batch.num_views, config.optimization.epochs) == ("paper", 4, 20)


def test_compose__reports_every_wrong_name_and_item_at_once(tmp_path: Path) -> None:
    found = problems_of(
        dataset="digitz",
        learner="slka",
        config_file=tmp_path / "mine.yaml",
        overrides=["optimization.epochs", "a..b=1", "seed=[1"],
    )
    assert [problem.partition(".")[0] for problem in found[:1]] == [
        f"unknown configuration file '{tmp_path / 'mine'}"
    ]
    assert found[1:4] == [
        "'optimization.epochs' is not of the form path.to.setting=value.",
        "'a..b=1' is not of the form path.to.setting=value.",
        "seed: the value '[1' is not valid YAML (expected ',' or ']', but got '<stream end>').",
    ]
    assert found[4].startswith("unknown data set 'digitz'. Did you mean 'digits'? Allowed: ")
    assert found[5].startswith("unknown learner 'slka'. Did you mean 'slca'? Allowed: ")
    assert len(found) == 6


def test_compose__names_the_nearest_preset() -> None:
    (problem,) = problems_of(dataset="digits", learner="slca", preset="ofical")
    assert problem == (
        "unknown preset 'ofical' of learner 'slca'. Did you mean 'official'? Allowed: embedded, none, official, paper."
    )


def test_find_config__names_the_files_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(UsageError) as raised:
        find_config(str(tmp_path / "min"))
    mine = tmp_path / "mine.yaml"
    assert str(raised.value).endswith(f"min.yaml'. Did you mean '{mine}'? Allowed: {mine}.")
    with pytest.raises(UsageError, match=r"Did you mean 'studies/digits\.yaml'") as raised:
        find_config("studies/digit")
    assert "learners/" not in str(raised.value)
    with pytest.raises(
        UsageError, match=r"Did you mean 'quickstart\.yaml'\? Allowed: datasets/caltech100\.yaml, "
    ):
        find_config("quick_start")


def test_validate__reports_every_wrong_setting_at_once() -> None:
    wrong = [
        "optimization.epoch=3",
        "optimisation.epochs=3",
        "batch_size=3",
        "learner.alignment_epoch=3",
        "dataset.on_bad_image=skp",
        "optimization.learning_rate=fast",
        "optimization.epochs=0",
        "seed=-1",
        "view_batch.num_views=true",
        "trainer.log_every=2.5",
        "dataset.transforms.crop_scale=[1]",
        "scenario.class_order=[a, null]",
    ]
    found = problems_of(dataset="digits", learner="slca", overrides=wrong)
    for item in wrong:
        key = item.partition("=")[0]
        about = [line for line in found if line.endswith(f"(from override {item})")]
        assert about, item
        assert all(
            key.split(".")[min(1, key.count("."))] in line or "'optimisation'" in line for line in about
        )
        assert "[" not in about[0].partition(":")[0], item
    by_item = {line.rpartition("(from override ")[2].rstrip(")"): line for line in found}
    assert by_item[wrong[0]].startswith(
        "unknown setting 'epoch' in optimization. Did you mean 'epochs'? Allowed: "
    )
    assert by_item[wrong[1]].startswith("unknown setting 'optimisation'. Did you mean 'optimization'?")
    assert "There is optimization.batch_size" in by_item[wrong[2]]
    assert "Did you mean 'alignment_epochs'?" in by_item[wrong[3]]
    assert (
        "'skp' is not allowed: Input should be 'error' or 'skip'. Did you mean 'skip'?" in by_item[wrong[4]]
    )
    assert "greater than or equal to 1" in by_item[wrong[6]]
    assert by_item[wrong[8]].startswith("view_batch.num_views: 'true' is not allowed: ")
    (section,) = problems_of(dataset="digits", learner="slca", overrides=["dataset=foo"])
    assert section == "'dataset' is a section of settings, not 'foo'; write dataset.name=foo."
    (single,) = problems_of(dataset="digits", overrides=["learner.name=[slca]"])
    assert "'[slca]'" in single
    assert "Did you mean 'slca'?" in single


def test_validate__asks_for_what_cannot_be_left_out() -> None:
    for given, missing in (({}, "learner"), ({"learner": "slca"}, "dataset")):
        with pytest.raises(UsageError, match=f"^{missing}.*: is required but not given") as caught:
            compose(**given).validate()
        assert caught.value.advice == missing
    with pytest.raises(UsageError) as caught:
        compose(dataset="digits", learner="slca", overrides=["seed=x"]).validate()
    assert caught.value.advice is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimization.batch_size=15"], "the nearest batch sizes that do are 12 and 16"),
        (["optimization.batch_size=4"], "the nearest batch sizes that do are 8 and 12"),
        (
            ["optimization.gradient_accumulation_steps=5", "optimization.batch_size=16"],
            "is 5, but a step has 4 groups (batch size 16, 4 views), which are not cut: take at most 4",
        ),
        (
            ["optimization.fused=true", "trainer.mixed_precision=fp16"],
            "optimization.fused is true and trainer.mixed_precision 'fp16'",
        ),
        (["objective.start_epoch=4"], "objective.start_epoch is 4, but a task has 4 epochs"),
        (["view_batch.views_for=buffer"], "'slca' has no buffer"),
        (["view_batch.views_for=current", "view_batch.query_view=weak"], "leave them at own"),
        (["view_batch.query_view=weak"], "view_batch.query_view is 'weak', but it changes nothing"),
        (["view_batch.strong_share=0.75"], "strong_share is 0.75, but 4 views"),
        (["optimization.epochs=3"], "Take at least 4 epochs, fewer views, or set view_batch.allow_partial"),
        (
            ["dataset.on_bad_image=skip", "dataset.verify=none"],
            "dataset: on_bad_image=skip has to decode every image",
        ),
    ],
)
def test_validate__checks_settings_against_each_other(overrides: list[str], message: str) -> None:
    (problem,) = problems_of(dataset="digits", learner="slca", overrides=overrides)
    assert message in problem


@pytest.mark.parametrize("views_for", ["all", "current", "buffer"])
def test_validate__divides_a_step_of_exemplars_by_the_views_of_either_kind(views_for: str) -> None:
    overrides = [f"view_batch.views_for={views_for}", "view_batch.num_views=3", "optimization.batch_size=32"]
    (problem,) = problems_of(dataset="digits", learner="icarl", overrides=overrides)
    assert "the nearest batch sizes that do are 30 and 33" in problem


@pytest.mark.parametrize("setting", ["num_views=1", "order=class"])
def test_validate__refuses_a_weak_query_where_a_sample_has_one_view(setting: str) -> None:
    overrides = [f"view_batch.{setting}", "view_batch.query_view=weak"]
    (problem,) = problems_of(dataset="digits", learner="l2p", overrides=overrides)
    assert "view_batch.query_view is 'weak', but a sample has one view in a step" in problem


def test_validate__refuses_accumulation_where_the_images_of_a_step_vote() -> None:
    overrides = ["optimization.gradient_accumulation_steps=2", "learner.batchwise_prompt=true"]
    (problem,) = problems_of(dataset="digits", learner="l2p", overrides=overrides)
    assert "learner.batchwise_prompt is true" in problem
    compose(
        dataset="digits", learner="l2p", overrides=[overrides[0], "learner.batchwise_prompt=false"]
    ).validate()


def test_validate__takes_controls_where_they_have_an_effect() -> None:
    def validated(learner: str, *overrides: str) -> Any:
        return compose(dataset="digits", learner=learner, overrides=overrides).validate()

    assert validated("l2p", "view_batch.query_view=weak", "view_batch.pull_view=weak")
    assert validated("dualprompt", "view_batch.pull_view=weak")
    with pytest.raises(
        UsageError, match=r"view_batch\.query_view .* 'dualprompt' \(it knows view_batch\.pull_view\)"
    ):
        validated("dualprompt", "view_batch.query_view=weak")
    # One view has no consistency term, and parts of classes need no whole groups.
    assert validated("slca", "objective.start_epoch=4", "view_batch.num_views=1")
    by_class = validated(
        "slca", "view_batch.order=class", "view_batch.num_views=3", "optimization.batch_size=16"
    )
    assert by_class.view_batch.views_per_group == 1


def test_validate__permits_fewer_epochs_than_views_if_asked_to() -> None:
    overrides = ["optimization.epochs=3", "view_batch.allow_partial_cycle=yes"]
    assert compose(dataset="digits", learner="slca", overrides=overrides).validate().optimization.epochs == 3


def test_scalars__stay_text_where_names_are_expected(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"scenario:\n  class_order: [{', '.join(NAMES)}, 'null']\n")
    config = compose(dataset="digits", learner="slca", config_file=file).validate()
    assert config.scenario.class_order == (*NAMES, "null")
    item = f"scenario.class_order=[{', '.join(NAMES)}, 'null']"
    again = compose(dataset="digits", learner="slca", overrides=[item]).validate()
    assert again.scenario.class_order == (*NAMES, "null")


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 0.001), (".5", 0.5), ("3", 3.0), ("010", 10.0), ("+1_0", 10.0)]
)
def test_scalars__are_numbers_where_numbers_are_expected(text: str, value: float) -> None:
    overrides = [f"optimization.learning_rate={text}"]
    config = compose(dataset="digits", learner="slca", overrides=overrides).validate()
    assert config.optimization.learning_rate == value


def test_scalars__of_python_are_read_like_text(toy_tree: Callable[..., Tree]) -> None:
    tree = toy_tree()
    tree["optimization"] |= {"learning_rate": 1e-5, "epochs": 2}
    tree["objective"] = {"detach_weak": False}
    config = compose(tree=tree).validate()
    assert (config.optimization.learning_rate, config.objective.detach_weak) == (1e-5, False)
    tree["optimization"]["epochs"] = True
    (problem,) = problems_of(tree=tree)
    assert problem.startswith("optimization.epochs: 'true' is not allowed: ")
    assert as_text({"a": (None, 1.5, True, "x")}) == {"a": [None, "1.5", "true", "x"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not valid YAML"),
        ("- a\n- b", "must hold settings as 'section: {key: value}', not a list"),
        ("seed: 1\nseed: 2", "'seed' is given twice"),
        ("\xff", "is not valid YAML"),
    ],
)
def test_read_yaml__refuses_what_is_no_mapping(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match=r"mine\.yaml") as raised:
        read_yaml(file)
    assert message in str(raised.value)


def test_read_yaml__permits_an_empty_file_and_merges(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# nothing\n")
    assert read_yaml(file) == {}
    file.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\n")
    assert read_yaml(file) == {"a": {"x": "1", "y": "2"}, "b": {"x": "1", "y": "3"}}


def test_parse_override__splits_at_the_first_equals_sign() -> None:
    assert override("dataset.path=/a=b/c") == {"dataset": {"path": "/a=b/c"}}
    assert override("a.b=null") == {"a": {"b": None}}
    assert override("a.b={c: 1}") == {"a": {"b": {"c": "1"}}}


def test_compose__takes_a_folder_a_parquet_file_and_a_yaml_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "birds").mkdir()
    (tmp_path / "mine.yaml").write_text("dataset: {name: mine, path: birds}\n")
    monkeypatch.chdir(tmp_path)
    read = {
        name: compose(dataset=name, learner="slca").validate().dataset
        for name in ("birds", "./birds/", "birds/x.parquet", "mine.yaml")
    }
    assert {name: (spec.name, spec.path) for name, spec in read.items()} == {
        "birds": ("birds", tmp_path / "birds"),
        "./birds/": ("birds", tmp_path / "birds"),
        "birds/x.parquet": ("x", tmp_path / "birds" / "x.parquet"),
        "mine.yaml": ("mine", tmp_path / "birds"),
    }


def test_config_yaml__is_equal_when_run_again(
    toy_tree: Callable[..., Tree], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = toy_tree()
    names = [*NAMES, "null"]
    tree["scenario"] = {"num_tasks": 3, "class_order": names}
    tree["dataset"]["path"] = "here/./x"
    tree["backbone"]["checkpoint"] = "w.safetensors"
    monkeypatch.chdir(tmp_path)
    config = compose(tree=tree).validate()
    directory = RunDirectory(tmp_path / "run")
    with directory.claimed(config, resume=False):
        pass
    monkeypatch.chdir("/")
    assert directory.config().model_dump() == config.model_dump()
    again = compose(config_file=tmp_path / "run" / "config.yaml").validate()
    assert again.model_dump() == config.model_dump()
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert stored["scenario"]["class_order"] == names
    assert stored["dataset"]["path"] == str(tmp_path / "here/x")
    assert stored["backbone"]["checkpoint"] == str(tmp_path / "w.safetensors")


def test_changes__name_just_what_differs() -> None:
    one = compose(dataset="digits", learner="slca").validate().model_dump(mode="json")
    two = compose(dataset="digits", learner="slca", overrides=["learner.mean_decay=0.2"]).validate()
    changed = changes(one, two.model_dump(mode="json"))
    assert changed == {"learner.mean_decay": (0.1, 0.2)}
    assert change_lines(changed) == ["learner.mean_decay: 0.1 against 0.2"]


@pytest.mark.parametrize(
    ("option", "settings", "message"),
    [
        ({"learner": "slca"}, "learner: {name: l2p}", "learner is slca, but {file} says learner.name: l2p"),
        (
            {"learner": "slca", "preset": "paper"},
            "preset: embedded",
            "preset is paper, but {file} says preset: embedded",
        ),
        (
            {"learner": "slca", "dataset": "digits"},
            "dataset: {name: birds, path: /data/birds}",
            "dataset is digits, but {file} says dataset.name: birds",
        ),
        (
            {"learner": "slca", "dataset": "/new/birds"},
            "dataset: {name: birds, path: /data/birds}",
            "dataset is /new/birds, but {file} says dataset.path: /data/birds",
        ),
    ],
)
def test_compose__refuses_two_answers_to_one_question(
    option: dict[str, str], settings: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(settings)
    found = problems_of(config_file=file, **option)
    assert found == [f"{message.format(file=file)}; leave one of them out."]
    (tmp_path / "again.yaml").write_text("{learner: {name: slca}, preset: paper, dataset: {name: digits}}")
    twice = compose(dataset="digits", learner="slca", preset="paper", config_file=tmp_path / "again.yaml")
    assert twice.validate().preset == "paper"


@pytest.mark.parametrize("value", ["[a]", "{a: 1}"])
def test_compose__refuses_a_preset_that_is_no_name(value: str) -> None:
    (problem,) = problems_of(dataset="digits", learner="slca", overrides=[f"preset={value}"])
    assert f"'{value}'" in problem
    assert "official" in problem


@pytest.mark.parametrize(
    ("contents", "where"),
    [
        ("presets: [a]", "presets"),
        ("presets: {embedded: }", "presets.embedded"),
        ("presets: {official: fast}", "presets.official"),
        ("presets: {embedded: {datasets: digits}}", "presets.embedded.datasets"),
        ("presets: {embedded: {datasets: {digits: }}}", "presets.embedded.datasets.digits"),
    ],
)
def test_compose__says_what_is_wrong_with_a_learner_file(
    contents: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs" / "learners").mkdir(parents=True)
    (tmp_path / "configs" / "learners" / "slca.yaml").write_text(contents)
    monkeypatch.chdir(tmp_path)
    (problem,) = problems_of(dataset="digits", learner="slca")
    assert problem.startswith(f"configs/learners/slca.yaml: {where} must hold settings as 'key: value'")


@pytest.mark.parametrize("key", ["dataset.path", "backbone.checkpoint"])
def test_validate__names_a_home_that_is_not_there(key: str) -> None:
    (problem,) = problems_of(dataset="digits", learner="slca", overrides=[f"{key}=~nobody_here/x.pth"])
    assert problem.startswith(f"{key}: '~nobody_here/x.pth' begins with the home of an unknown user")
    (problem,) = problems_of(dataset="~nobody_here/x", learner="slca")
    assert problem.startswith("data set: '~nobody_here/x' begins with the home")


def test_compose__takes_no_empty_name_for_the_working_directory() -> None:
    (problem,) = problems_of(dataset="", learner="slca")
    assert problem.startswith("unknown data set ''.")


@pytest.mark.parametrize("given", ["tensorboard", "[tensorboard]"])
def test_validate__takes_a_single_tracker_by_its_name(given: str) -> None:
    config = compose(dataset="digits", learner="slca", overrides=[f"trainer.trackers={given}"]).validate()
    assert config.trainer.trackers == ("tensorboard",)
    with pytest.raises(UsageError, match=r"trainer\.trackers.*Input should be 'tensorboard' or 'wandb'"):
        compose(dataset="digits", learner="slca", overrides=["trainer.trackers=tensorbord"]).validate()


def test_compose__a_data_set_may_build_on_another_one(tmp_path: Path) -> None:
    domains = compose(dataset="domainnet_domains", learner="s_iprompt").validate()
    classes = compose(dataset="domainnet", learner="s_iprompt").validate()
    assert domains.dataset == classes.dataset
    assert (classes.scenario.kind, classes.scenario.num_tasks) == ("class_incremental", 5)
    assert (domains.scenario.kind, domains.scenario.num_tasks) == ("domain_incremental", None)
    composed = compose(dataset="domainnet_domains", learner="s_iprompt")
    assert str(composed.origin("dataset.layout")).endswith("domainnet.yaml")
    assert str(composed.origin("scenario.kind")).endswith("domainnet_domains.yaml")
    file = tmp_path / "mine.yaml"
    file.write_text("base: domainnets\ndataset: {name: mine}\n")
    with pytest.raises(UsageError, match=r"unknown configuration file 'datasets/domainnets\.yaml'"):
        compose(dataset=str(file), learner="s_iprompt")
    file.write_text("base: [domainnet]\n")
    with pytest.raises(UsageError, match="base is a single setting"):
        compose(dataset=str(file), learner="s_iprompt")


@pytest.mark.parametrize(
    ("dataset", "num_classes", "sizes"),
    [("cifar100", 100, [10] * 10), ("imagenet_r", 200, [20] * 10), ("domainnet", 345, [69] * 5)],
)
def test_configs__cut_the_benchmarks_as_published(dataset: str, num_classes: int, sizes: list[int]) -> None:
    config = compose(dataset=dataset, learner="slca", preset="paper").validate()
    assert config.dataset.num_classes == num_classes
    assert config.scenario.class_order_seed == 1993
    names = [f"{index}" for index in range(num_classes)]
    scenario = build_scenario(config.scenario, class_names=names, labels=np.arange(num_classes))
    assert [len(task.classes) for task in scenario.tasks] == sizes
    first = np.random.RandomState(1993).permutation(num_classes)[: sizes[0]]
    assert [int(scenario.class_names[index]) for index in scenario.tasks[0].classes] == first.tolist()


def test_dataset_spec__calls_a_folder_by_its_whole_name(tmp_path: Path) -> None:
    (tmp_path / "site.a").mkdir()
    (tmp_path / "birds.parquet").touch()
    names = [dataset_spec(str(tmp_path / name)).name for name in ("site.a", "birds.parquet")]
    assert names == ["site.a", "birds"]
    (tmp_path / "insects").symlink_to("site.a")
    assert dataset_spec(str(tmp_path / "insects")).name == "insects"  # as given, wherever the link leads


def test_dataset_spec__needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"dataset\.name"):
        compose(dataset=str(tmp_path), learner="nearest_mean", overrides=["dataset.name="]).validate()


def test_is_within__takes_settings_and_sections_by_their_whole_names() -> None:
    names = ("data", "dataset.path")
    assert [is_within(path, names) for path in ("data", "data.num_workers", "dataset.path")] == [True] * 3
    assert not any(is_within(path, names) for path in ("dataset.name", "dataset.path_of", "database", ""))


@pytest.mark.parametrize(
    ("item", "remedy"),
    [
        ("optimization.momentum=0.5", "optimizer 'sgd'"),
        ("optimization.milestones=[3]", "schedule 'multistep'"),
        ("optimization.decay=0.5", "schedule 'multistep'"),
        ("dataset.transforms.affine_degrees=5", "strong 'affine'"),
        ("dataset.transforms.randaugment_magnitude=5", "strong 'randaugment'"),
    ],
)
def test_compose__refuses_an_item_without_effect(item: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        compose(dataset="cifar100", learner="coda_prompt", overrides=[item]).validate()
    key = item.partition("=")[0]
    assert caught.value.problems == (
        f"{key} has no effect without {remedy} (override {item}); leave it out.",
    )


def test_compose__leaves_what_a_preset_sets_without_effect_alone(tmp_path: Path) -> None:
    config = compose(
        dataset="cifar100", learner="slca", overrides=["optimization.schedule=cosine"]
    ).validate()
    assert config.optimization.milestones == (18,)
    file = tmp_path / "again.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert compose(config_file=file).validate().model_dump() == config.model_dump()


def test_compose__refuses_a_multistep_schedule_without_steps() -> None:
    with pytest.raises(UsageError, match="'multistep' without milestones"):
        compose(
            dataset="digits", learner="finetune", overrides=["optimization.schedule=multistep"]
        ).validate()


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("cifar100_podnet", [87, 0, 52, 58, 44]),
        ("cifar100_podnet_2", [58, 30, 93, 69, 21]),
        ("cifar100_podnet_3", [71, 54, 45, 32, 4]),
    ],
)
def test_compose__cifar100_in_the_class_orders_of_podnet(name: str, first: list[int]) -> None:
    """Labels of CIFAR-100 number its classes in alphabetical order."""
    config = compose(dataset=name, learner="expandable").validate()
    order = config.scenario.class_order
    assert isinstance(order, tuple)
    names = sorted(order)
    assert len(set(names)) == config.dataset.num_classes == 100
    assert names[0] == "apple"
    assert names[-1] == "worm"
    assert [names.index(each) for each in order[:5]] == first
