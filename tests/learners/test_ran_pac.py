"""RanPAC against golden numbers, hand values and the formula in plain float64.

Shapes: n images, D width, M random features, K seen classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from vbm_ptm.backbones import PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.learners import create_learner
from vbm_ptm.learners.base import Learner
from vbm_ptm.learners.ran_pac import ridge_errors, solve_ridge
from vbm_ptm.randomness import seeded

Build = Callable[..., Learner]
GOLDEN = Path(__file__).parents[1] / "golden2" / "ranpac.safetensors"
WIDTH = 48


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN)


def class_tasks(*sizes: int) -> list[Task]:
    tasks, seen = [], 0
    for index, size in enumerate(sizes):
        classes = tuple(range(seen, seen + size))
        seen += size
        tasks.append(Task(index, classes, classes, seen))
    return tasks


def given(labels: Sequence[int], *, seed: int = 0) -> tuple[Tensor, list[int]]:
    """Return float64 features around a direction of its own for every class."""
    noise = torch.randn(len(labels), WIDTH, generator=torch.Generator().manual_seed(seed)).double()
    return torch.eye(WIDTH, dtype=torch.float64)[list(labels)] * 3 + noise, list(labels)


def live_through(
    learner: Learner, parts: Sequence[tuple[Task, tuple[Tensor, list[int]]]], features: Any
) -> None:
    for task, (values, labels) in parts:
        learner.begin_task(task)
        with seeded(task.index):
            learner.end_task(task, features(values, labels))


def buffers(learner: Learner) -> dict[str, Tensor]:
    return {name: getattr(learner, name).clone() for name in ("gram", "moments", "weight")}


@pytest.mark.parametrize("task", [0, 1, 2])
def test_ridge_errors__equal_the_reference(golden: dict[str, Tensor], task: int) -> None:
    hidden = (golden[f"task{task}.features"] @ golden["projection"]).relu()
    targets = torch.nn.functional.one_hot(golden[f"task{task}.labels"], 6).double()
    ridges = golden["ridges"].tolist()
    errors = ridge_errors(hidden, targets, cut=int(0.8 * len(hidden)), ridges=ridges)
    is_stable = golden["ridges"] >= 1e-4  # smaller ones leave a singular system to rounding
    expected = golden[f"task{task}.ridge_errors"]
    torch.testing.assert_close(
        torch.tensor(errors, dtype=torch.float64)[is_stable], expected[is_stable], rtol=1e-9, atol=0
    )
    assert min(zip(errors, ridges, strict=True))[1] == golden[f"task{task}.ridge"]


@pytest.mark.parametrize(("num_rows", "num_columns"), [(12, 30), (60, 7)])
def test_ridge_errors__are_those_of_the_normal_equations(num_rows: int, num_columns: int) -> None:
    """Fewer rows than columns take one route, more the other."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)
    targets = torch.randn(num_rows, 3, generator=generator, dtype=torch.float64)
    cut, ridges = int(0.7 * num_rows), [1e-2, 1.0, 50.0]
    fit, judge = hidden[:cut], hidden[cut:]
    for ridge, error in zip(ridges, ridge_errors(hidden, targets, cut=cut, ridges=ridges), strict=True):
        system = fit.T @ fit + ridge * torch.eye(num_columns).double()
        fitted = judge @ torch.linalg.solve(system, fit.T @ targets[:cut])
        assert error == pytest.approx((fitted - targets[cut:]).square().mean().item(), rel=1e-9)


def test_ran_pac__equals_the_reference_task_by_task(golden: dict[str, Tensor], given_features: Any) -> None:
    vit = VisionTransformer(img_size=16, patch_size=8, embed_dim=4, depth=1, num_heads=1, num_classes=0)
    learner = create_learner(
        "ran_pac", backbone=PromptableViT(vit), num_tasks=3, settings={"projection_width": 9}
    ).double()
    learner.projection.copy_(golden["projection"])
    for task in class_tasks(2, 2, 2):
        prefix, seen = f"task{task.index}", task.num_seen_classes
        learner.begin_task(task)
        chosen = golden[f"{prefix}.ridge"].item()  # on rows in another order
        learner.config = learner.config.model_copy(update={"ridges": (chosen,)})
        learner.end_task(
            task, given_features(golden[f"{prefix}.features"], golden[f"{prefix}.labels"].tolist())
        )
        assert learner.report(task) == {"ridge": chosen}
        torch.testing.assert_close(learner.gram, golden[f"{prefix}.gram"])
        torch.testing.assert_close(learner.moments, golden[f"{prefix}.moments"][:, :seen])
        torch.testing.assert_close(learner.weight.T, golden[f"{prefix}.weight"])
        scores = learner.predict(torch.zeros(12, 3, 16, 16), golden["test.features"])
        torch.testing.assert_close(scores, golden[f"{prefix}.test.scores"])
        assert torch.equal(scores.argmax(1), golden[f"{prefix}.test.predictions"])


def test_solve_ridge__matches_hand_values() -> None:
    """Features 2 of class 0 and -1 of class 1, projected by [1, -1]."""
    gram, moments = torch.diag(torch.tensor([4.0, 1.0])), torch.diag(torch.tensor([2.0, 1.0]))
    weight, ridge = solve_ridge(gram, moments, 1.0)
    assert ridge == 1.0
    torch.testing.assert_close(weight, torch.diag(torch.tensor([0.4, 0.5])).double())


def test_solve_ridge__grows_a_ridge_that_does_not_make_the_system_definite() -> None:
    gram = torch.tensor([[1.0, 0.0], [0.0, -0.05]])
    weight, ridge = solve_ridge(gram, torch.eye(2), 1e-3)
    assert ridge == pytest.approx(0.1)
    torch.testing.assert_close(weight, torch.diag(torch.tensor([1 / 1.1, 20.0])).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_solve_ridge__stops_at_sums_that_are_not_finite(value: float) -> None:
    broken, fine = torch.diag(torch.tensor([1.0, value])), torch.eye(2)
    for gram, moments in ((broken, fine), (fine, broken)):
        with pytest.raises(FloatingPointError, match="sums over the training images are not finite"):
            solve_ridge(gram, moments, 1.0)


def test_ran_pac__sums_do_not_depend_on_how_tasks_divide_the_images(
    build: Build, given_features: Any
) -> None:
    first, second = class_tasks(2, 2)
    both = Task(0, (0, 1, 2, 3), (0, 1, 2, 3), 4)
    one, two = given([0, 0, 1, 1, 1]), given([2, 2, 3, 3, 3, 3], seed=1)
    settings = {"projection_width": 20, "ridges": [0.5]}
    apart, together = (build("ran_pac", **settings).double() for _ in range(2))
    live_through(apart, [(first, one), (second, two)], given_features)
    live_through(together, [(both, (torch.cat([one[0], two[0]]), one[1] + two[1]))], given_features)
    for name, tensor in buffers(together).items():
        torch.testing.assert_close(buffers(apart)[name], tensor, atol=1e-9, rtol=1e-9)


def test_ran_pac__sums_do_not_depend_on_the_order_of_domains(build: Build, given_features: Any) -> None:
    parts = [given([0, 0, 1, 1, 1]), given([1, 0, 1, 0, 0, 1], seed=1)]
    learners = []
    for order in (parts, parts[::-1]):
        learner = build("ran_pac", projection_width=20, ridges=[0.5]).double()
        tasks = [Task(0, (0, 1), (0, 1), 2, "photo"), Task(1, (0, 1), (), 2, "sketch")]
        live_through(learner, list(zip(tasks, order, strict=True)), given_features)
        learners.append(buffers(learner))
    for name, tensor in learners[0].items():
        torch.testing.assert_close(learners[1][name], tensor, atol=1e-9, rtol=1e-9)


def test_ran_pac__without_a_projection_it_is_a_ridge_regression_on_the_features(
    build: Build, given_features: Any
) -> None:
    learner = build("ran_pac", projection_width=0, ridges=[2.0]).double()
    (task,), (values, labels) = class_tasks(3), given([0, 0, 1, 1, 2, 2, 2])
    live_through(learner, [(task, (values, labels))], given_features)
    system = values.T @ values + 2 * torch.eye(WIDTH).double()
    weight = torch.linalg.solve(system, values.T @ torch.eye(3).double()[labels])
    query = given([0, 1, 2], seed=5)[0]
    torch.testing.assert_close(learner.predict(torch.zeros(3, 3, 32, 32), query), query @ weight)


def test_ran_pac__balanced_classes_weigh_the_same_whatever_their_size(
    build: Build, given_features: Any
) -> None:
    (task,), (values, labels) = class_tasks(2), given([0, 0, 0, 0, 0, 1, 1])
    twice = [*range(7), 5, 6]  # class 1 with each image twice
    learners = [
        build("ran_pac", projection_width=20, ridges=[0.5], class_balanced=is_balanced).double()
        for is_balanced in (True, True, False, False)
    ]
    for number, learner in enumerate(learners):
        rows = twice if number % 2 else list(range(7))
        live_through(learner, [(task, (values[rows], [labels[row] for row in rows]))], given_features)
    balanced, balanced_twice, plain, plain_twice = (learner.weight for learner in learners)
    torch.testing.assert_close(balanced, balanced_twice)
    assert not torch.allclose(plain, plain_twice)
    # Five and two images count as a hundred each.
    trace = sum(learners[0].gram.diagonal())
    squares = (values @ learners[0].projection).relu().square().sum(1)
    torch.testing.assert_close(trace, 20 * squares[:5].sum() + 50 * squares[5:].sum())


def test_ran_pac__chooses_the_ridge_by_images_that_were_not_fitted(build: Build, given_features: Any) -> None:
    """Labels that follow nothing ask for the largest ridge; a fit on all images would take the smallest."""
    (task,) = class_tasks(2)
    values = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    labels = torch.randint(2, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    learner = build("ran_pac", projection_width=200, ridges=[1e-4, 1.0, 1e4, 1e8]).double()
    live_through(learner, [(task, (values, labels))], given_features)
    assert learner.report(task)["ridge"] >= 1e4


def test_ran_pac__refuses_a_ridge_of_zero(build: Build) -> None:
    with pytest.raises((UsageError, ValueError), match="ridges"):
        build("ran_pac", ridges=[0.0])


def test_ran_pac__an_image_alone_is_learned_too(build: Build, given_features: Any) -> None:
    learner = build("ran_pac", projection_width=20)
    first, second = class_tasks(1, 1)
    live_through(learner, [(first, given([0])), (second, given([1], seed=1))], given_features)
    queries = torch.cat([given([0])[0], given([1], seed=1)[0]])
    assert learner.predict(torch.zeros(2, 3, 32, 32), queries).argmax(1).tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["adapter", "ssf", "vpt_deep", "vpt_shallow"])
def test_ran_pac__sums_features_that_the_first_task_has_adapted(
    build: Build, train: Any, given_features: Any, kind: str
) -> None:
    learner = build("ran_pac", projection_width=20, first_session={"kind": kind})
    images = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    first, second = class_tasks(2, 1)
    plain = learner.backbone.query(images)
    train(learner, first)
    adapted = learner.query(images)
    assert not torch.allclose(adapted, plain, atol=1e-4)
    learner.end_task(first, given_features(adapted, [0, 1, 0, 1, 1]))
    hidden = (adapted @ learner.projection).relu()
    torch.testing.assert_close(learner.gram, hidden.T @ hidden)
    assert torch.equal(learner.query(images), adapted)
    learner.begin_task(second)
    assert learner.parameter_groups() == []
    assert not any(parameter.requires_grad for parameter in learner.parameters())
    learner.end_task(second, given_features(adapted[:2], [2, 2]))
    assert torch.equal(learner.query(images), adapted)
    assert learner.config.trained_tasks == "first"
