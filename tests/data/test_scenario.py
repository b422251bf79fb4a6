"""Division of classes and domains into tasks."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vbm_ptm.data.scenario import Scenario, Task
from vbm_ptm.data.task_division import ScenarioConfig, build_scenario, extend_scenario
from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seeded

Integers = npt.NDArray[np.int64]

TWELVE = tuple(f"class {letter}" for letter in "abcdefghijkl")


def scenario_of(
    class_names: tuple[str, ...] = TWELVE,
    *,
    labels: Integers | None = None,
    domains: npt.NDArray[Any] | None = None,
    **settings: Any,
) -> Scenario:
    """Build a scenario from settings as a configuration tree gives them; one image per class by default."""
    if labels is None:
        labels = np.arange(len(class_names))
    config = ScenarioConfig.model_validate(settings)
    return build_scenario(config, class_names=class_names, labels=labels, domains=domains)


def sizes_of(scenario: Scenario) -> list[int]:
    return [len(task.new_classes) for task in scenario.tasks]


class TestClassOrder:
    @pytest.mark.parametrize(
        ("num_classes", "seed", "first_five"),
        [
            (100, 1993, [68, 56, 78, 8, 23]),
            (100, 1996, [35, 18, 40, 85, 63]),
            (100, 1997, [88, 77, 36, 54, 92]),
            (200, 1993, [168, 136, 51, 9, 183]),
            (200, 1996, [92, 182, 15, 79, 26]),
            (200, 1997, [76, 153, 53, 4, 197]),
        ],
    )
    def test_class_order__of_a_seed_is_the_one_published_numbers_use(
        self, num_classes: int, seed: int, first_five: list[int]
    ) -> None:
        names = tuple(str(label) for label in range(num_classes))
        scenario = scenario_of(names, num_tasks="10", class_order_seed=str(seed))
        assert [int(name) for name in scenario.class_names[:5]] == first_five
        assert scenario.class_index_of_label[first_five].tolist() == [0, 1, 2, 3, 4]

    def test_class_order__leaves_the_global_generator_alone(self) -> None:
        with seeded(1):
            first = scenario_of(num_tasks=3).class_names
            following = np.random.random()
        with seeded(1):
            assert np.random.random() == following
        with seeded(2):
            assert scenario_of(num_tasks=3).class_names == first

    def test_class_order__is_natural_or_listed_on_demand(self) -> None:
        assert scenario_of(num_tasks=3, class_order="natural").class_names == TWELVE
        listed = TWELVE[5:] + TWELVE[:5]
        scenario = scenario_of(num_tasks=3, class_order=list(listed))
        assert scenario.class_names == listed
        assert scenario.class_index_of_label.tolist() == [7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6]

    def test_class_order__takes_names_that_look_like_something_else(self) -> None:
        names = ("10", "no", "12:30", "seed")
        assert scenario_of(names, num_tasks=2, class_order=["no", "seed", "10", "12:30"]).class_names == (
            "no",
            "seed",
            "10",
            "12:30",
        )

    @pytest.mark.parametrize(
        ("order", "words"),
        [
            (TWELVE[:11], ["11 names", "with 12", "missing: class l"]),
            ((*TWELVE, "class a"), ["13 names", "more than once: class a"]),
            ((*TWELVE[:11], "klass l"), ["unknown: klass l (nearest: class l)", "missing: class l"]),
        ],
    )
    def test_class_order__names_what_is_wrong_in_a_list(
        self, order: tuple[str, ...], words: list[str]
    ) -> None:
        with pytest.raises(UsageError) as caught:
            scenario_of(num_tasks=3, class_order=order)
        for word in words:
            assert word in str(caught.value)

    def test_class_order__refuses_a_list_where_classes_share_a_name(self) -> None:
        with pytest.raises(UsageError, match="share one: crane"):
            scenario_of(("crane", "crane", "owl"), num_tasks=1, class_order=["crane", "owl"])

    def test_class_order__refuses_a_negative_seed(self) -> None:
        with pytest.raises(UsageError, match="-1"):
            scenario_of(num_tasks=3, class_order_seed=-1)


class TestTaskSizes:
    @pytest.mark.parametrize(
        ("settings", "sizes"),
        [
            ({"num_tasks": "3"}, [4, 4, 4]),
            ({"num_tasks": "5"}, [3, 3, 2, 2, 2]),
            ({"num_tasks": "7"}, [2, 2, 2, 2, 2, 1, 1]),
            ({"num_tasks": "12"}, [1] * 12),
            ({"increment": "4"}, [4, 4, 4]),
            ({"increment": "5"}, [5, 5, 2]),
            ({"increment": "20"}, [12]),
            ({"first_task_size": "6", "increment": "3"}, [6, 3, 3]),
            ({"first_task_size": "6", "increment": "4"}, [6, 4, 2]),
            ({"first_task_size": "6", "num_tasks": "4"}, [6, 2, 2, 2]),
            ({"first_task_size": "5", "num_tasks": "3"}, [5, 4, 3]),
            ({"first_task_size": "12", "num_tasks": "1"}, [12]),
            ({"task_sizes": ["5", "4", "3"]}, [5, 4, 3]),
            ({"task_sizes": ["5", "4", "3"], "num_tasks": "3"}, [5, 4, 3]),
            ({"first_task_size": "6", "increment": "3", "num_tasks": "3"}, [6, 3, 3]),
        ],
    )
    def test_task_sizes__cover_all_classes_in_order(self, settings: dict[str, Any], sizes: list[int]) -> None:
        scenario = scenario_of(**settings)
        assert sizes_of(scenario) == sizes
        classes = [index for task in scenario.tasks for index in task.classes]
        assert classes == list(range(12))
        assert [task.index for task in scenario.tasks] == list(range(len(sizes)))
        assert [task.num_seen_classes for task in scenario.tasks] == np.cumsum(sizes).tolist()
        assert all(task.new_classes == task.classes and task.domain is None for task in scenario.tasks)

    @pytest.mark.parametrize(
        ("settings", "announced"),
        [
            ({"num_tasks": 5}, "3, 3, 2, 2, 2"),
            ({"increment": 5}, "last task has 2 classes"),
            ({"first_task_size": 6, "increment": 4}, "last task has 2 classes"),
        ],
    )
    def test_task_sizes__announces_unequal_tasks(
        self, settings: dict[str, Any], announced: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        scenario_of(**settings)
        assert announced in caplog.text

    @pytest.mark.parametrize("settings", [{"num_tasks": 4}, {"increment": 3}, {"task_sizes": (5, 4, 3)}])
    def test_task_sizes__says_nothing_where_all_is_as_asked(
        self, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        scenario_of(**settings)
        assert caplog.text == ""

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({}, ["12 classes", "scenario.num_tasks", "scenario.kind=domain_incremental"]),
            ({"first_task_size": 6}, ["12 classes", "scenario.num_tasks"]),
            ({"num_tasks": 13}, ["13", "12 classes"]),
            ({"num_tasks": 3, "first_task_size": 11}, ["3", "1 classes", "2 tasks"]),
            ({"num_tasks": 1, "first_task_size": 6}, ["6 classes", "0 tasks"]),
            ({"first_task_size": 13, "increment": 2}, ["13", "12"]),
            ({"task_sizes": (5, 4)}, ["5, 4", "sum to 9", "12 classes"]),
            ({"task_sizes": (6, 6), "increment": 6}, ["scenario.task_sizes", "scenario.increment (6)"]),
            ({"task_sizes": (6, 6), "num_tasks": 3}, ["scenario.num_tasks is 3", "make 2 tasks"]),
            ({"increment": 5, "num_tasks": 2}, ["scenario.num_tasks is 2", "make 3 tasks", "5, 5, 2"]),
        ],
    )
    def test_task_sizes__refuses_what_does_not_fit(self, settings: dict[str, Any], words: list[str]) -> None:
        with pytest.raises(UsageError) as caught:
            scenario_of(**settings)
        for word in words:
            assert word in str(caught.value)

    @given(num_classes=st.integers(1, 60), num_tasks=st.integers(1, 60))
    def test_task_sizes__differ_by_at_most_one(self, num_classes: int, num_tasks: int) -> None:
        names = tuple(str(label) for label in range(num_classes))
        if num_tasks > num_classes:
            with pytest.raises(UsageError):
                scenario_of(names, num_tasks=num_tasks)
            return
        sizes = sizes_of(scenario_of(names, num_tasks=num_tasks))
        assert len(sizes) == num_tasks
        assert sum(sizes) == num_classes
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1


class TestLabels:
    @pytest.mark.parametrize("labels", [np.arange(1, 13), np.arange(-1, 11)])
    def test_labels__out_of_range_are_refused_with_the_numbers(self, labels: Integers) -> None:
        with pytest.raises(UsageError) as caught:
            scenario_of(labels=labels, num_tasks=3)
        assert f"from {labels.min()} to {labels.max()}" in str(caught.value)
        assert "12 classes" in str(caught.value)

    def test_labels__must_cover_every_class(self) -> None:
        with pytest.raises(UsageError, match="2 of 12 classes have no training image: class k, class l"):
            scenario_of(labels=np.arange(10), num_tasks=2)

    def test_labels__must_not_be_empty(self) -> None:
        with pytest.raises(UsageError, match="no images"):
            scenario_of(labels=np.zeros(0, dtype=np.int64), num_tasks=2)


class TestClassIncremental:
    def test_rows_of__partitions_a_split_by_task(self) -> None:
        labels = np.array([3, 0, 11, 5, 3, 7, 1, 2, 4, 6, 8, 9, 10])
        scenario = scenario_of(labels=labels, num_tasks=5)
        rows = [scenario.rows_of(task, labels) for task in scenario.tasks]
        assert sorted(np.concatenate(rows).tolist()) == list(range(13))
        for task, own in zip(scenario.tasks, rows, strict=True):
            assert set(scenario.class_index_of_label[labels[own]].tolist()) == set(task.classes)
            assert own.tolist() == sorted(own.tolist())

    def test_rows_of__may_be_empty_in_a_test_split(self) -> None:
        scenario = scenario_of(num_tasks=3, class_order="natural")
        assert scenario.rows_of(scenario.tasks[1], np.array([0, 11, 3])).tolist() == []

    def test_class_names__are_those_of_the_labels(self) -> None:
        scenario = scenario_of(num_tasks=3)
        for label, name in enumerate(TWELVE):
            assert scenario.class_names[scenario.class_index_of_label[label]] == name

    def test_seen_after__grows_with_the_tasks(self) -> None:
        scenario = scenario_of(num_tasks=3)
        for index in range(3):
            assert scenario.seen_after(index) == scenario.tasks[: index + 1]


class TestJoint:
    def test_joint__trains_once_and_is_evaluated_on_the_tasks_it_bounds(self) -> None:
        bounded = scenario_of(num_tasks=5)
        joint = scenario_of(num_tasks=5, kind="joint")
        (task,) = joint.tasks
        assert task.classes == task.new_classes == tuple(range(12))
        assert task.num_seen_classes == 12
        assert joint.evaluation_tasks == bounded.tasks
        assert joint.seen_after(0) == bounded.tasks
        assert joint.class_names == bounded.class_names
        assert joint.rows_of(task, np.arange(12)).tolist() == list(range(12))

    def test_joint__says_what_it_needs_a_number_of_tasks_for(self) -> None:
        with pytest.raises(
            UsageError, match=r"joint training is measured on the tasks .*scenario\.num_tasks"
        ):
            scenario_of(kind="joint")

    def test_joint__bounds_the_domain_incremental_scenario(self) -> None:
        labels, domains = np.array([0, 1, 1, 2]), np.array(["real", "real", "clipart", "clipart"])
        settings: dict[str, Any] = {"labels": labels, "domains": domains}
        bounded = scenario_of(("a", "b", "c"), kind="domain_incremental", **settings)
        joint = scenario_of(("a", "b", "c"), kind="joint", bounds="domain_incremental", **settings)
        assert joint.evaluation_tasks == bounded.tasks
        assert joint.class_names == bounded.class_names
        assert joint.rows_of(joint.tasks[0], labels, domains).tolist() == [0, 1, 2, 3]
        assert joint.rows_of(joint.evaluation_tasks[0], labels, domains).tolist() == [2, 3]


class TestDomainIncremental:
    NAMES = ("ant", "bee", "cow", "dog")
    LABELS = np.array([0, 1, 2, 1, 3, 0, 2, 3])
    DOMAINS = np.array(["real", "real", "clipart", "clipart", "sketch", "sketch", "sketch", "real"])

    def build(self, **settings: Any) -> Scenario:
        return scenario_of(
            self.NAMES, labels=self.LABELS, domains=self.DOMAINS, kind="domain_incremental", **settings
        )

    def test_domain_incremental__numbers_classes_by_the_domain_they_first_occur_in(self) -> None:
        scenario = self.build(class_order="natural")
        assert [task.domain for task in scenario.tasks] == ["clipart", "real", "sketch"]
        assert scenario.class_names == ("bee", "cow", "ant", "dog")
        assert scenario.class_index_of_label.tolist() == [2, 0, 1, 3]
        assert [task.classes for task in scenario.tasks] == [(0, 1), (0, 2, 3), (1, 2, 3)]
        assert [task.new_classes for task in scenario.tasks] == [(0, 1), (2, 3), ()]
        assert [task.num_seen_classes for task in scenario.tasks] == [2, 4, 4]

    def test_domain_incremental__keeps_the_class_order_inside_a_domain(self) -> None:
        scenario = self.build(class_order=["dog", "cow", "bee", "ant"])
        assert scenario.class_names == ("cow", "bee", "dog", "ant")

    def test_domain_incremental__takes_a_domain_order(self) -> None:
        scenario = self.build(class_order="natural", domain_order=["real", "clipart", "sketch"])
        assert [task.domain for task in scenario.tasks] == ["real", "clipart", "sketch"]
        assert scenario.class_names == ("ant", "bee", "dog", "cow")

    def test_rows_of__partitions_a_split_by_domain(self) -> None:
        scenario = self.build()
        rows = [scenario.rows_of(task, self.LABELS, self.DOMAINS).tolist() for task in scenario.tasks]
        assert rows == [[2, 3], [0, 1, 7], [4, 5, 6]]

    def test_rows_of__leaves_out_test_images_of_classes_not_seen_yet(self) -> None:
        scenario = self.build(class_order="natural")
        labels, domains = np.array([1, 3, 3]), np.array(["clipart", "clipart", "sketch"])
        assert scenario.rows_of(scenario.tasks[0], labels, domains).tolist() == [0]
        assert scenario.rows_of(scenario.tasks[2], labels, domains).tolist() == [2]

    def test_domain_incremental__refuses_bounds_of_joint_training(self) -> None:
        with pytest.raises(ValidationError, match=r"set scenario\.kind=joint, or leave"):
            ScenarioConfig(kind="domain_incremental", bounds="domain_incremental")
        with pytest.raises(ValidationError, match=r"bounds=domain_incremental says"):
            ScenarioConfig(bounds="domain_incremental")

    def test_rows_of__needs_the_domains(self) -> None:
        scenario = self.build()
        with pytest.raises(UsageError, match="domain"):
            scenario.rows_of(scenario.tasks[0], self.LABELS)

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"num_tasks": 2}, ["scenario.num_tasks is 2", "3 domains", "clipart, real, sketch"]),
            ({"increment": 2}, ["every domain is a task"]),
            ({"domain_order": ["real", "sketch"]}, ["missing: clipart"]),
            ({"domain_order": ["real", "sketch", "clip art"]}, ["clip art (nearest: clipart)"]),
        ],
    )
    def test_domain_incremental__refuses_what_does_not_fit(
        self, settings: dict[str, Any], words: list[str]
    ) -> None:
        with pytest.raises(UsageError) as caught:
            self.build(**settings)
        for word in words:
            assert word in str(caught.value)

    def test_domain_incremental__needs_domains(self) -> None:
        with pytest.raises(UsageError, match=r"dataset\.domain_column"):
            scenario_of(kind="domain_incremental")


def test_extend_scenario__puts_new_classes_after_known_ones() -> None:
    config = ScenarioConfig(allow_known_classes=True)
    earlier = [Task(0, (0, 1), (0, 1), 2), Task(1, (2,), (2,), 3)]
    labels = np.array([2, 0, 1, 2])
    scenario = extend_scenario(
        config,
        earlier=earlier,
        known_names=["a", "b", "c"],
        class_names=["x", "b", "d"],
        labels=labels,
        domain="n",
    )
    assert scenario.class_names == ("a", "b", "c", "x", "d")
    assert scenario.tasks == (*earlier, Task(2, (1, 3, 4), (3, 4), 5))
    assert scenario.class_index_of_label.tolist() == [3, 1, 4]
    assert scenario.rows_of(scenario.tasks[2], labels).tolist() == [0, 1, 2, 3]


def test_names__are_compared_in_one_unicode_form() -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    labels = np.array([0, 1])
    order = ScenarioConfig(class_order=(composed, "bar"), num_tasks=2)
    scenario = build_scenario(order, class_names=("bar", decomposed), labels=labels)
    assert scenario.class_names == (decomposed, "bar")
    with pytest.raises(UsageError, match="learned before"):
        extend_scenario(
            ScenarioConfig(),
            earlier=scenario.tasks,
            known_names=scenario.class_names,
            class_names=(composed, "new"),
            labels=labels,
            domain="",
        )


def test_extend_scenario__points_at_a_class_that_looks_like_a_known_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    labels = np.array([0, 1])
    scenario = build_scenario(ScenarioConfig(num_tasks=2), class_names=("cat", "dog"), labels=labels)
    grown = extend_scenario(
        ScenarioConfig(),
        earlier=scenario.tasks,
        known_names=scenario.class_names,
        class_names=("Cat", "owl"),
        labels=labels,
        domain="",
    )
    assert len(grown.class_names) == 4
    assert "'cat' and 'Cat'" in caplog.text
