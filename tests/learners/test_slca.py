"""SLCA against hand values: Gaussians, draws, alignment, and what prediction sees of it.

Shapes: N images, D width (48), K seen classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vbm_ptm.class_statistics import draw
from vbm_ptm.data.scenario import Task
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.alignment import gaussians_of
from vbm_ptm.learners.base import Learner, TaskStatistics
from vbm_ptm.learners.slca import SLCAConfig
from vbm_ptm.randomness import seeded

Build = Callable[..., Learner]
WIDTH = 48


def class_tasks(*sizes: int) -> list[Task]:
    tasks, seen = [], 0
    for index, size in enumerate(sizes):
        classes = tuple(range(seen, seen + size))
        seen += size
        tasks.append(Task(index, classes, classes, seen))
    return tasks


def random_features(labels: Sequence[int], *, seed: int = 0) -> Tensor:
    """Return (n, D) features around a direction of its own for every class."""
    noise = torch.randn(len(labels), WIDTH, generator=torch.Generator().manual_seed(seed))
    return F.one_hot(torch.tensor(labels), WIDTH).float() * 10 + 0.5 * noise


def end(learner: Learner, task: Task, given: Any, *, seed: int = 0) -> None:
    with seeded(seed + task.index):
        learner.end_task(task, given)


def live_through(learner: Learner, tasks: Sequence[Task], given_features: Any, *, count: int = 4) -> None:
    """Go through tasks with given features and without any training."""
    for task in tasks:
        with seeded(task.index):
            learner.begin_task(task)
        labels = [class_index for class_index in task.classes for _ in range(count)]
        end(learner, task, given_features(random_features(labels, seed=task.index), labels))


def copies(module: nn.Module | None) -> dict[str, Tensor]:
    assert module is not None
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def are_equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


class Observed:
    """What the optimizers of alignment were given and did."""

    def __init__(self) -> None:
        self.learning_rates: list[float] = []
        self.first_gradients: list[Tensor] = []
        self.options: list[dict[str, Any]] = []
        self.inputs: list[Tensor] = []


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch) -> Observed:
    """Record every step of every SGD that is built from now on."""
    record = Observed()

    class ObservingSGD(torch.optim.SGD):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)
            record.options.append(options)

        def step(self, closure: Any = None) -> Any:
            if not record.learning_rates:
                (group,) = self.param_groups
                record.first_gradients = [parameter.grad.clone() for parameter in group["params"]]
            record.learning_rates += [group["lr"] for group in self.param_groups]
            return super().step(closure)

    monkeypatch.setattr(torch.optim, "SGD", ObservingSGD)
    return record


@pytest.fixture
def observed_inputs(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> Observed:
    """Record also what the heads in alignment are given."""
    original = TaskHeads.joined

    def joined(heads: TaskHeads) -> nn.Module:
        head = original(heads)
        head.register_forward_pre_hook(lambda module, inputs: observed.inputs.append(inputs[0].clone()))
        return head

    monkeypatch.setattr(TaskHeads, "joined", joined)
    return observed


def draws_of(learner: Learner) -> tuple[Tensor, Tensor]:
    """Return the draws (n,D) of one epoch of alignment, and their classes (n,)."""
    gaussians, count = gaussians_of(learner), learner.config.alignment_samples_per_class
    out = torch.empty(len(gaussians.means), count, WIDTH)
    scales = learner._mean_scales(gaussians.ages)
    generator = torch.Generator().manual_seed(0)
    draw(gaussians.means, gaussians.factors, out=out, mean_scales=scales, generator=generator)
    return out.flatten(0, 1), gaussians.classes.repeat_interleave(count)


class TestStatistics:
    def test_end_task__keeps_the_hand_computed_gaussian(self, build: Build, given_features: Any) -> None:
        learner, (task,) = build("slca"), class_tasks(1)
        values = torch.zeros(3, WIDTH)
        values[:, :2] = torch.tensor([[1, 2], [3, 2], [5, 8]])
        learner.begin_task(task)
        given = given_features(values, [0, 0, 0])
        end(learner, task, given)
        assert given.transforms == ["eval"]
        kept = learner.statistics_of(task)
        assert kept["mean_0"].tolist() == [3, 4] + [0] * (WIDTH - 2)
        covariance = kept["factor_0"].double().T @ kept["factor_0"].double()
        expected = torch.tensor([[4, 6], [6, 12]], dtype=torch.float64)
        torch.testing.assert_close(covariance[:2, :2], expected, atol=1e-5, rtol=0)
        assert covariance[2:].abs().max() < 1e-10

    def test_end_task__is_exact_for_every_class_size(self, build: Build, given_features: Any) -> None:
        learner, (task,) = build("slca"), class_tasks(4)
        sizes = [1, 2, 3, 50]
        labels = [class_index for class_index, size in enumerate(sizes) for _ in range(size)]
        order = np.random.default_rng(0).permutation(len(labels))
        labels = [labels[row] for row in order]
        values = random_features(labels)
        learner.begin_task(task)
        end(learner, task, given_features(values, labels))
        kept = learner.statistics_of(task)
        for class_index, size in enumerate(sizes):
            own = values[torch.tensor(labels) == class_index].double().numpy()
            factor = kept[f"factor_{class_index}"]
            assert factor.shape == (min(size - 1, WIDTH), WIDTH)
            assert factor.dtype == torch.float32
            np.testing.assert_allclose(kept[f"mean_{class_index}"].numpy(), own.mean(0), atol=1e-6)
            expected = np.cov(own, rowvar=False) if size > 1 else np.zeros((WIDTH, WIDTH))
            np.testing.assert_allclose((factor.double().T @ factor.double()).numpy(), expected, atol=1e-5)

    def test_end_task__never_changes_old_statistics(self, build: Build, given_features: Any) -> None:
        learner, tasks = build("slca"), class_tasks(1, 3, 2)
        live_through(learner, tasks[:2], given_features)
        before = [copies(learner.statistics[str(index)]) for index in (0, 1)]
        live_through(learner, tasks[2:], given_features)
        assert all(are_equal(before[index], copies(learner.statistics[str(index)])) for index in (0, 1))
        assert set(learner.statistics_of(tasks[2])) == {"mean_4", "factor_4", "mean_5", "factor_5"}

    def test_end_task__models_each_class_in_each_domain(self, build: Build, given_features: Any) -> None:
        learner = build("slca", alignment_samples_per_class=64)
        photo, sketch = Task(0, (0, 1), (0, 1), 2, "photo"), Task(1, (1, 2), (2,), 3, "sketch")
        live_through(learner, [photo, sketch], given_features)
        assert set(learner.statistics_of(photo)) == {"mean_0", "factor_0", "mean_1", "factor_1"}
        assert set(learner.statistics_of(sketch)) == {"mean_1", "factor_1", "mean_2", "factor_2"}
        draws, labels = draws_of(learner)
        assert labels.tolist() == [0] * 64 + [1] * 128 + [2] * 64
        assert draws.shape == (256, WIDTH)


class TestDraws:
    @pytest.mark.parametrize(
        ("num_tasks", "expected"),
        [(10, [0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 1.0]), (2, [0.95, 1.0]), (1, [1.0])],
    )
    def test_draws__old_means_decay(self, build: Build, num_tasks: int, expected: list[float]) -> None:
        """Classes without spread: what is drawn is the scaled mean and a jitter of 0.01."""
        learner = build("slca", num_tasks=num_tasks)
        for task in class_tasks(*[1 + index % 3 for index in range(num_tasks)]):
            learner.begin_task(task)
            gaussians = {f"mean_{k}": torch.ones(WIDTH) for k in task.classes}
            gaussians |= {f"factor_{k}": torch.zeros(0, WIDTH) for k in task.classes}
            learner.statistics[str(task.index)] = TaskStatistics(gaussians)
        draws, labels = draws_of(learner)
        assert torch.bincount(labels).tolist() == [256] * learner.num_seen_classes
        for task in learner.tasks:
            for class_index in task.classes:
                own = draws[labels == class_index]
                assert own.mean().item() == pytest.approx(expected[task.index], abs=5e-4)
                assert own.std(dim=0).mean().item() == pytest.approx(0.01, rel=0.05)

    def test_draws__decay_leaves_the_spread_alone(self, build: Build) -> None:
        learner = build("slca", mean_decay=1.0, alignment_samples_per_class=4000)
        factor = torch.zeros(2, WIDTH)
        factor[0, 0], factor[1, 1] = 3.0, 0.5
        for task in class_tasks(1, 1):
            learner.begin_task(task)
            gaussian = {f"mean_{task.index}": torch.full((WIDTH,), 8.0), f"factor_{task.index}": factor}
            learner.statistics[str(task.index)] = TaskStatistics(gaussian)
        draws, labels = draws_of(learner)
        for class_index, mean in enumerate((4.0, 8.0)):
            own = draws[labels == class_index]
            assert own[:, 2:].mean().item() == pytest.approx(mean, abs=1e-3)
            assert own[:, 0].std().item() == pytest.approx(3.0, rel=0.04)
            assert own[:, 1].std().item() == pytest.approx(0.5, rel=0.04)


class TestAlignment:
    def test_alignment__takes_the_official_steps(
        self, build: Build, given_features: Any, observed_inputs: Observed
    ) -> None:
        learner, tasks = build("slca"), class_tasks(1, 3, 2)
        learner.begin_task(tasks[0])
        end(learner, tasks[0], given_features(random_features([0, 0]), [0, 0]))
        assert observed_inputs.learning_rates == []  # the first task has nothing to be aligned with
        live_through(learner, tasks[1:], given_features)
        annealed = [0.01, 0.009045085, 0.006545085, 0.003454915, 0.000954915]
        expected = [rate for num_seen in (4, 6) for rate in annealed for _ in range(num_seen)]
        assert observed_inputs.learning_rates == pytest.approx(expected, abs=1e-9)
        assert [len(inputs) for inputs in observed_inputs.inputs] == [256] * len(expected)
        assert [(o["momentum"], o["weight_decay"]) for o in observed_inputs.options] == [(0.9, 5e-4)] * 2
        epoch = torch.cat(observed_inputs.inputs[:4])
        assert epoch.unique(dim=0).shape == epoch.shape  # every draw of an epoch once
        assert not torch.equal(epoch, torch.cat(observed_inputs.inputs[4:8]))  # each epoch draws anew

    @pytest.mark.parametrize("temperature", [0.1, None])
    def test_alignment__first_gradient_is_that_of_the_restated_loss(
        self, build: Build, given_features: Any, observed_inputs: Observed, temperature: float | None
    ) -> None:
        learner, tasks = build("slca", logit_normalization_temperature=temperature), class_tasks(2, 3)
        live_through(learner, tasks[:1], given_features)
        with seeded(1):
            learner.begin_task(tasks[1])
        labels = [2, 2, 3, 3, 4, 4]
        end(learner, tasks[1], given_features(random_features(labels, seed=1), labels))

        batch = observed_inputs.inputs[0].double()
        targets = batch[:, :5].argmax(1)  # classes lie far apart along the first axes
        heads = [(head.weight.double(), head.bias.double()) for head in learner.heads.tasks]
        parameters = [tensor.detach().requires_grad_() for head in heads for tensor in head]
        logits = torch.cat([batch @ parameters[i].T + parameters[i + 1] for i in (0, 2)], dim=1)
        if temperature is not None:
            first, second = logits[:, :2].norm(dim=1) + 1e-7, logits[:, 2:].norm(dim=1) + 1e-7
            logits = logits / ((first + second) / 2)[:, None] / temperature
        picked = logits.gather(1, targets[:, None])[:, 0]
        (logits.exp().sum(1).log() - picked).mean().backward()
        for gradient, own in zip(
            observed_inputs.first_gradients, (parameters[::2], parameters[1::2]), strict=True
        ):
            expected = torch.cat([parameter.grad for parameter in own])
            torch.testing.assert_close(gradient.double(), expected, atol=1e-5, rtol=1e-4)

    def test_alignment__never_touches_the_heads_of_training(self, build: Build, given_features: Any) -> None:
        learner = build("slca")
        for task in class_tasks(2, 1, 3):
            with seeded(task.index):
                learner.begin_task(task)
            before, trainable = copies(learner.heads), [p.requires_grad for p in learner.heads.parameters()]
            labels = [class_index for class_index in task.classes for _ in range(4)]
            end(learner, task, given_features(random_features(labels), labels))
            assert are_equal(copies(learner.heads), before)
            assert [p.requires_grad for p in learner.heads.parameters()] == trainable
            assert not any(p.requires_grad for p in learner.aligned_heads.parameters())
            moved = [
                name
                for name, tensor in copies(learner.aligned_heads).items()
                if not torch.equal(tensor, before[name])
            ]
            assert len(moved) == (
                0 if task.index == 0 else len(before)
            )  # all weights and biases, old and new

    def test_alignment__is_what_prediction_uses_until_the_next_task(
        self, build: Build, given_features: Any
    ) -> None:
        learner, tasks = build("slca"), class_tasks(2, 2, 2)
        live_through(learner, tasks[:2], given_features)
        query = random_features([0, 1, 2, 3])
        images = torch.zeros(4, 3, 32, 32)
        assert torch.equal(learner.predict(images, query), learner.aligned_heads(query))
        assert not torch.equal(learner.predict(images, query), learner.heads(query))
        learner.begin_task(tasks[2])
        assert torch.equal(learner.predict(images, query), learner.heads(query))
        assert learner.predict(images, query).shape == (4, 6)

    def test_alignment__starts_from_the_heads_of_training_each_time(
        self, build: Build, given_features: Any
    ) -> None:
        """Aligning after task 1 leaves no trace in what aligning after task 2 gives."""
        tasks = class_tasks(2, 2, 2)
        twice, once = build("slca"), build("slca")
        live_through(twice, tasks, given_features)
        for task in tasks:
            with seeded(task.index):
                once.begin_task(task)
            once.statistics[str(task.index)] = TaskStatistics(twice.statistics_of(task))
        labels = [4] * 4 + [5] * 4
        end(once, tasks[2], given_features(random_features(labels, seed=2), labels))
        assert are_equal(copies(once.aligned_heads), copies(twice.aligned_heads))

    def test_alignment__depends_on_the_seed_around_it(self, build: Build, given_features: Any) -> None:
        results = []
        for seed in (0, 0, 50):
            learner, tasks = build("slca"), class_tasks(1, 1)
            live_through(learner, tasks[:1], given_features)
            with seeded(1):
                learner.begin_task(tasks[1])
            end(learner, tasks[1], given_features(random_features([1, 1]), [1, 1]), seed=seed)
            results.append(copies(learner.aligned_heads))
        assert are_equal(results[0], results[1])
        assert not are_equal(results[0], results[2])

    def test_alignment__can_be_switched_off(self, build: Build, given_features: Any) -> None:
        learner = build("slca", alignment_epochs=0)
        live_through(learner, class_tasks(2, 2), given_features)
        assert are_equal(copies(learner.aligned_heads), copies(learner.heads))

    def test_alignment__finds_old_classes_again(self, build: Build, given_features: Any) -> None:
        """Heads that have never seen each other's classes: alignment must not do worse on the old ones."""
        tasks = class_tasks(2, 2, 2, 2)
        accuracies = []
        for epochs in (0, 5):
            learner = build("slca", alignment_epochs=epochs)
            for task in tasks:
                with seeded(task.index):
                    learner.begin_task(task)
                labels = [class_index for class_index in task.classes for _ in range(20)]
                values, targets = random_features(labels, seed=task.index), torch.tensor(labels)
                optimizer = torch.optim.SGD(learner.heads.trainable_parameters(), lr=0.1)
                for _ in range(20):
                    columns = torch.tensor(task.classes)
                    loss = F.cross_entropy(learner.heads(values)[:, columns], targets - task.classes[0])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    # Later tasks train longer on larger logits, as fine-tuning does.
                    values = values * (1 + 0.02 * task.index)
                end(learner, task, given_features(random_features(labels, seed=task.index), labels))
            old = [class_index for task in tasks[:-1] for class_index in task.classes for _ in range(20)]
            scores = learner.predict(torch.zeros(len(old), 3, 32, 32), random_features(old, seed=9))
            accuracies.append((scores.argmax(1) == torch.tensor(old)).float().mean().item())
        without, aligned = accuracies
        assert aligned >= without
        assert aligned > 0.9


class TestStageOne:
    def test_slca__learns_slowly_in_the_whole_backbone(self, build: Build) -> None:
        learner, tasks = build("slca"), class_tasks(2, 2)
        for task in tasks:
            learner.begin_task(task)
        groups = {group.name: group for group in learner.parameter_groups()}
        assert groups["backbone"].learning_rate_scale == 0.01
        assert groups["heads"].learning_rate_scale == 1.0
        assert len(groups["backbone"].parameters) == len(list(learner.backbone.vit.parameters()))
        before = copies(learner.backbone.vit)
        output = learner(torch.randn(4, 3, 32, 32), torch.tensor([2, 3, 2, 3]))
        assert output.columns.tolist() == [2, 3]
        assert output.auxiliary == {}
        F.cross_entropy(output.logits, torch.tensor([0, 1, 0, 1])).backward()
        torch.optim.SGD(groups["backbone"].parameters, lr=0.1).step()
        after = copies(learner.backbone.vit)
        still = [name for name in before if torch.equal(before[name], after[name])]
        assert still == []
        assert "patch_embed.proj.weight" in before

    def test_slca__heads_start_as_the_official_ones(self, build: Build) -> None:
        learner = build("slca")
        with seeded(0):
            learner.begin_task(class_tasks(100)[0])
        (head,) = learner.heads.tasks
        assert head.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert not bool(head.bias.any())

    @pytest.mark.parametrize("is_fresh", [True, False])
    def test_slca__final_norm_may_start_afresh(self, build: Build, is_fresh: bool) -> None:
        reference = build("slca")
        with torch.no_grad():
            reference.backbone.vit.norm.weight.fill_(2.0)
        backbone = reference.backbone
        learner = type(reference)(
            backbone, reference.config.model_copy(update={"reinitialize_final_norm": is_fresh}), num_tasks=1
        )
        norm = learner.backbone.vit.norm
        assert norm.eps == (1e-5 if is_fresh else 1e-6)
        assert norm.weight.unique().tolist() == [1.0 if is_fresh else 2.0]
        assert norm.weight.requires_grad


@pytest.mark.parametrize(
    ("covariance", "num_numbers"), [("diagonal", 2 * 2), ("shared", 2 + 6), ("full", 2 + 2 * 3)]
)
@pytest.mark.slow
def test_slca__covariances_of_three_kinds(
    build: Build, given_features: Any, covariance: str, num_numbers: int
) -> None:
    """Two classes of four images a task: vectors of the backbone's width that are kept, and restored."""
    learner = build("slca", alignment_epochs=30, covariance=covariance)
    tasks = class_tasks(2, 2)
    live_through(learner, tasks, given_features)
    assert sum(tensor.numel() for tensor in learner.statistics_of(tasks[1]).values()) == num_numbers * WIDTH
    assert learner.statistics_size([4, 4]) == num_numbers * WIDTH
    assert learner.report(tasks[1]) == {"statistics_bytes": 4 * num_numbers * WIDTH}
    features = F.one_hot(torch.arange(4), WIDTH).float() * 10
    scores = learner.predict(torch.empty(4, 3, 32, 32), query=features)
    assert scores.argmax(1).tolist() == [0, 1, 2, 3]

    again = build("slca", alignment_epochs=30, covariance=covariance)
    for task in tasks:
        again.begin_task(task)
        again.allocate(task, {name: each.shape for name, each in learner.statistics_of(task).items()})
    again.load_state_dict(learner.state_dict())
    assert are_equal(copies(learner), copies(again))


def test_task_notes__tell_of_normalised_logits_with_one_class_a_task() -> None:
    one, two = Task(3, (6,), (6,), 7), Task(3, (6, 7), (6, 7), 8)
    (note,) = SLCAConfig().task_notes(one)
    assert note.startswith("task 4 adds one class")
    assert "logit_normalization_temperature" in note
    assert SLCAConfig().task_notes(two) == []
    assert SLCAConfig(logit_normalization_temperature=None).task_notes(one) == []
