"""Sequential fine-tuning is stage 1 of SLCA with one learning rate and no alignment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F

from vbm_ptm.config.run_config import compose
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded

TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3, 4), (2, 3, 4), 5))


def train(learner: Learner, task: Task, *, steps: int = 4) -> None:
    """Begin a task and take plain SGD steps, group by group."""
    with seeded(task.index):
        learner.begin_task(task)
    optimizer = torch.optim.SGD(
        [
            {"params": group.parameters, "lr": 0.05 * group.learning_rate_scale}
            for group in learner.parameter_groups()
        ],
        momentum=0.9,
        weight_decay=5e-4,
    )
    generator = torch.Generator().manual_seed(task.index)
    images = torch.randn(6, 3, 32, 32, generator=generator)
    labels = torch.tensor([task.classes[row % len(task.classes)] for row in range(6)])
    for _ in range(steps):
        output = learner(images, labels)
        loss = F.cross_entropy(output.logits, labels - task.classes[0])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_finetune__is_slca_without_slowness_and_alignment(
    build: Callable[..., Learner], given_features: type
) -> None:
    finetune = build("finetune")
    slca = build("slca", backbone_learning_rate_scale=1.0, alignment_epochs=0)
    images = torch.randn(4, 3, 32, 32)
    for task in TASKS:
        for learner in (finetune, slca):
            train(learner, task)
            values = learner.query(images)
            learner.end_task(
                task, given_features(values, [task.classes[row % len(task.classes)] for row in range(4)])
            )
        assert torch.equal(finetune.predict(images), slca.predict(images))
    slca_tensors = slca.state_dict()
    for name, tensor in finetune.state_dict().items():
        assert torch.equal(tensor, slca_tensors[name]), name


def test_finetune__cross_entropy_sees_the_current_classes_only(build: Callable[..., Learner]) -> None:
    learner = build("finetune")
    for task in TASKS:
        with seeded(task.index):
            learner.begin_task(task)
    images = torch.randn(2, 3, 32, 32)
    output = learner(images, torch.tensor([2, 4]))
    assert output.columns.tolist() == [2, 3, 4]
    features = learner.backbone.encode(images)[:, 0]
    head = learner.heads.tasks[1]
    torch.testing.assert_close(output.logits, features @ head.weight.T + head.bias, atol=1e-6, rtol=0)
    output.logits.sum().backward()
    assert all(parameter.grad is None for parameter in learner.heads.tasks[0].parameters())
    assert bool(learner.backbone.vit.patch_embed.proj.weight.grad.any())


def test_finetune__has_one_learning_rate(build: Callable[..., Learner]) -> None:
    learner = build("finetune")
    learner.begin_task(TASKS[0])
    assert [(group.name, group.learning_rate_scale) for group in learner.parameter_groups()] == [
        ("backbone", 1.0),
        ("heads", 1.0),
    ]
    assert not learner.backbone_is_frozen


def test_finetune__shares_its_heads_over_domains(build: Callable[..., Learner]) -> None:
    learner = build("finetune")
    learner.begin_task(Task(0, (0, 1), (0, 1), 2, "photo"))
    learner.begin_task(Task(1, (1, 2), (2,), 3, "sketch"))
    assert all(parameter.requires_grad for parameter in learner.heads.parameters())
    assert learner(torch.randn(1, 3, 32, 32), torch.tensor([2])).columns.tolist() == [1, 2]
    learner.begin_task(Task(2, (2,), (), 3, "quickdraw"))
    assert [head.weight.requires_grad for head in learner.heads.tasks] == [False, True, False]
    assert learner.predict(torch.randn(1, 3, 32, 32)).shape == (1, 3)


def test_page__says_how_to_train_the_upper_bound_of_rehearsal() -> None:
    page = Path(__file__).parents[2] / "docs" / "learners" / "finetune.md"
    found = re.search(r"```bash\nvbm-ptm train (.*?)\n```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    words = shlex.split(found[1])
    options = [(words[at], words[at + 1]) for at in range(0, len(words), 2)]
    given = dict(option for option in options if option[0] != "--set")
    overrides = [value for name, value in options if name == "--set"]
    composed = compose(
        dataset=given["--dataset"], learner=given["--learner"], preset=given["--preset"], overrides=overrides
    )
    config, rehearsal = (
        composed.validate(),
        compose(dataset="cifar10", learner="er", preset="official").validate(),
    )
    assert config.scenario.kind == "joint"
    assert config.backbone == rehearsal.backbone
    assert config.optimization == rehearsal.optimization
    assert config.view_batch == rehearsal.view_batch
    assert config.dataset.transforms == rehearsal.dataset.transforms
