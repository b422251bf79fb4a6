"""S-iPrompt: sessions that know nothing of each other, and centres that choose one of them.

Shapes: N images, D width (48), L tokens of a prompt, k centres of a session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from sklearn.cluster import KMeans
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.learners import create_learner
from vbm_ptm.learners.base import Learner, TaskStatistics
from vbm_ptm.randomness import seeded

Build = Callable[..., Learner]
Train = Callable[..., Learner]

TASKS = (Task(0, (0, 1), (0, 1), 2), Task(1, (2, 3, 4), (2, 3, 4), 5), Task(2, (5, 6), (5, 6), 7))
DOMAINS = (
    Task(0, (0, 1, 2), (0, 1, 2), 3, "photo"),
    Task(1, (0, 1, 2), (), 3, "sketch"),
    Task(2, (0, 2, 3), (3,), 4, "quickdraw"),
)
AXES = torch.eye(48)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(5))


def with_centres(learner: Learner, tasks: Sequence[Task], centres: Sequence[Tensor]) -> Learner:
    """Go through sessions without training; their centres are given."""
    for task, own in zip(tasks, centres, strict=True):
        with seeded(task.index):
            learner.begin_task(task)
        learner.statistics[str(task.index)] = TaskStatistics({"centres": own})
    return learner


def scores(learner: Learner, images: Tensor, session: int) -> Tensor:
    """Return the logits of one session's head (N, its classes)."""
    tokens = learner.tokens.tokens[session].expand(len(images), -1, -1)
    features = learner.backbone.encode(images, tokens=tokens)[:, 0]
    head = learner.heads.tasks[session]
    return features @ head.weight.T + head.bias


def test_s_iprompt__tokens_stand_behind_the_class_token_without_position(
    build: Build, images: Tensor
) -> None:
    learner = build("s_iprompt")
    learner.begin_task(TASKS[0])
    seen: list[Tensor] = []
    learner.backbone.vit.blocks[0].register_forward_pre_hook(
        lambda module, given: seen.append(given[0].detach())
    )
    learner.query(images)
    output = learner(images, torch.zeros(4, dtype=torch.long))
    plain, prompted = seen  # training takes no query
    assert prompted.shape == (4, 27, 48)
    tokens = learner.tokens.tokens[0].detach().expand(4, -1, -1)
    assert torch.equal(prompted, torch.cat([plain[:, :1], tokens, plain[:, 1:]], dim=1))
    torch.testing.assert_close(output.logits, scores(learner, images, 0), atol=1e-6, rtol=0)
    assert output.columns.tolist() == [0, 1]
    assert output.auxiliary == {}


def test_s_iprompt__sequence_of_the_reference_has_207_tokens() -> None:
    with seeded(0):
        backbone = PromptableViT(
            VisionTransformer(img_size=224, patch_size=16, embed_dim=8, depth=1, num_heads=1, num_classes=0)
        )
        learner = create_learner("s_iprompt", backbone=backbone, num_tasks=1)
        learner.begin_task(TASKS[0])
    lengths: list[int] = []
    backbone.vit.blocks[0].register_forward_pre_hook(lambda module, given: lengths.append(given[0].shape[1]))
    learner.predict(torch.randn(1, 3, 224, 224))
    assert lengths == [197, 207]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_s_iprompt__sessions_are_independent(
    build: Build, train: Train, optimizer: Literal["adam", "sgd"]
) -> None:
    learner, other = build("s_iprompt"), build("s_iprompt")
    train(learner, TASKS[0], optimizer=optimizer)
    other.begin_task(TASKS[0])  # another first session, and not trained
    first = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    for each in (learner, other):
        train(each, TASKS[1], optimizer=optimizer)
    second = learner.state_dict()
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
    assert not torch.equal(learner.tokens.tokens[0], other.tokens.tokens[0])
    assert torch.equal(learner.tokens.tokens[1], other.tokens.tokens[1])
    assert torch.equal(learner.heads.tasks[1].weight, other.heads.tasks[1].weight)
    assert not torch.equal(learner.tokens.tokens[1], learner.tokens.tokens[0])
    assert [group.name for group in learner.parameter_groups()] == ["tokens", "heads"]
    trained = {id(parameter) for group in learner.parameter_groups() for parameter in group.parameters}
    assert trained == {
        id(learner.tokens.tokens[1]),
        *map(id, learner.heads.tasks[1].parameters()),
    }


def test_s_iprompt__centres_are_k_means_of_normalised_features(build: Build, given_features: Any) -> None:
    values = (
        torch.randn(40, 48, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.1, 9, 40)[:, None]
    )
    kept = []
    for seed in (0, 1):  # the global generators do not matter
        learner = build("s_iprompt")
        learner.begin_task(TASKS[0])
        given = given_features(values, [0, 1] * 20)
        with seeded(seed):
            learner.end_task(TASKS[0], given)
        assert given.transforms == ["eval"]
        kept.append(learner.statistics_of(TASKS[0])["centres"])
    assert torch.equal(*kept)
    points = (values / (values**2).sum(1, keepdim=True).sqrt()).double().numpy()
    expected = KMeans(n_clusters=5, random_state=0, n_init=10).fit(points).cluster_centers_
    torch.testing.assert_close(kept[0].double(), torch.from_numpy(expected), atol=1e-6, rtol=0)
    assert kept[0].norm(dim=1).max() < 0.9  # a mean of unit vectors, not normalised again
    assert learner.statistics_size([20, 20]) == 5 * 48


def test_s_iprompt__session_of_three_images_has_three_centres(
    build: Build, given_features: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    values = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
    kept = []
    for _ in range(2):
        learner = build("s_iprompt")
        learner.begin_task(TASKS[0])
        learner.end_task(TASKS[0], given_features(values, [0, 1, 0]))
        kept.append(learner.statistics_of(TASKS[0])["centres"])
    assert torch.equal(*kept)
    assert caplog.messages == ["session 1 has 3 images: as many centres"] * 2
    points = values / values.norm(dim=1, keepdim=True)
    distances = (kept[0][:, None] - points[None]).abs().sum(2)
    assert distances.min(dim=1).values.max() < 1e-5
    assert sorted(distances.argmin(dim=1).tolist()) == [0, 1, 2]
    assert learner.statistics_size([2, 1]) == 3 * 48


@pytest.mark.parametrize(("distance", "session"), [("l1", 0), ("l2", 1)])
def test_s_iprompt__norms_disagree(build: Build, images: Tensor, distance: str, session: int) -> None:
    """From the image's normalised feature the first centre is at (3, 0), the second at (2, 2)."""
    centres = [AXES[:1] + 3 * AXES[1:2], AXES[:1] + 2 * AXES[1:2] + 2 * AXES[2:3]]
    learner = with_centres(build("s_iprompt", distance=distance), TASKS[:2], centres)
    predicted = learner.predict(images, 7 * AXES[:1].expand(4, -1))
    columns = [[0, 1], [2, 3, 4]]
    assert predicted.shape == (4, 5)
    torch.testing.assert_close(
        predicted[:, columns[session]], scores(learner, images, session), atol=1e-6, rtol=0
    )
    assert bool(predicted[:, columns[1 - session]].isneginf().all())


def test_s_iprompt__each_image_has_the_head_of_its_own_session(build: Build, images: Tensor) -> None:
    # Queries are normalised: the centre that is nearest to six times the axis is not asked.
    centres = [torch.stack([AXES[9], AXES[0]]), torch.stack([6 * AXES[0], AXES[1]]), AXES[2:3]]
    learner = with_centres(build("s_iprompt"), TASKS, centres)
    assert build("s_iprompt").config.distance == "l1"
    predicted = learner.predict(images, 6 * AXES[[2, 0, 1, 9]])
    expected = torch.full((4, 7), -torch.inf)
    for row, session in enumerate([2, 0, 1, 0]):
        expected[row, list(TASKS[session].classes)] = scores(learner, images, session)[row]
    torch.testing.assert_close(predicted, expected, atol=1e-6, rtol=0)
    assert learner.predict(images[:0], AXES[:0]).shape == (0, 7)


def test_s_iprompt__a_known_session_has_its_own_prompt_and_head(build: Build, images: Tensor) -> None:
    learner = with_centres(build("s_iprompt"), TASKS, [AXES[0:1], AXES[1:2], AXES[2:3]])
    for session, task in enumerate(TASKS):
        told = learner.predict_task(images, task)
        torch.testing.assert_close(told, scores(learner, images, session), atol=1e-6, rtol=0)


def test_s_iprompt__finds_the_session_by_the_image_s_own_query(build: Build, images: Tensor) -> None:
    learner = build("s_iprompt")
    queries = learner.query(images)
    queries = queries / queries.norm(dim=1, keepdim=True)
    with_centres(learner, TASKS, [queries[2:3], queries[0:1], queries[3:4]])
    finite = learner.predict(images).isfinite()
    for row, session in ((0, 1), (2, 0), (3, 2)):
        assert finite[row].nonzero()[:, 0].tolist() == list(TASKS[session].classes)


def test_s_iprompt__first_session_needs_no_centre(build: Build, images: Tensor) -> None:
    learner = build("s_iprompt")
    learner.begin_task(TASKS[0])
    torch.testing.assert_close(learner.predict(images), scores(learner, images, 0), atol=1e-6, rtol=0)


def test_s_iprompt__domains_have_a_head_each_over_their_classes(build: Build, images: Tensor) -> None:
    learner = with_centres(build("s_iprompt"), DOMAINS, [AXES[:1], AXES[1:2], AXES[2:3]])
    assert learner.heads.sizes == (3, 3, 3)
    output = learner(images, torch.tensor([0, 2, 3, 3]))
    assert output.columns.tolist() == [0, 2, 3]
    torch.testing.assert_close(output.logits, scores(learner, images, 2), atol=1e-6, rtol=0)
    predicted = learner.predict(images, AXES[[1, 0, 2, 1]])
    expected = torch.full((4, 4), -torch.inf)
    for row, session in enumerate([1, 0, 2, 1]):
        expected[row, list(DOMAINS[session].classes)] = scores(learner, images, session)[row]
    torch.testing.assert_close(predicted, expected, atol=1e-6, rtol=0)
    assert bool(predicted[[0, 1, 3], :3].isfinite().all())
