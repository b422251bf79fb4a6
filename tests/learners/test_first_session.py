"""What the first task trains and what stays of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.backbones.support import Backbone
from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.learners.first_session import FirstSession, FirstSessionConfig
from vbm_ptm.randomness import seeded

FIRST, SECOND = Task(0, (0, 1, 2), (0, 1, 2), 3), Task(1, (3,), (3,), 4)
KINDS = ("adapter", "ssf", "vpt_deep", "vpt_shallow", "finetune")


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def new(backbone: PromptableViT, kind: str, **settings: Any) -> FirstSession:
    with seeded(0):
        return FirstSession(backbone, FirstSessionConfig(kind=kind, **settings))


def trainable(session: FirstSession) -> list[str]:
    return [name for name, parameter in session.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("kind", KINDS)
def test_first_session__trains_in_the_first_task_alone(
    tiny_backbone: PromptableViT, images: Tensor, kind: str
) -> None:
    backbone = copy.deepcopy(tiny_backbone).requires_grad_(False)
    session = new(backbone, kind)
    session.begin(FIRST)
    names = {group.name: group.parameters for group in session.parameter_groups()}
    assert list(names) == ["adaptation", "heads"]
    grouped = {id(parameter) for group in names.values() for parameter in group}
    assert (
        grouped
        == {id(p) for p in session.parameters() if p.requires_grad}
        == {id(p) for p in session.parameters()}
    )
    logits = session.head(session.encode(backbone, images))
    assert logits.shape == (4, 3)
    logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in session.parameters())
    assert all(parameter.grad is None for parameter in backbone.parameters())
    session.finish()
    assert session.head is None
    assert trainable(session) == []
    session.begin(SECOND)
    assert session.parameter_groups() == []
    assert trainable(session) == []
    assert session.head is None


def test_first_session__of_kind_none_is_the_backbone_alone(
    tiny_backbone: PromptableViT, images: Tensor
) -> None:
    session = new(tiny_backbone, "none")
    session.begin(FIRST)
    assert session.parameter_groups() == []
    assert list(session.state_dict()) == []
    assert torch.equal(session.encode(tiny_backbone, images), tiny_backbone.encode(images)[:, 0])


def test_first_session__sizes_are_those_that_are_set(tiny_backbone: PromptableViT) -> None:
    shapes = {
        kind: {
            name: tuple(tensor.shape)
            for name, tensor in new(tiny_backbone, kind, **more).state_dict().items()
        }
        for kind, more in (
            ("adapter", {"adapter_width": 5, "adapter_dropout": 0.25}),
            ("vpt_deep", {"num_tokens": 3}),
            ("vpt_shallow", {"num_tokens": 3}),
        )
    }
    assert shapes["adapter"]["adaptation.blocks.1.down.weight"] == (5, 48)
    assert shapes["vpt_deep"] == {"adaptation.tokens": (2, 3, 48)}
    assert shapes["vpt_shallow"] == {"adaptation.tokens": (3, 48)}
    adapters = new(tiny_backbone, "adapter", adapter_dropout=0.25).adaptation
    assert adapters.blocks[0].dropout.p == 0.25


def test_first_session__a_copy_is_tuned_beside_the_backbone(
    tiny_backbone: PromptableViT, images: Tensor
) -> None:
    session = new(tiny_backbone, "finetune")
    session.begin(FIRST)
    before = tiny_backbone.encode(images)
    assert torch.equal(session.encode(tiny_backbone, images), before[:, 0])
    with torch.no_grad():
        session.tuned.vit.norm.bias.add_(1)
    torch.testing.assert_close(session.encode(tiny_backbone, images), before[:, 0] + 1)
    assert torch.equal(tiny_backbone.encode(images), before)


def test_first_session__refuses_parts_that_the_backbone_does_not_take() -> None:
    class Other(Backbone):
        width = 48

    for kind in ("adapter", "ssf", "vpt_deep", "vpt_shallow"):
        with pytest.raises(UsageError, match=f"'{kind}', but a Other"):
            FirstSession(Other(), FirstSessionConfig(kind=kind))
    assert FirstSession(Other(), FirstSessionConfig(kind="finetune")).tuned is not None
