"""Several runs in one process, each with the precision it asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.engine.acceleration import Precision, build_accelerator
from vbm_ptm.errors import UsageError
from vbm_ptm.learners.base import Learner


def test_build_accelerator__forgets_the_run_before(
    benchmark_of_three: Benchmark, new_learner: Callable[..., Learner], new_run: Callable[..., Any]
) -> None:
    """What is computed inside of forward on every task; features and statistics stay in float32."""
    cases: list[tuple[Precision, torch.dtype]] = [
        ("bf16", torch.bfloat16),
        ("no", torch.float32),
        ("bf16", torch.bfloat16),
    ]
    for number, (precision, expected) in enumerate(cases):
        learner = new_learner("slca", alignment_epochs=1)
        seen: list[tuple[int, bool, torch.dtype]] = []

        def hook(
            module: nn.Module,
            inputs: tuple[Tensor],
            output: Tensor,
            learner: Learner = learner,
            seen: list[tuple[int, bool, torch.dtype]] = seen,
        ) -> None:
            seen.append((learner.task.index, torch.is_grad_enabled(), output.dtype))

        learner.backbone.vit.patch_embed.proj.register_forward_hook(hook)
        run = new_run(
            learner,
            benchmark_of_three,
            mixed_precision=precision,
            epochs=1,
            name=f"run {number}",
            num_views=2,
        )
        run.trainer.fit()
        for task in range(3):
            in_training = {dtype for index, grad, dtype in seen if index == task and grad}
            afterwards = [dtype for index, grad, dtype in seen if index == task and not grad]
            assert in_training == {expected}
            num_feature_batches = 2  # ten images, five in a batch
            assert set(afterwards[:num_feature_batches]) == {torch.float32}
            assert set(afterwards[num_feature_batches:]) == {expected}
        assert all(tensor.dtype == torch.float32 for tensor in learner.state_dict().values())
        assert all(event["loss"] > 0 for event in run.events("step"))


def test_build_accelerator__refuses_fp16_on_a_cpu() -> None:
    with pytest.raises(UsageError, match="'fp16' needs a GPU; on a CPU use 'bf16' or 'no'"):
        build_accelerator(device="cpu", mixed_precision="fp16")
    assert build_accelerator(device="cpu").mixed_precision == "no"  # the refused one is forgotten


def test_build_accelerator__refuses_a_device_that_is_not_there() -> None:
    absent = "mps" if torch.cuda.is_available() else "cuda"
    with pytest.raises(UsageError, match=rf"--device {absent} is not available here. Available: auto, cpu"):
        build_accelerator(device=absent)


def test_build_accelerator__steps_are_ours() -> None:
    accelerator = build_accelerator(device="cpu")
    assert accelerator.device.type == "cpu"
    assert accelerator.gradient_accumulation_steps == 1


def test_build_accelerator__names_the_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="wandb is not installed"):
        build_accelerator(device="cpu", trackers=("wandb",))
