"""Fingerprints against hashes written out here; ranks are compared in real processes by test_ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.engine.acceleration import build_accelerator
from vbm_ptm.engine.fingerprint import TaskFingerprints
from vbm_ptm.errors import TrainingError
from vbm_ptm.learners.base import Learner, TaskStatistics


def test_task_fingerprints__find_what_may_not_change(
    benchmark_of_three: Benchmark, new_learner: Callable[..., Learner]
) -> None:
    learner = new_learner("dualprompt", depth=6)
    for task in benchmark_of_three.scenario.tasks[:2]:
        learner.begin_task(task)
    prints = TaskFingerprints(learner, 1, build_accelerator(device="cpu"))
    prints.check_training()
    frozen, trained = prints.frozen_sha256, prints.trained_sha256
    prints.check_resumed(frozen)
    with pytest.raises(TrainingError, match="not those that task 2 began with"):
        prints.check_resumed(frozen[::-1])
    with torch.no_grad():
        learner.heads.tasks[1].weight.add_(1)  # the task's own
    prints.check_training()
    assert prints.frozen_sha256 == frozen
    assert prints.trained_sha256 != trained
    with torch.no_grad():
        learner.heads.tasks[0].weight[0, 0] += 1e-6
        learner.backbone.vit.cls_token.neg_()
    names = r"'backbone\.vit\.cls_token', 'heads\.tasks\.0\.weight'"
    with pytest.raises(TrainingError, match=rf"on task 2 has changed 2 of \d+ frozen parameters: {names}"):
        prints.check_training()


def test_task_fingerprints__include_what_the_end_of_a_task_makes(
    benchmark_of_three: Benchmark, new_learner: Callable[..., Learner]
) -> None:
    learner = new_learner("nearest_mean")
    learner.begin_task(benchmark_of_three.scenario.tasks[0])
    hashes = []
    for value in (0.0, 0.0, 1.0):
        prints = TaskFingerprints(learner, 0, build_accelerator(device="cpu"))
        prints.check_training()
        learner.statistics["0"] = TaskStatistics({"sum": torch.full((2, 48), value)})
        prints.check_end()
        hashes.append(prints.trained_sha256)
    assert hashes[0] == hashes[1] != hashes[2]


def test_fit__stops_where_a_learner_writes_into_its_frozen_backbone(
    benchmark_of_three: Benchmark, new_learner: Callable[..., Learner], new_run: Callable[..., Any]
) -> None:
    learner = new_learner("linear_probe")

    def meddle(module: torch.nn.Module, inputs: Any) -> None:
        if module.training and learner.task.index == 1:
            with torch.no_grad():
                learner.backbone.vit.cls_token.add_(1e-3)

    learner.register_forward_pre_hook(meddle)
    run = new_run(learner, benchmark_of_three)
    with pytest.raises(TrainingError, match=r"task 2 has changed 1 of .*: 'backbone\.vit\.cls_token'"):
        run.trainer.fit()
    assert len(run.trainer.records) == 1
