"""Which samples make a step, how their views are drawn, and what the loaders bring."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import pickle
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.image_split import ImageDatasets, ImageSplit
from vbm_ptm.data.loaders import LoaderConfig, Loaders, TrainLoader
from vbm_ptm.data.reading.datasets import DatasetSpec, load_image_dataset
from vbm_ptm.data.scenario import Scenario, Task
from vbm_ptm.data.transforms import TransformsConfig, ViewTransforms, build_transforms
from vbm_ptm.data.view_batch import (
    MultiViewDataset,
    ViewBatch,
    ViewBatchConfig,
    ViewBatchSampler,
    check_batch_arithmetic,
    effective_views,
)
from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seed_for, seeded

ROWS = np.array([40, 3, 17, 88, 61, 5, 23, 99, 70, 12, 31])
IN_PROCESS, TWO_WORKERS = LoaderConfig(), LoaderConfig(num_workers=2)


@pytest.fixture(scope="module", name="split")
def training_split() -> ImageSplit:
    return load_image_dataset(DatasetSpec(name="digits", source="builtin:digits")).train


@pytest.fixture(scope="module", name="class_indices")
def reversed_labels(split: ImageSplit) -> Any:
    return 9 - split.labels


@pytest.fixture(scope="module", name="transforms")
def photograph_transforms() -> ViewTransforms:
    return build_transforms(
        TransformsConfig(),
        image_size=16,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        interpolation="bicubic",
        crop_fraction=1.0,
    )


@pytest.fixture(name="build")
def dataset_builder(split: ImageSplit, class_indices: Any, transforms: ViewTransforms) -> Any:
    def build(
        *,
        rows: Any = ROWS,
        num_views: int = 4,
        seed: int = 1,
        task_index: int = 2,
        strong_share: float = 0.0,
        transforms: ViewTransforms = transforms,
    ) -> MultiViewDataset:
        return MultiViewDataset(
            split,
            rows=rows,
            class_indices=class_indices,
            transforms=transforms,
            num_views=num_views,
            seed=seed,
            task_index=task_index,
            strong_share=strong_share,
        )

    return build


@dataclass(frozen=True)
class GivenRows(Benchmark):
    """A benchmark whose tasks all have the rows that are given, in their order."""

    rows: Any = ()

    def training_rows(self, task: Task) -> Any:
        return self.rows


def benchmark_of(split: ImageSplit, transforms: ViewTransforms, *, rows: Any = ()) -> Benchmark:
    names = tuple("9876543210")
    scenario = Scenario("class_incremental", names, (), (), np.arange(10)[::-1])
    return GivenRows(ImageDatasets(split, split, names[::-1], "", {}), scenario, transforms, rows=rows)


def loader_of(
    dataset: MultiViewDataset,
    *,
    batch_size: int = 8,
    num_views: int = 4,
    config: LoaderConfig = IN_PROCESS,
    rank: int = 0,
    num_ranks: int = 1,
    pin_memory: bool = False,
) -> TrainLoader:
    sampler = ViewBatchSampler(len(dataset), batch_size, num_views, dataset.seed, dataset.task_index)
    loaders = Loaders(
        benchmark_of(dataset.split, dataset.transforms, rows=dataset.rows),
        config,
        seed=dataset.seed,
        rank=rank,
        num_ranks=num_ranks,
        pin_memory=pin_memory,
    )
    return loaders.training(Task(dataset.task_index, (), (), 0), sampler)


def epochs_of(loader: TrainLoader, num_epochs: int) -> list[list[ViewBatch]]:
    batches = []
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        batches.append(list(loader))
    return batches


def are_equal(one: Iterable[ViewBatch], two: Iterable[ViewBatch]) -> bool:
    return all(
        torch.equal(a.images, b.images)
        and torch.equal(a.labels, b.labels)
        and torch.equal(a.sample_ids, b.sample_ids)
        and a.num_global_groups == b.num_global_groups
        for a, b in zip(one, two, strict=True)
    )


def steps_of(sampler: ViewBatchSampler, epoch: int) -> list[list[int]]:
    sampler.set_epoch(epoch)
    return sampler.steps()


class TestBatchArithmetic:
    @pytest.mark.parametrize(("batch_size", "num_views"), [(8, 4), (128, 4), (2, 1), (9, 3)])
    def test_check_batch_arithmetic__permits_two_whole_groups(self, batch_size: int, num_views: int) -> None:
        check_batch_arithmetic(batch_size, num_views)

    @pytest.mark.parametrize(
        ("batch_size", "num_views", "nearest"),
        [
            (10, 4, "8 and 12"),
            (128, 3, "126 and 129"),
            (4, 4, "8 and 12"),
            (3, 4, "8 and 12"),
            (0, 1, "2 and 3"),
        ],
    )
    def test_check_batch_arithmetic__names_the_nearest_legal_sizes(
        self, batch_size: int, num_views: int, nearest: str
    ) -> None:
        with pytest.raises(UsageError, match=f"batch size {batch_size} .* of {num_views} views.* {nearest}"):
            check_batch_arithmetic(batch_size, num_views)

    def test_check_batch_arithmetic__needs_a_view(self) -> None:
        with pytest.raises(UsageError, match="num_views is 0"):
            check_batch_arithmetic(8, 0)

    def test_effective_views__never_exceed_the_samples(self) -> None:
        assert [effective_views(samples, 4) for samples in (1, 3, 4, 5)] == [1, 3, 4, 4]


class TestViewBatchSampler:
    def test_steps__cut_ten_samples_as_computed_by_hand(self) -> None:
        """With the identity order: [0],[1,2],[3,4] and [5],[6,7],[8,9]."""
        sampler = ViewBatchSampler(10, 4, 2, 0)
        sizes = [[len(step) for step in steps_of(sampler, epoch)] for epoch in (0, 1)]
        assert sizes == [[1, 2, 2], [1, 2, 2]]

    @pytest.mark.parametrize(
        ("num_samples", "batch_size", "num_views", "num_steps", "sizes"),
        [
            (5000, 128, 4, 40, {31, 32}),
            (200, 32, 4, 7, {7, 8}),
            (5000, 129, 3, 39, {42, 43}),
            (24, 64, 4, 1, {6}),
        ],
    )
    def test_steps__have_known_sizes(
        self, num_samples: int, batch_size: int, num_views: int, num_steps: int, sizes: set[int]
    ) -> None:
        sampler = ViewBatchSampler(num_samples, batch_size, num_views, 0)
        for epoch in range(num_views):
            steps = steps_of(sampler, epoch)
            assert len(steps) == len(sampler) == num_steps
            assert {len(step) for step in steps} == sizes

    @settings(deadline=None, max_examples=150)
    @given(
        num_samples=st.integers(1, 400),
        num_groups=st.integers(2, 40),
        num_views=st.integers(1, 8),
        cycle=st.integers(0, 3),
        seed=st.integers(0, 5),
    )
    def test_steps__visit_every_sample_once_per_cycle(
        self, num_samples: int, num_groups: int, num_views: int, cycle: int, seed: int
    ) -> None:
        batch_size = num_groups * num_views
        sampler = ViewBatchSampler(num_samples, batch_size, num_views, seed)
        views = min(num_samples, num_views)
        assert sampler.num_views == views
        visited: list[int] = []
        for epoch in range(cycle * views, (cycle + 1) * views):
            steps = steps_of(sampler, epoch)
            assert len(steps) == math.ceil(num_samples / batch_size)
            sizes = [len(step) for step in steps]
            assert min(sizes) >= 1
            assert max(sizes) * views <= batch_size
            if views > 1:
                assert max(sizes) - min(sizes) <= 1
            assert abs(sum(sizes) - num_samples / views) < 1
            visited += itertools.chain.from_iterable(steps)
        assert sorted(visited) == list(range(num_samples))

    @settings(deadline=None, max_examples=50)
    @given(num_samples=st.integers(8, 300), num_groups=st.integers(2, 20), num_views=st.integers(2, 8))
    def test_steps__are_slices_of_one_permutation_per_cycle(
        self, num_samples: int, num_groups: int, num_views: int
    ) -> None:
        sampler = ViewBatchSampler(num_samples, num_groups * num_views, num_views, 0)
        epochs = [steps_of(sampler, epoch) for epoch in range(num_views)]
        order = [position for steps in epochs for step in steps for position in step]
        num_steps = math.ceil(num_samples / (num_groups * num_views))
        for phase, steps in enumerate(epochs):
            low, high = num_samples * phase // num_views, num_samples * (phase + 1) // num_views
            count = high - low
            expected = [
                order[low + count * step // num_steps : low + count * (step + 1) // num_steps]
                for step in range(num_steps)
            ]
            assert steps == expected

    def test_steps__of_one_view_are_a_shuffle_with_a_short_last_batch(self) -> None:
        sampler = ViewBatchSampler(5000, 128, 1, 0)
        first, second = steps_of(sampler, 0), steps_of(sampler, 1)
        assert [len(step) for step in first] == [128] * 39 + [8]
        assert sorted(itertools.chain.from_iterable(first)) == list(range(5000))
        assert first != second

    def test_steps__come_back_after_v_epochs_on_average(self) -> None:
        """The recall interval is V times the baseline's S steps; the images shown are the same."""
        num_samples, batch_size, num_views, num_cycles = 203, 16, 4, 5
        sampler = ViewBatchSampler(num_samples, batch_size, num_views, 0)
        visits: dict[int, list[int]] = {position: [] for position in range(num_samples)}
        num_images = 0
        for epoch in range(num_cycles * num_views):
            for step, positions in enumerate(steps_of(sampler, epoch)):
                num_images += len(positions) * num_views
                for position in positions:
                    visits[position].append(epoch * len(sampler) + step)
        gaps = [after - before for steps in visits.values() for before, after in itertools.pairwise(steps)]
        assert len(gaps) == num_samples * (num_cycles - 1)
        assert np.mean(gaps) == pytest.approx(num_views * len(sampler), rel=0.02)
        assert num_images == num_samples * num_cycles * num_views

    def test_steps__depend_on_seed_task_and_cycle_alone(self) -> None:
        def steps(seed: int, task_index: int, epoch: int) -> list[list[int]]:
            return steps_of(ViewBatchSampler(40, 8, 2, seed, task_index), epoch)

        assert steps(1, 0, 0) == steps(1, 0, 0)
        assert sorted(itertools.chain(*steps(1, 0, 0), *steps(1, 0, 1))) == list(range(40))
        different = [steps(1, 0, 0), steps(2, 0, 0), steps(1, 1, 0), steps(1, 0, 2), steps(1, 0, 1)]
        assert all(one != two for one, two in itertools.combinations(different, 2))

    def test_steps__leave_the_global_generators_alone(self) -> None:
        before = torch.default_generator.get_state()
        steps_of(ViewBatchSampler(40, 8, 2, 1), 3)
        assert torch.equal(before, torch.default_generator.get_state())

    def test_sampler__refuses_a_batch_that_does_not_hold_whole_groups(self) -> None:
        with pytest.raises(UsageError, match="8 and 12"):
            ViewBatchSampler(100, 10, 4, 0)

    def test_sampler__refuses_a_task_without_images(self) -> None:
        with pytest.raises(UsageError, match="task 3 has no training images"):
            ViewBatchSampler(0, 8, 4, 0, 3)


class TestViewBatchConfig:
    def test_strong_share__is_for_single_views(self) -> None:
        with pytest.raises(ValueError, match=r"strong_share is 0\.75, but 4 views"):
            ViewBatchConfig(num_views=4, strong_share=0.75)
        assert ViewBatchConfig(num_views=4, strong_share=0.75, order="class").views_per_group == 1

    def test_is_baseline__is_one_weak_view_an_epoch(self) -> None:
        assert ViewBatchConfig(num_views=1).is_baseline
        for other in (
            {"num_views": 4},
            {"num_views": 1, "strong_share": 0.5},
            {"num_views": 4, "order": "class"},
        ):
            assert not ViewBatchConfig(**other).is_baseline


class TestMultiViewDataset:
    def test_item__is_one_weak_and_then_strong_views_of_one_sample(
        self, build: Any, split: ImageSplit, transforms: ViewTransforms
    ) -> None:
        views, label, sample_id = build()[5, 3]
        assert views.shape == (4, 3, 16, 16)
        assert sample_id == 88
        assert label == 9 - split.labels[88]
        for view, draw in enumerate(
            [transforms.weak, transforms.strong, transforms.strong, transforms.strong]
        ):
            with seeded(seed_for("view", seed=1, task=2, epoch=5, sample=88, view=view)):
                assert torch.equal(views[view], draw(split.image(88)))

    def test_item__of_replay_alone_is_bit_for_bit_views_of_the_weak_transform(
        self, build: Any, split: ImageSplit, transforms: ViewTransforms
    ) -> None:
        config = TransformsConfig(strong="none")
        names = ("image_size", "interpolation", "mean", "std")
        alone = build_transforms(
            config, **{name: transforms.record[name] for name in names}, crop_fraction=1.0
        )
        for draw in range(3):
            views, _, row = build(transforms=alone)[draw, 3]
            for view in range(4):
                with seeded(seed_for("view", seed=1, task=2, epoch=draw, sample=row, view=view)):
                    assert torch.equal(views[view], transforms.weak(split.image(row)))

    @pytest.mark.parametrize("num_views", [2, 3, 4, 5])
    def test_item__of_one_view_keeps_a_share_of_strong_images(self, build: Any, num_views: int) -> None:
        """As many as V views have: in V draws of a sample one image is weak, and over samples in each epoch as well."""
        dataset = build(rows=np.arange(1437), num_views=1, strong_share=(num_views - 1) / num_views)
        strong = np.array(
            [[dataset._is_strong(row, draw) for row in range(1437)] for draw in range(4 * num_views)]
        )
        assert (~strong).sum() * num_views == strong.size  # 1/4 : 3/4 with four views, to one image
        for cycle in np.split(strong, 4):
            assert (cycle.sum(0) == num_views - 1).all()
        share = strong.mean(1)
        assert abs(share - (num_views - 1) / num_views).max() < 4 * (0.25 / 1437) ** 0.5

    def test_item__of_a_share_is_the_strong_or_the_weak_view(
        self, build: Any, split: ImageSplit, transforms: ViewTransforms
    ) -> None:
        dataset = build(num_views=1, strong_share=0.5)
        for draw in range(4):
            (view,), _, row = dataset[draw, 3]
            transform = transforms.strong if dataset._is_strong(row, draw) else transforms.weak
            with seeded(seed_for("view", seed=1, task=2, epoch=draw, sample=row, view=0)):
                assert torch.equal(view, transform(split.image(row)))

    def test_item__is_decoded_once(self, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        decoded: list[int] = []
        original = ImageSplit.image

        def counting(split: ImageSplit, index: int) -> Image.Image:
            decoded.append(index)
            return original(split, index)

        monkeypatch.setattr(ImageSplit, "image", counting)
        build()[0, 1]
        assert decoded == [3]

    def test_item__of_one_view_is_the_weak_view_of_many(self, build: Any) -> None:
        assert torch.equal(build(num_views=1)[0, 3][0][0], build(num_views=4)[0, 3][0][0])

    def test_item__differs_over_views_epochs_tasks_seeds_and_samples(self, build: Any) -> None:
        keys = [(1, 0, 0), (1, 0, 1), (1, 0, 2), (1, 1, 0), (1, 1, 1), (2, 0, 0)]
        views = [
            view
            for seed, task_index, epoch in keys
            for view in build(seed=seed, task_index=task_index)[epoch, 3][0]
        ]
        assert all(not torch.equal(one, two) for one, two in itertools.combinations(views, 2))

    def test_item__does_not_depend_on_the_position_or_on_earlier_items(self, build: Any) -> None:
        dataset = build()
        dataset[0, 0]
        assert torch.equal(dataset[2, 3][0], build(rows=np.array([7, 88, 1, 2]))[2, 1][0])

    def test_item__leaves_the_global_generators_alone(self, build: Any) -> None:
        before = torch.default_generator.get_state()
        build()[0, 0]
        assert torch.equal(before, torch.default_generator.get_state())

    def test_dataset__of_fewer_samples_than_views_draws_as_many_views(self, build: Any) -> None:
        dataset = build(rows=ROWS[:3])
        batches = epochs_of(loader_of(dataset), 3)
        assert [batch.images.shape for (batch,) in batches] == [(1, 3, 3, 16, 16)] * 3
        assert sorted(batch.sample_ids.item() for (batch,) in batches) == [3, 17, 40]

    def test_dataset__refuses_class_indices_of_the_task_alone(
        self, split: ImageSplit, class_indices: Any, transforms: ViewTransforms
    ) -> None:
        with pytest.raises(ValueError, match="every row of the split"):
            MultiViewDataset(
                split,
                rows=ROWS,
                class_indices=class_indices[ROWS],
                transforms=transforms,
                num_views=2,
                seed=0,
                task_index=0,
            )

    def test_dataset__touches_no_image_of_another_task(
        self, split: ImageSplit, class_indices: Any, transforms: ViewTransforms
    ) -> None:
        images = [split.rows[row]["image"] for row in range(4)]
        images[3] = {"bytes": b"not an image", "path": None}
        damaged = replace(
            split,
            rows=Dataset.from_dict({"image": images}),
            labels=split.labels[:4],
            source_names=split.source_names[:4],
        )

        def dataset(rows: list[int]) -> MultiViewDataset:
            return MultiViewDataset(
                damaged,
                rows=np.array(rows),
                class_indices=class_indices[:4],
                transforms=transforms,
                num_views=1,
                seed=0,
                task_index=0,
            )

        ((batch,),) = epochs_of(loader_of(dataset([2, 0]), num_views=1), 1)
        assert sorted(batch.sample_ids.tolist()) == [0, 2]
        with pytest.raises(UsageError, match="cannot"):
            dataset([3])[0, 0]


class TestViewBatch:
    def test_view_batch__moves_what_the_device_needs(self) -> None:
        batch = ViewBatch(torch.zeros(2, 3, 3, 4, 4), torch.zeros(2), torch.zeros(2), 5)
        moved = batch.to("meta")
        assert moved.images.device.type == moved.labels.device.type == "meta"
        assert moved.sample_ids is batch.sample_ids
        assert (moved.num_groups, moved.num_views, moved.num_global_groups) == (2, 3, 5)

    @pytest.mark.gpu
    def test_view_batch__is_pinned_by_the_loader(self, build: Any) -> None:
        loader = loader_of(build(), pin_memory=True)
        assert all(batch.images.is_pinned() and batch.labels.is_pinned() for batch in loader)


class TestTrainLoader:
    def test_train_loader__brings_the_samplers_steps(self, build: Any, split: ImageSplit) -> None:
        dataset = build()
        loader, sampler = loader_of(dataset), ViewBatchSampler(len(ROWS), 8, 4, 1, 2)
        for epoch, batches in enumerate(epochs_of(loader, 5)):
            steps = steps_of(sampler, epoch)
            assert [batch.sample_ids.tolist() for batch in batches] == [ROWS[step].tolist() for step in steps]
            for batch in batches:
                assert batch.labels.dtype == batch.sample_ids.dtype == torch.int64
                assert batch.labels.tolist() == (9 - split.labels[batch.sample_ids.numpy()]).tolist()
                assert batch.images.shape == (len(batch.labels), 4, 3, 16, 16)
                assert batch.num_global_groups == len(batch.labels)
                for images, sample_id in zip(batch.images, batch.sample_ids.tolist(), strict=True):
                    assert torch.equal(images, dataset[epoch, ROWS.tolist().index(sample_id)][0])

    def test_train_loader__of_one_view_is_the_plain_baseline(
        self, build: Any, split: ImageSplit, transforms: ViewTransforms
    ) -> None:
        loader = loader_of(build(num_views=1), batch_size=4, num_views=1)
        for epoch, batches in enumerate(epochs_of(loader, 2)):
            order = torch.randperm(
                11, generator=torch.Generator().manual_seed(seed_for("sampler", seed=1, task=2, epoch=epoch))
            )
            rows = torch.from_numpy(ROWS)[order].split(4)
            for batch, expected_rows in zip(batches, rows, strict=True):
                assert torch.equal(batch.sample_ids, expected_rows)
                for image, row in zip(batch.images[:, 0], expected_rows.tolist(), strict=True):
                    with seeded(seed_for("view", seed=1, task=2, epoch=epoch, sample=row)):
                        assert torch.equal(image, transforms.weak(split.image(row)))

    def test_train_loader__brings_the_same_with_persistent_workers(self, build: Any) -> None:
        plain = epochs_of(loader_of(build()), 3)
        with_workers = epochs_of(loader_of(build(), config=TWO_WORKERS), 3)
        assert all(are_equal(one, two) for one, two in zip(plain, with_workers, strict=True))

    @pytest.mark.slow
    def test_train_loader__works_with_spawned_workers(self, build: Any) -> None:
        config = LoaderConfig(num_workers=1, multiprocessing_context="spawn")
        assert are_equal(loader_of(build()), loader_of(build(), config=config))

    def test_train_loader__starts_anew_after_an_epoch_left_early(self, build: Any) -> None:
        loader = loader_of(build(), config=TWO_WORKERS)
        next(iter(loader))
        (left_early,) = epochs_of(loader, 1)
        (expected,) = epochs_of(loader_of(build()), 1)
        assert are_equal(left_early, expected)

    @pytest.mark.parametrize("config", [IN_PROCESS, TWO_WORKERS])
    def test_train_loader__goes_on_at_a_step(self, build: Any, config: LoaderConfig) -> None:
        loader = loader_of(build(), config=config)
        loader.set_epoch(3, start_step=1)
        whole = loader_of(build())
        whole.set_epoch(3)
        assert (len(loader), len(whole)) == (1, 2)
        assert are_equal(loader, list(whole)[1:])
        loader.set_epoch(4)
        assert len(loader) == 2

    @pytest.mark.parametrize("config", [IN_PROCESS, TWO_WORKERS])
    def test_train_loader__leaves_the_global_generators_alone(self, build: Any, config: LoaderConfig) -> None:
        with seeded(5):
            before = torch.default_generator.get_state()
            epochs_of(loader_of(build(), config=config), 2)
            assert torch.equal(before, torch.default_generator.get_state())

    @pytest.mark.parametrize("num_samples", [1, 2, 3, 7, 8, 11])
    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_train_loader__divides_every_step_among_the_ranks(
        self, build: Any, num_samples: int, num_ranks: int
    ) -> None:
        rows = ROWS[:num_samples]
        whole = epochs_of(loader_of(build(rows=rows)), 4)
        parts = [
            epochs_of(loader_of(build(rows=rows), rank=rank, num_ranks=num_ranks), 4)
            for rank in range(num_ranks)
        ]
        for epoch, batches in enumerate(whole):
            for step, batch in enumerate(batches):
                shares = [part[epoch][step] for part in parts]
                assert torch.equal(torch.cat([share.images for share in shares]), batch.images)
                assert torch.equal(torch.cat([share.sample_ids for share in shares]), batch.sample_ids)
                assert {share.num_global_groups for share in shares} == {batch.num_groups}
                sizes = [share.num_groups for share in shares]
                assert max(sizes) - min(sizes) <= 1
            assert all(len(part[epoch]) == len(batches) for part in parts)

    def test_train_loader__brings_a_batch_of_the_right_shape_to_a_rank_without_groups(
        self, build: Any
    ) -> None:
        ((first, *_),) = epochs_of(loader_of(build(), num_ranks=5), 1)
        assert first.images.shape == (0, 4, 3, 16, 16)
        assert first.images.dtype == torch.uint8
        assert first.labels.dtype == first.sample_ids.dtype == torch.int64
        assert first.labels.shape == first.sample_ids.shape == (0,)
        assert first.num_global_groups == 1

    def test_training__refuses_a_sampler_of_another_task(
        self, split: ImageSplit, transforms: ViewTransforms
    ) -> None:
        loaders = Loaders(benchmark_of(split, transforms, rows=ROWS), IN_PROCESS)
        with pytest.raises(ValueError, match=r"10 samples.* 11 "):
            loaders.training(Task(0, (), (), 0), ViewBatchSampler(10, 8, 4, 1))

    def test_train_loader__workers_outlive_an_interrupt(self, build: Any) -> None:
        """Ctrl-C reaches workers too; the main process decides what happens."""
        loader = loader_of(build(), config=TWO_WORKERS)
        before = set(multiprocessing.active_children())
        batches = iter(loader)
        workers = set(multiprocessing.active_children()) - before
        for worker in workers:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGINT)  # also while they start
            os.kill(worker.pid, signal.SIGTERM)
        (expected,) = epochs_of(loader_of(build()), 1)
        assert are_equal(batches, expected)
        for worker in workers:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGINT)
            os.kill(worker.pid, signal.SIGTERM)
        assert are_equal(epochs_of(loader, 1)[0], expected)
        assert len(workers) == 2
        assert all(worker.is_alive() for worker in workers)

    def test_train_loader__leaves_interrupts_of_the_main_process_as_they_are(self, build: Any) -> None:
        iter(loader_of(build(), config=TWO_WORKERS))
        assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def test_train_loader__starts_no_more_workers_than_it_has_steps(self, build: Any) -> None:
        before = set(multiprocessing.active_children())
        loader = loader_of(build(rows=ROWS[:5]), config=TWO_WORKERS)
        next(iter(loader))
        assert len(loader) == len(set(multiprocessing.active_children()) - before) == 1

    def test_everything__that_goes_to_a_worker_pickles(self, build: Any) -> None:
        dataset = build()
        again = pickle.loads(pickle.dumps(dataset))
        assert torch.equal(again[1, 2][0], dataset[1, 2][0])
        ((batch, *_),) = epochs_of(loader_of(dataset), 1)
        assert are_equal([pickle.loads(pickle.dumps(batch))], [batch])


class TestEvaluationLoader:
    @pytest.fixture(name="load")
    def batch_reader(self, split: ImageSplit, transforms: ViewTransforms) -> Any:
        def load(*, rows: Any = ROWS, config: LoaderConfig | None = None, **options: Any) -> list[Any]:
            ranks = {name: options.pop(name) for name in ("rank", "num_ranks", "seed") if name in options}
            config = config or LoaderConfig(evaluation_batch_size=4)
            loaders = Loaders(benchmark_of(split, transforms), config, **ranks)
            return list(loaders.evaluation(split, loaders.parts_of_rank(rows), **options))

        return load

    def test_evaluation_loader__brings_the_rows_in_order(
        self, load: Any, split: ImageSplit, transforms: ViewTransforms
    ) -> None:
        batches = load()
        assert [len(batch.labels) for batch in batches] == [4, 4, 3]
        sample_ids = torch.cat([batch.sample_ids for batch in batches])
        assert sample_ids.tolist() == ROWS.tolist()
        assert torch.cat([batch.labels for batch in batches]).tolist() == (9 - split.labels[ROWS]).tolist()
        expected = torch.stack([transforms.evaluate(split.image(row)) for row in ROWS])
        assert torch.equal(torch.cat([batch.images for batch in batches]), expected)

    @pytest.mark.parametrize("num_ranks", [1, 2, 3, 16])
    def test_evaluation_loader__brings_each_row_on_exactly_one_rank(self, load: Any, num_ranks: int) -> None:
        shares = [load(rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        sample_ids = [row for share in shares for batch in share for row in batch.sample_ids.tolist()]
        assert sample_ids == ROWS.tolist()

    def test_evaluation_loader__draws_the_same_weak_view_in_any_batch_or_worker(
        self, load: Any, split: ImageSplit, transforms: ViewTransforms
    ) -> None:
        options = {"transform": "weak", "seed": 3, "task_index": 1}
        plain = torch.cat([batch.images for batch in load(**options)])
        config = LoaderConfig(evaluation_batch_size=3, num_workers=2)
        assert torch.equal(plain, torch.cat([batch.images for batch in load(config=config, **options)]))
        with seeded(seed_for("features", seed=3, task=1, sample=40)):
            assert torch.equal(plain[0], transforms.weak(split.image(40)))
        other = torch.cat([batch.images for batch in load(**{**options, "task_index": 2})])
        assert not torch.equal(plain[0], other[0])

    def test_evaluation_loader__takes_no_rows(self, load: Any) -> None:
        assert load(rows=ROWS[:0]) == []
        assert load(rows=ROWS[:0], config=TWO_WORKERS) == []

    def test_evaluation_loader__leaves_the_global_generators_alone(self, load: Any) -> None:
        with seeded(5):
            before = torch.default_generator.get_state()
            load(transform="weak")
            load(config=TWO_WORKERS)
            assert torch.equal(before, torch.default_generator.get_state())


def test_loader_config__leaves_the_cores_to_a_cpu_that_trains() -> None:
    assert LoaderConfig().for_device("cpu").num_workers == 0
    assert 1 <= (LoaderConfig().for_device("cuda").num_workers or 0) <= 8
    assert LoaderConfig(num_workers=3).for_device("cpu").num_workers == 3
