"""Which samples make a step, and how their views are drawn."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import v2
from view_batches import ROWS, epochs_of, loader_of, steps_of

from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.data.transforms import TransformsConfig, build_transforms
from vbm_ptm.data.view_batch import ViewBatchSampler, check_batch_arithmetic, effective_views
from vbm_ptm.data.view_transforms import ViewTransforms
from vbm_ptm.data.views import MultiViewDataset, ReplayPart, StepPart, ViewBatch
from vbm_ptm.errors import UsageError
from vbm_ptm.randomness import seed_for, seeded


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
        with pytest.raises(UsageError, match="task 4 has no training images"):
            ViewBatchSampler(0, 8, 4, 0, 3)


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
            config, **{name: getattr(transforms.record, name) for name in names}, crop_fraction=1.0
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

    def test_items__left_weak_are_made_strong_on_the_device(
        self, build: Any, transforms: ViewTransforms
    ) -> None:
        """Each view by a seed of its own: the same in any batch, draws of past samples and exemplars included."""
        on_device = replace(transforms, strong_on_device=True)
        dataset = build(transforms=on_device)
        past = ReplayPart(step=6, draw=1, rows=[88], slots=[0], num_views=2, num_global_groups=1)
        batch = dataset.__getitems__(StepPart(5, [3, 4], 2, (past,)))
        assert build().__getitems__(StepPart(5, [3, 4], 2)).strong_seeds is None
        weak = build(transforms=replace(transforms, strong_operation=v2.Identity()))
        assert torch.equal(batch.images, weak.__getitems__(StepPart(5, [3, 4], 2)).images)
        seeds = batch.strong_seeds
        assert (seeds < 0).tolist() == [[True, False, False, False]] * 2
        assert len(seeds.unique()) == 7
        (replayed,) = batch.replays
        assert replayed.strong_seeds.shape == (1, 2)
        assert replayed.strong_seeds[0, 1] not in seeds
        views = on_device.strengthen(batch.images, seeds)
        assert torch.equal(views[:, 0], batch.images[:, 0])
        assert not torch.equal(views, batch.images)
        whole, _ = batch.flattened(on_device)
        assert torch.equal(whole, on_device.normalization(views.flatten(0, 1)))
        parts = [part.flattened(on_device)[0] for part in batch.micro_batches(2)]
        assert torch.equal(torch.cat(parts), whole)
        alone = dataset.__getitems__(StepPart(5, [4], 2))
        assert torch.equal(alone.flattened(on_device)[0], parts[1])
        share = build(transforms=on_device, num_views=1, strong_share=0.5)
        draws = [share.__getitems__(StepPart(draw, [3], 1)).strong_seeds for draw in range(4)]
        assert sum(bool(drawn >= 0) for drawn in draws) == 2

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
