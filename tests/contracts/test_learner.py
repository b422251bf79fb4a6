"""What holds for every learner, whatever its method.

The tasks are tensors and the loop is the smallest one; whole runs through the trainer are in tests/engine.
"""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vbm_ptm.backbones.compiling import compiled
from vbm_ptm.data.scenario import Task
from vbm_ptm.engine.objective import ObjectiveConfig, ViewBatchObjective
from vbm_ptm.engine.optimization import OptimizationConfig, build_optimizer
from vbm_ptm.errors import UsageError
from vbm_ptm.heads import TaskHeads
from vbm_ptm.learners.base import Learner
from vbm_ptm.randomness import seeded
from vbm_ptm.storage.checkpoint import CheckpointStore, restore
from vbm_ptm.storage.checkpoint_state import RunState

Build = Callable[..., Learner]


@dataclass(frozen=True)
class Toy:
    """Tasks and their images (N,3,32,32) with class indices (N,)."""

    tasks: tuple[Task, ...]
    images: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]


def images_of(classes: Iterable[int], *, seed: int = 0, domain: int = 0) -> Tensor:
    """Return one noisy image for each class index given: a class is a pattern of 4 x 4 patches."""
    rows = []
    for number, class_index in enumerate(classes):
        pattern = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(class_index))
        noise = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(1000 * seed + number + 100))
        rows.append(F.interpolate(pattern[None], scale_factor=8)[0] + 0.3 * noise + 0.2 * domain)
    return torch.stack(rows)


def toy_of(tasks: Sequence[Task], class_sizes: Mapping[int, int] | None = None) -> Toy:
    """Draw images for tasks: three of every class and task unless something else is said."""
    sizes = class_sizes or {}
    labels = [torch.tensor([k for k in task.classes for _ in range(sizes.get(k, 3))]) for task in tasks]
    images = [
        images_of(row.tolist(), seed=task.index, domain=task.index if task.domain else 0)
        for task, row in zip(tasks, labels, strict=True)
    ]
    return Toy(tuple(tasks), tuple(images), tuple(labels))


def class_tasks(*sizes: int) -> list[Task]:
    tasks, seen = [], 0
    for index, size in enumerate(sizes):
        classes = tuple(range(seen, seen + size))
        seen += size
        tasks.append(Task(index, classes, classes, seen))
    return tasks


EQUAL = toy_of(class_tasks(2, 2, 2))
SCENARIOS = {
    "unequal": toy_of(class_tasks(1, 3, 2), {1: 1, 2: 2, 3: 5, 5: 1}),
    "domains": toy_of(
        [
            Task(0, (0, 1, 2), (0, 1, 2), 3, "photo"),
            Task(1, (0, 2), (), 3, "sketch"),
            Task(2, (1, 2, 3, 4), (3, 4), 5, "quickdraw"),
        ]
    ),
    "joint": toy_of(class_tasks(6)),
}
# Of all scenarios the one with the most in it, which the quick tests take; the others are slow.
QUICK = "unequal"


TEST_IMAGES = images_of([0, 1, 2, 3, 4, 5, 0], seed=77)
SGD = OptimizationConfig(optimizer="sgd", learning_rate=0.01, momentum=0.9, weight_decay=0.1)
ADAM = OptimizationConfig(optimizer="adam", learning_rate=0.01, weight_decay=0.1)


@dataclass(frozen=True)
class ToyFeatures:
    """What the trainer hands to ``prepare_task`` and ``end_task``."""

    learner: Learner
    toy: Toy
    task: Task

    def __call__(
        self,
        rows: Sequence[int] | None = None,
        transform: str = "eval",
        *,
        draw: int = 0,
        function: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        toy, index = self.toy, self.task.index
        first = sum(len(labels) for labels in toy.labels[:index])  # rows count the images of all tasks
        own = torch.arange(first, first + len(toy.labels[index]))
        wanted = own if rows is None else torch.tensor(rows, dtype=torch.int64)
        with torch.no_grad():
            values = (function or self.learner.query)(torch.cat(toy.images)[wanted])
        return values, torch.cat(toy.labels)[wanted], wanted

    def labels(self) -> tuple[Tensor, Tensor]:
        return self()[1:]

    @torch.no_grad()
    def sum(
        self, function: Callable[[Tensor], Mapping[str, Tensor]], transform: str = "eval"
    ) -> dict[str, Tensor]:
        sums = function(self.toy.images[self.task.index])
        return {name: value.double() for name, value in sums.items()}


def begin(learner: Learner, toy: Toy, task: Task, *, seed: int = 0) -> None:
    with seeded(10 * seed + task.index):
        learner.begin_task(task)
        learner.eval()
        learner.prepare_task(task, ToyFeatures(learner, toy, task))


def step(learner: Learner, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> None:
    """Take one training step with one view."""
    learner.train()
    loss, _ = ViewBatchObjective(ObjectiveConfig())(
        learner(images, labels), labels, num_views=1, num_global_groups=len(labels)
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    learner.after_step()


def train_task(
    learner: Learner,
    toy: Toy,
    task: Task,
    *,
    optimization: OptimizationConfig = SGD,
    steps: int = 2,
    seed: int = 0,
) -> None:
    """Train between ``begin_task`` and ``end_task``, where there is something to train."""
    if groups := learner.parameter_groups():
        optimizer = build_optimizer(optimization, groups)
        for number in range(steps):
            with seeded(seed + number):
                step(learner, optimizer, toy.images[task.index], toy.labels[task.index])


def finish(learner: Learner, toy: Toy, task: Task, *, seed: int = 0) -> None:
    learner.eval()
    with seeded(20 * seed + task.index):
        learner.end_task(task, ToyFeatures(learner, toy, task))


def fit(learner: Learner, toy: Toy, *, until: int | None = None, seed: int = 0) -> Learner:
    """Go through the tasks that are left, up to a number of tasks."""
    for task in toy.tasks[len(learner.tasks) : until]:
        begin(learner, toy, task, seed=seed)
        train_task(learner, toy, task, seed=seed)
        finish(learner, toy, task, seed=seed)
    return learner.eval()


@torch.no_grad()
def predict(learner: Learner, images: Tensor = TEST_IMAGES) -> Tensor:
    return learner.eval().predict(images)


def tensors_of(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.state_dict().items()}


def assert_equal_tensors(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> None:
    assert list(one) == list(two)
    different = [name for name in one if not torch.equal(one[name], two[name])]
    assert not different


@pytest.fixture(scope="module", name="trained")
def learner_after_three_tasks(build: Build) -> Learner:
    """Read it only; what changes it works on a deep copy."""
    return fit(build(), EQUAL)


def assert_groups_hold_each_trainable_parameter_once(learner: Learner) -> None:
    groups = learner.parameter_groups()
    grouped = [id(parameter) for group in groups for parameter in group.parameters]
    trainable = [id(parameter) for parameter in learner.parameters() if parameter.requires_grad]
    assert sorted(grouped) == sorted(trainable)
    assert len({group.name for group in groups}) == len(groups)
    assert all(group.parameters and group.learning_rate_scale > 0 for group in groups)


def assert_outputs_have_their_shapes(learner: Learner, task: Task, images: Tensor, labels: Tensor) -> None:
    for count in (len(labels), 1, 0):
        output = learner(images[:count], labels[:count])
        assert output.logits.shape == (count, len(output.columns))
        assert bool(output.logits.isfinite().all())
        assert output.columns.dtype == torch.int64
        assert len(output.columns.unique()) == len(output.columns)
        assert set(task.classes) <= set(output.columns.tolist()) <= set(range(task.num_seen_classes))
        assert all(value.shape in ((), (count,)) for value in output.auxiliary.values())


@pytest.fixture(scope="module", name="in_second_task")
def learner_in_the_second_task(build: Build) -> Learner:
    """Where the second task begins; copy it before it is changed."""
    learner = fit(build(), EQUAL, until=1)
    begin(learner, EQUAL, EQUAL.tasks[1])
    return learner.train()


@pytest.mark.parametrize(
    "scenario",
    [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SCENARIOS],
)
def test_learner__keeps_to_what_it_says_in_every_scenario(build: Build, scenario: str) -> None:
    """Its groups, the shapes of what it returns, and the size of the statistics that it keeps."""
    toy = SCENARIOS[scenario]
    learner = build(num_tasks=len(toy.tasks))
    for task in toy.tasks:
        begin(learner, toy, task)
        assert_groups_hold_each_trainable_parameter_once(learner)
        learner.train()
        assert_outputs_have_their_shapes(learner, task, toy.images[task.index], toy.labels[task.index])
        train_task(learner, toy, task)
        assert predict(learner).shape == (len(TEST_IMAGES), task.num_seen_classes)
        finish(learner, toy, task)
        scores = predict(learner)
        assert scores.shape == (len(TEST_IMAGES), task.num_seen_classes)
        assert not scores.isnan().any()
        assert not scores.isposinf().any()
        assert bool(scores.isfinite().any(dim=1).all())
        assert predict(learner, TEST_IMAGES[:0]).shape == (0, task.num_seen_classes)
    for task in toy.tasks:
        sizes = [int((toy.labels[task.index] == class_index).sum()) for class_index in task.classes]
        kept = sum(tensor.numel() for tensor in learner.statistics_of(task).values())
        assert learner.statistics_size(sizes) == kept


@pytest.mark.parametrize(
    "task",
    [Task(1, (2, 3), (2, 3), 4, "photo"), Task(1, (0, 2), (2,), 3), Task(1, (0, 1), (), 2)],
    ids=["domain", "more", "only_more"],
)
def test_learner__takes_classes_again_or_refuses_them_by_name(build: Build, task: Task) -> None:
    learner, first = build(), EQUAL.tasks[0]
    learner.begin_task(first)
    if learner.takes_domains:
        learner.begin_task(task)
        assert learner.tasks == [first, task]
        return
    with pytest.raises(UsageError, match=f"'{learner.config.name}' is not defined where a class comes back"):
        learner.begin_task(task)
    assert learner.tasks == [first]


@pytest.mark.parametrize(
    "optimization",
    [pytest.param(SGD, id="sgd"), pytest.param(ADAM, id="adam", marks=pytest.mark.slow)],
)
def test_learner__trains_every_group_and_nothing_else(build: Build, optimization: OptimizationConfig) -> None:
    learner = build()
    for task in EQUAL.tasks:
        begin(learner, EQUAL, task)
        before = tensors_of(learner)
        heads = [module for module in learner.modules() if isinstance(module, TaskHeads)]
        old = [head for module in heads for head in module.tasks[: task.index]]
        assert not any(parameter.requires_grad for head in old for parameter in head.parameters())
        trainable = {name for name, parameter in learner.named_parameters() if parameter.requires_grad}
        names = {id(parameter): name for name, parameter in learner.named_parameters()}
        train_task(learner, EQUAL, task, optimization=optimization)
        after = tensors_of(learner)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed <= trainable
        for group in learner.parameter_groups():
            assert changed & {names[id(parameter)] for parameter in group.parameters}, group.name
            assert any(
                parameter.grad is not None and bool(parameter.grad.any()) for parameter in group.parameters
            ), group.name
        finish(learner, EQUAL, task)


@pytest.mark.parametrize(
    ("scenario", "num_finished"),
    [(QUICK, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((QUICK, 3), ("domains", 1)))],
)
def test_learner__is_restored_exactly(build: Build, tmp_path: Path, scenario: str, num_finished: int) -> None:
    toy = SCENARIOS[scenario]
    state = RunState(
        class_names=(),
        split_sha256="",
        held_out=None,
        num_planned_tasks=len(toy.tasks),
        tasks=toy.tasks,
        evaluation_tasks=toy.tasks,
        matrix={"rows": []},
        records=(),
        log_position=0,
        gradient_scaler=None,
        num_ranks=1,
        num_threads=1,
    )
    learner = build()
    store = CheckpointStore(tmp_path, fresh=learner)
    for number in range(num_finished):
        fit(learner, toy, until=number + 1)
        store.save(learner, state)
    for attempt in (5, 6):
        restored = build()
        checkpoint = store.read()
        assert checkpoint is not None
        with seeded(attempt):
            before = torch.default_generator.get_state()
            restore(restored, checkpoint)
            assert torch.equal(torch.default_generator.get_state(), before)
        assert_equal_tensors(tensors_of(learner), tensors_of(restored))
        assert torch.equal(predict(learner), predict(restored))
        assert restored.tasks == learner.tasks
    if num_finished < len(toy.tasks):
        fit(learner, toy, until=num_finished + 1)
        fit(restored, toy, until=num_finished + 1)
        assert_equal_tensors(tensors_of(learner), tensors_of(restored))
        again = build()
        restore(again, store.save(restored, state))
        assert torch.equal(predict(learner), predict(again))


def test_learner__prediction_does_not_depend_on_the_batch(trained: Learner) -> None:
    whole = predict(trained)
    order = torch.tensor([3, 0, 6, 5, 1, 4, 2])
    torch.testing.assert_close(predict(trained, TEST_IMAGES[order]), whole[order], atol=1e-5, rtol=1e-5)
    parts = torch.cat([predict(trained, part) for part in TEST_IMAGES.split(3)])  # the last is one image
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)
    crowded = torch.cat([TEST_IMAGES[:1], 9 * torch.randn_like(TEST_IMAGES)])
    torch.testing.assert_close(predict(trained, crowded)[:1], whole[:1], atol=1e-5, rtol=1e-5)


def test_learner__with_task_experts_scores_the_classes_of_a_task(trained: Learner) -> None:
    if not trained.has_task_experts:
        assert not trained.rules_out_classes
        with pytest.raises(NotImplementedError):
            trained.predict_task(TEST_IMAGES, EQUAL.tasks[0])
        return
    scores = predict(trained)
    with torch.no_grad():
        chosen = trained.chosen_tasks(trained.query(TEST_IMAGES))
    assert bool(scores.isneginf().any()) == trained.rules_out_classes
    assert chosen is not None or not trained.rules_out_classes
    for task in EQUAL.tasks:
        with torch.no_grad():
            whole = trained.predict_task(TEST_IMAGES, task)
            parts = torch.cat([trained.predict_task(part, task) for part in TEST_IMAGES.split(2)])
        assert whole.shape == (len(TEST_IMAGES), len(task.classes))
        assert bool(whole.isfinite().all())
        torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)
        if chosen is not None:  # where the task is recognised, both are the same
            mine, own = chosen == task.index, scores[:, list(task.classes)]
            torch.testing.assert_close(own[mine], whole[mine], atol=1e-5, rtol=1e-5)
            assert not trained.rules_out_classes or bool(own[~mine].isneginf().all())


def test_learner__forward_does_not_depend_on_the_batch_or_the_grouping(in_second_task: Learner) -> None:
    """Views of one sample side by side, or apart, or alone: the learner knows images only."""
    learner = copy.deepcopy(in_second_task)
    images, labels = EQUAL.images[1], EQUAL.labels[1]
    whole = learner(images, labels)
    for rows in (torch.tensor([4, 0, 5, 2, 1, 3]), torch.arange(0, 6, 2), torch.tensor([3])):
        part = learner(images[rows], labels[rows])
        torch.testing.assert_close(part.logits, whole.logits[rows], atol=1e-5, rtol=0)
        assert torch.equal(part.columns, whole.columns)
        for name, value in whole.auxiliary.items():
            expected = value[rows] if value.dim() else value
            torch.testing.assert_close(part.auxiliary[name], expected, atol=1e-5, rtol=0)


def test_learner__scores_are_not_rounded_by_autocast(trained: Learner) -> None:
    """Of bf16's few values many would be equal, and the class with the lower index would win."""
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        scores = trained.predict(TEST_IMAGES)
        query = trained.query(TEST_IMAGES)
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.bfloat16().float())
    assert trained.predict(TEST_IMAGES, query).dtype == torch.float32


class _WaitsForNothing(TorchDispatchMode):
    """Refuses what makes the CPU wait for an accelerator: values that are looked at, tensors made from numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in {
            "_local_scalar_dense",
            "bincount",
            "lift_fresh",
            "nonzero",
        }
        return func(*args, **(kwargs or {}))


def test_learner__a_training_step_does_not_wait_for_the_device(in_second_task: Learner) -> None:
    learner = copy.deepcopy(in_second_task)
    assert learner.task_columns.tolist() == list(EQUAL.tasks[1].classes)
    if not learner.parameter_groups():
        return  # no step is taken
    labels = EQUAL.labels[1]
    with _WaitsForNothing():
        output = learner(EQUAL.images[1], labels)
        loss, _ = ViewBatchObjective(ObjectiveConfig())(
            output, labels[::3], num_views=3, num_global_groups=len(labels) // 3
        )
        loss.backward()


def live_bytes() -> int:
    """Return the bytes of all tensors that anything refers to, each storage once; a compiler's have no memory."""
    gc.collect()
    storages = [
        value.untyped_storage() for value in gc.get_objects() if type(value) in (Tensor, torch.nn.Parameter)
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.slow
def test_learner__keeps_nothing_of_ten_tasks_but_its_state(build: Build) -> None:
    toy = toy_of(class_tasks(*[1] * 10))
    learner = build(num_tasks=10)
    kept = {}
    for task in toy.tasks:
        begin(learner, toy, task)
        train_task(learner, toy, task, steps=1)
        learner.zero_grad()  # as the trainer leaves it
        finish(learner, toy, task)
        predict(learner)
        if task.index in (1, 9):
            state = sum(tensor.nbytes for tensor in [*learner.parameters(), *learner.buffers()])
            kept[task.index] = live_bytes() - state
    assert abs(kept[9] - kept[1]) < 4096  # a parameter's gradient, or a task's images, are more


def test_learner__asks_for_nothing_but_images(trained: Learner) -> None:
    """No task identity in prediction; the query may be handed over where it is known."""
    assert list(inspect.signature(trained.predict).parameters) == ["images", "query"]
    with torch.no_grad():
        known = trained.predict(TEST_IMAGES, trained.query(TEST_IMAGES))
    torch.testing.assert_close(known, predict(trained), atol=1e-6, rtol=0)


def test_learner__is_deterministic_by_seed(build: Build, trained: Learner) -> None:
    again = fit(build(), EQUAL, until=1)
    one = tensors_of(again)
    assert_equal_tensors(tensors_of(trained), tensors_of(fit(again, EQUAL)))
    if any(parameter.requires_grad for parameter in trained.parameters()):
        other = tensors_of(fit(build(seed=1), EQUAL, until=1, seed=1))
        assert any(not torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("is_training", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_learner__query_is_deterministic_and_without_gradient(trained: Learner, is_training: bool) -> None:
    learner = copy.deepcopy(trained).train(is_training)
    if learner.backbone_is_frozen:
        assert not any(module.training for module in learner.backbone.modules())
    for block in learner.backbone.vit.blocks:
        block.attn.attn_drop.p = block.mlp.drop1.p = 0.5  # would show in training mode
    modes = [module.training for module in learner.modules()]
    with torch.enable_grad():
        query = learner.query(TEST_IMAGES)
    assert query.shape[0] == len(TEST_IMAGES)
    assert query.shape[1] % learner.backbone.width == 0
    assert not query.requires_grad
    assert torch.equal(query, learner.query(TEST_IMAGES))
    assert [module.training for module in learner.modules()] == modes


def test_learner__can_be_copied_and_sent(trained: Learner) -> None:
    copied, sent = copy.deepcopy(trained), pickle.loads(pickle.dumps(trained))
    before = predict(trained)
    for other in (copied, sent):
        assert torch.equal(predict(other), before)
        with torch.no_grad():
            for tensor in other.state_dict().values():
                tensor.zero_()
    assert torch.equal(predict(trained), before)


def test_learner__refuses_tasks_out_of_order(trained: Learner) -> None:
    learner = copy.deepcopy(trained)
    following = Task(3, (6, 7), (6, 7), 8)
    for wrong in (EQUAL.tasks[2], EQUAL.tasks[0], Task(4, (6, 7), (6, 7), 8)):
        with pytest.raises(ValueError, match="cannot begin after 3 tasks"):
            learner.begin_task(wrong)
    assert torch.equal(predict(learner), predict(trained))
    learner.begin_task(following)
    assert predict(learner).shape == (len(TEST_IMAGES), 8)


@pytest.mark.slow
def test_learner__compiled_has_a_few_graphs_however_many_tasks(build: Build) -> None:
    """The backend "eager" makes the graphs that others make, and computes them as they are."""
    plain, ours = fit(build(), EQUAL), build()
    torch._dynamo.reset()
    compiled.cache_clear()
    ours.backbone.compile_parts(backend="eager")
    counts = []
    for number in (1, 2, 3):
        torch._dynamo.utils.counters.clear()
        fit(ours, EQUAL, until=number)
        scores = predict(ours)
        assert not torch._dynamo.utils.counters["graph_break"]
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 1 <= counts[0] <= 7
    assert counts[1] <= 1  # of a learner's teacher, which begins with the second task
    assert counts[2] == 0
    torch.testing.assert_close(scores, predict(plain))
    assert list(ours.state_dict()) == list(plain.state_dict())
