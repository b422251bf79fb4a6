"""Names come from file names, and a user's own learner from its dotted name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

import vbm_ptm.learners
from vbm_ptm.backbones import PromptableViT
from vbm_ptm.errors import UsageError
from vbm_ptm.learners import create_learner, learner_class, list_learners, registry
from vbm_ptm.learners.base import Learner, LearnerConfig
from vbm_ptm.learners.registry import learner_facts

OWN_LEARNERS = """
from vbm_ptm.learners.base import Learner, LearnerConfig
from vbm_ptm.learners.finetune import Finetune

class OwnConfig(LearnerConfig):
    strength: float = 0.5

class Own(Finetune):
    config_class = OwnConfig

class Unfinished(Learner):
    pass

class NoConfigClass(Learner):
    config_class = dict

class NoLearner:
    config_class = OwnConfig
"""


@pytest.fixture(name="own_module")
def own_learners_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_learners_for_tests.py").write_text(OWN_LEARNERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_learners_for_tests"


def test_list_learners__names_the_files_without_importing_them() -> None:
    names = list_learners()
    assert names == sorted(names)
    assert {"finetune", "nearest_mean", "slca"} <= set(names)
    assert not {"base", "registry", "__init__"} & set(names)
    program = (
        "import sys; from vbm_ptm.learners import list_learners; names = list_learners(); "
        "sys.exit(any(f'vbm_ptm.learners.{name}' in sys.modules for name in names) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_learner_facts__are_what_the_classes_say() -> None:
    assert learner_facts("l2p") == ("vision transformer", "none", "prompts, keys, heads", True)
    assert learner_facts("er") == ("any", "a reservoir", "backbone, full head", True)
    assert learner_facts("der_pp").buffer == "a reservoir and logits"
    assert (learner_facts("icarl").buffer, learner_facts("fdr").buffer) == ("exemplars", "chosen images")
    assert not learner_facts("wa").domains
    assert all(learner_facts(name).trains for name in list_learners())


def test_learner_class__finds_every_listed_learner() -> None:
    for name in list_learners():
        found = learner_class(name)
        assert issubclass(found, Learner)
        assert issubclass(found.config_class, LearnerConfig)
        assert found.__module__ == f"vbm_ptm.learners.{name}"
        assert found.config_class(name=name).name == name


@pytest.mark.parametrize("name", ["slcaa", "base", "registry", "SLCA", ""])
def test_learner_class__names_what_is_allowed(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown learner .*Allowed: .*finetune.*slca") as caught:
        learner_class(name)
    if name == "slcaa":
        assert "Did you mean 'slca'?" in str(caught.value)


def test_create_learner__accepts_a_dotted_name(own_module: str, tiny_backbone: PromptableViT) -> None:
    learner = create_learner(
        f"{own_module}:Own", backbone=tiny_backbone, num_tasks=2, settings={"strength": "0.25"}
    )
    assert type(learner).__name__ == "Own"
    assert learner.config.strength == 0.25
    assert learner.num_tasks == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module_anywhere:Own", "cannot be imported"),
        ("{}:Absent", "cannot be imported"),
        ("{}:NoLearner", "not a subclass of vbm_ptm.learners.base.Learner"),
        ("{}:OwnConfig", "not a subclass of vbm_ptm.learners.base.Learner"),
        ("{}:Unfinished", "needs a class attribute config_class"),
        ("{}:NoConfigClass", "needs a class attribute config_class"),
    ],
)
def test_learner_class__says_what_is_wrong_with_a_dotted_name(
    own_module: str, name: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        learner_class(name.format(own_module))


def test_create_learner__refuses_unknown_settings(build: Callable[..., Learner]) -> None:
    with pytest.raises(ValidationError, match="alignment_epoch\n"):
        build("slca", alignment_epoch=3)


@pytest.mark.parametrize("number", [2, 0])
def test_learner_class__names_the_file_and_its_learners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    classes = [f"class Twin{index}(Finetune): pass" for index in range(number)]
    name = f"file_of_{number}"
    (tmp_path / f"{name}.py").write_text(
        "\n".join(["from vbm_ptm.learners.finetune import Finetune", *classes])
    )
    monkeypatch.setattr(registry, "list_learners", lambda: [name])
    monkeypatch.setattr(vbm_ptm.learners, "__path__", [str(tmp_path), *vbm_ptm.learners.__path__])
    with pytest.raises(UsageError) as caught:
        learner_class(name)
    assert f"{name}.py defines {number} Learner classes" in str(caught.value)
    assert ("'Twin0', 'Twin1'" in str(caught.value)) == bool(number)


def test_learner_class__refuses_a_name_of_two_methods() -> None:
    with pytest.raises(UsageError, match=r"'der' is the name of two methods.*dark_er.*der_pp.*Yan"):
        learner_class("der")
