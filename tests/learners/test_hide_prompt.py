"""HiDe-Prompt against golden numbers, hand values and plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.hide_prompt import ResidualMLP, centroids_of, contrast_terms

Build = Callable[..., Learner]
GOLDEN = Path(__file__).parents[1] / "golden2" / "hide_contrast.safetensors"
TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3), (2, 3), 4), Task(2, (4,), (4,), 5))


class GivenImages:
    """The features that the learner makes of four images of every class."""

    def __init__(self, learner: Learner, task: Task) -> None:
        self.learner = learner
        self.labels = torch.tensor([class_index for class_index in task.classes for _ in range(4)])
        self.images = images_of(self.labels.tolist())

    @torch.no_grad()
    def __call__(
        self, rows: Sequence[int] | None = None, *, function: Callable[[Tensor], Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        values = (function or self.learner.query)(self.images)
        return values, self.labels, torch.arange(len(self.labels))


def images_of(classes: Sequence[int]) -> Tensor:
    rows = []
    for number, class_index in enumerate(classes):
        pattern = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(class_index))
        noise = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(number + 100))
        rows.append(F.interpolate(pattern[None], scale_factor=8)[0] + 0.3 * noise)
    return torch.stack(rows)


@pytest.fixture(name="new")
def with_blocks_that_are_there(build: Build) -> Build:
    settings = {"expert_blocks": (0, 1), "alignment_epochs": 2, "num_centroids": 2}
    return lambda **more: build("hide_prompt", **{**settings, **more})


def live_through(learner: Learner, train: Any, *, until: int) -> Learner:
    for task in TASKS[:until]:
        train(learner, task)
        learner.end_task(task, GivenImages(learner, task))
    return learner.eval()


def test_contrast_terms__give_the_loss_and_the_gradient_of_the_reference() -> None:
    """Whose rows are the centroids and the features of the step, each against all others."""
    golden = load_file(GOLDEN)
    features = golden["features"].requires_grad_()
    rows = torch.cat([golden["means"], features])
    others = torch.stack([torch.cat([rows[:number], rows[number + 1 :]]) for number in range(len(rows))])
    loss = contrast_terms(rows, others, temperature=0.8).mean()
    torch.testing.assert_close(loss, golden["loss"])
    torch.testing.assert_close(torch.autograd.grad(loss, features)[0], golden["grad"])


def test_contrast_terms__leave_out_other_views_of_a_sample_as_the_grouped_reference() -> None:
    golden = load_file(GOLDEN)
    features, group, means = golden["grouped.features"], golden["grouped.group"], golden["means"]
    terms = [
        contrast_terms(row[None], torch.cat([means, features[group != own]]), temperature=0.8)
        for row, own in zip(features, group, strict=True)
    ]
    terms += [
        contrast_terms(
            mean[None], torch.cat([means[:number], means[number + 1 :], features]), temperature=0.8
        )
        for number, mean in enumerate(means)
    ]
    torch.testing.assert_close(torch.cat(terms).mean(), golden["grouped.loss"])


def test_contrast_terms__match_hand_values() -> None:
    one, other = torch.tensor([[1.0, 0]]), torch.tensor([[0.0, 1]])
    assert contrast_terms(one, other, temperature=0.8).item() == pytest.approx(math.log(1 + math.exp(-1.25)))
    assert contrast_terms(one, torch.zeros(0, 2), temperature=0.8).item() == 0


def test_centroids_of__are_means_and_deviations_of_their_images() -> None:
    left, right = torch.tensor([[0.0, 0], [0, 2]]), torch.tensor([[10.0, 0], [10, 0], [13, 0]])
    means, deviations = centroids_of(torch.cat([left, right]), count=2)
    order = means[:, 0].argsort()
    torch.testing.assert_close(means[order], torch.tensor([[0.0, 1], [11, 0]]))
    torch.testing.assert_close(deviations[order], torch.tensor([[0.0, 1], [2**0.5, 0]]))
    means, deviations = centroids_of(left[:1], count=5)
    assert torch.equal(means, left[:1])
    assert not bool(deviations.any())


def test_hide_prompt__trains_a_mixture_and_keeps_it(new: Build, train: Any) -> None:
    learner = live_through(new(earlier_share=0.25), train, until=2)
    first, second = (prefix.detach().clone() for prefix in learner.experts.prefixes)
    learner.begin_task(TASKS[2])
    assert torch.equal(learner.experts.prefixes[2], second)
    assert not any(prefix.requires_grad for prefix in list(learner.experts.prefixes)[:2])
    train(learner, TASKS[2])
    used = 0.75 * learner.experts.prefixes[2].detach() + 0.25 * (first + second) / 2
    torch.testing.assert_close(learner.prefix(2).detach(), used)
    learner.end_task(TASKS[2], GivenImages(learner, TASKS[2]))
    torch.testing.assert_close(learner.experts.prefixes[2].detach(), used)
    assert torch.equal(learner.prefix(2), learner.experts.prefixes[2])
    assert torch.equal(learner.experts.prefixes[0], first)


def test_hide_prompt__terms_are_those_of_each_image_and_of_older_centroids(new: Build, train: Any) -> None:
    learner = live_through(new(contrast_weight=0.5), train, until=1)
    learner.begin_task(TASKS[1])
    learner.train()
    images, labels = images_of([2, 3, 2]), torch.tensor([2, 3, 2])
    output = learner(images, labels)
    alone = [learner(images[row : row + 1], labels[row : row + 1]).auxiliary for row in range(3)]
    for name in ("contrast", "task_identity"):
        expected = torch.cat([terms[name] for terms in alone])
        torch.testing.assert_close(output.auxiliary[name], expected, atol=1e-5, rtol=1e-4)
    features = learner._encode(images, learner.prefix(1)[None])
    old = torch.cat([learner.statistics_of(TASKS[0])[f"prompted_mean_{each}"] for each in (0, 1)])
    expected = 0.5 * contrast_terms(features, old, temperature=0.8)
    torch.testing.assert_close(output.auxiliary["contrast"], expected)
    fresh = new()
    fresh.begin_task(TASKS[0])
    assert set(fresh(images_of([0, 1]), torch.tensor([0, 1])).auxiliary) == {"task_identity"}


def test_hide_prompt__an_image_gets_the_prefix_of_its_most_likely_class(new: Build, train: Any) -> None:
    learner = live_through(new(), train, until=3)
    images = images_of([0, 1, 2, 3, 4])
    with torch.no_grad():
        likely = learner.identity_heads(learner.identity(learner.query(images))).argmax(dim=1)
        owners = [next(task.index for task in TASKS if int(each) in task.classes) for each in likely]
        assert len(set(owners)) > 1
        rows = [
            learner.heads(learner._encode(images[number : number + 1], learner.prefix(owner)[None]))
            for number, owner in enumerate(owners)
        ]
    torch.testing.assert_close(learner.predict(images), torch.cat(rows), atol=1e-5, rtol=1e-4)


def test_hide_prompt__alignment_moves_all_heads_and_what_tells_the_task(new: Build, train: Any) -> None:
    learner, still = (live_through(new(alignment_epochs=epochs), train, until=2) for epochs in (3, 0))
    images, labels = images_of([0, 0, 1, 2, 3, 3]), torch.tensor([0, 0, 1, 2, 3, 3])
    for part in ("heads", "identity_heads", "identity"):
        one, two = (getattr(each, part).state_dict() for each in (learner, still))
        assert all(not torch.equal(one[name], two[name]) for name in one), part
    losses = [float(F.cross_entropy(each.predict(images), labels)) for each in (learner, still)]
    assert losses[0] < losses[1]


def test_hide_prompt__a_centroid_of_one_image_stands_for_its_class_only_alone(new: Build) -> None:
    learner = new()
    learner.begin_task(TASKS[0])
    features = GivenImages(learner, TASKS[0])
    features.images = torch.cat([features.images[:3], features.images[:1] + 9, features.images[4:5]])
    features.labels = torch.tensor([0, 0, 0, 0, 1])
    learner.end_task(TASKS[0], features)
    assert len(learner.statistics_of(TASKS[0])["plain_mean_0"]) == 2
    gaussians = learner._gaussians("plain")
    assert gaussians.classes.tolist() == [0, 1]
    assert bool(gaussians.factors[0].any())
    assert not bool(gaussians.factors[1].any())


def test_residual_mlp__is_the_formula() -> None:
    mlp = ResidualMLP(4)
    rows = torch.randn(3, 4)
    inner = rows @ mlp.fc1.weight.T + mlp.fc1.bias
    outer = rows + 0.5 * inner * (1 + torch.erf(inner / 2**0.5)) @ mlp.fc2.weight.T + mlp.fc2.bias
    expected = (outer - outer.mean(1, keepdim=True)) / (
        outer.var(1, unbiased=False, keepdim=True) + 1e-5
    ).sqrt()
    assert mlp.fc1.weight.shape == (8, 4)
    torch.testing.assert_close(mlp(rows), expected, atol=1e-5, rtol=1e-5)


def test_hide_prompt__is_refused_where_classes_come_back(new: Build) -> None:
    with pytest.raises(UsageError, match="not defined where a class comes back"):
        new().begin_task(Task(0, (0, 1), (0, 1), 2, "photo"))
