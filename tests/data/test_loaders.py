"""What the loaders bring: to a rank, through workers, in any order of passes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from typing import Any

import pytest
import torch
from view_batches import (
    IN_PROCESS,
    ROWS,
    TWO_WORKERS,
    are_equal,
    benchmark_of,
    epochs_of,
    loader_of,
    steps_of,
)

from vbm_ptm.data.image_split import ImageSplit
from vbm_ptm.data.loader_config import LoaderConfig
from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.data.view_batch import ViewBatchSampler
from vbm_ptm.data.view_transforms import ViewTransforms
from vbm_ptm.randomness import seed_for, seeded


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
        with pytest.raises(ValueError, match=r"10 samples.* 11"):
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
