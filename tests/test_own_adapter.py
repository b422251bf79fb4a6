"""The adapter method of docs/own_learner.md, as a reader would copy it."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.cli import main
from vbm_ptm.data.scenario import Task
from vbm_ptm.runs.directory import RunDirectory

PAGE = Path(__file__).parents[1] / "docs" / "own_learner.md"


def block(language: str) -> str:
    text = PAGE.read_text(encoding="utf-8").partition("## An adapter method of your own")[2]
    found = re.search(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def slow_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "slow_adapter.py").write_text(block("python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    yield tmp_path
    sys.modules.pop("slow_adapter", None)


def test_own_adapter__is_short() -> None:
    assert len(block("python").splitlines()) < 60


@pytest.mark.slow
def test_own_adapter__trains_goes_on_and_evaluates(
    slow_adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, evaluate = (line.split()[1:] for line in block("bash").splitlines())
    short = ("trainer.max_steps_per_task=2", "dataset.train_images_per_class=9", "backbone.image_size=32")
    train += [part for setting in short for part in ("--set", setting)]
    assert main([*train, "--stop-after-task", "1"]) == 0
    assert main([*train, "--resume", "--stop-after-task", "2"]) == 0
    assert main(evaluate) == 0
    assert "the same counts as training measured" in capsys.readouterr().out
    result = RunDirectory(slow_adapter / "runs" / "slow_adapter").result()
    assert result is not None
    assert result.num_views == 4


def test_own_adapter__leaves_the_backbone_alone_and_slows_down(slow_adapter: Path) -> None:
    module: Any = importlib.import_module("slow_adapter")
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=4, num_classes=0)
    keys = list(vit.state_dict())
    learner = module.SlowAdapter(PromptableViT(vit), module.SlowAdapterConfig(), num_tasks=2)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    rates = []
    for task in (Task(0, (0, 1), (0, 1), 2), Task(1, (2,), (2,), 3)):
        learner.begin_task(task)
        rates.append([group.learning_rate_scale for group in learner.parameter_groups()])
        learner(images, torch.tensor([task.classes[0]] * 2)).logits.square().sum().backward()
    assert rates == [[1.0, 1.0], [0.1, 1.0]]
    assert all(block.up.weight.grad.any() for block in learner.adapters.blocks)
    assert list(learner.backbone.vit.state_dict()) == keys
    assert all(parameter.grad is None for parameter in learner.backbone.parameters())
    assert learner.predict(images).shape == (2, 3)
