"""Several runs in one process, each with the precision it asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from launching import become_rank
from small_runs import depth_for
from torch import Tensor, nn

from vbm_ptm.cli import main
from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.engine.acceleration import Precision, build_accelerator, wait_for_ranks
from vbm_ptm.errors import UsageError
from vbm_ptm.learners import list_learners, s_iprompt
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
            assert set(afterwards) == {expected}  # features and evaluation
        assert all(tensor.dtype == torch.float32 for tensor in learner.state_dict().values())
        assert all(event["loss"] > 0 for event in run.events("step"))


# One that fits statistics, one that reads queries, one that measures distances; the others are in the full tier.
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("slca", "l2p", "s_iprompt") else pytest.param(name, marks=pytest.mark.slow)
        for name in list_learners()
    ],
)
def test_fit__in_bf16_computes_losses_statistics_and_distances_in_float32(
    new_benchmark: Callable[..., Benchmark],
    new_learner: Callable[..., Learner],
    new_run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    learner = new_learner(name, num_tasks=2, depth=depth_for(name))
    products: dict[tuple[str, int], set[torch.dtype]] = {}
    moment = "before"

    def during(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            nonlocal moment
            moment = what
            return function(*arguments)

        return wrapped

    for what in ("forward", "end_task", "predict"):
        monkeypatch.setattr(learner, what, during(what, getattr(learner, what)))
    learner.backbone.vit.blocks[0].attn.proj.register_forward_hook(
        lambda module, inputs, output: products.setdefault((moment, learner.task.index), set()).add(
            output.dtype
        )
    )
    points: list[torch.dtype] = []
    nearest = s_iprompt.nearest_session

    def seen(query: Tensor, *arguments: Any, **options: Any) -> Tensor:
        points.append(query.dtype)
        return nearest(query, *arguments, **options)

    monkeypatch.setattr(s_iprompt, "nearest_session", seen)
    run = new_run(learner, new_benchmark([5] * 4, num_tasks=2), mixed_precision="bf16", epochs=2, num_views=2)
    losses: list[tuple[torch.dtype, ...]] = []
    objective = run.trainer.recipe.objective

    def measured(output: Any, labels: Tensor, **options: Any) -> Any:
        loss, parts = objective(output, labels, **options)
        given = (output.logits, *output.auxiliary.values(), loss, *parts.values())
        losses.append(tuple(tensor.dtype for tensor in given))
        assert all(bool(tensor.isfinite().all()) for tensor in given)
        return loss, parts

    run.trainer.recipe = replace(run.trainer.recipe, objective=measured)
    run.trainer.fit()
    for task in (0, 1):
        assert products.get(("forward", task), {torch.bfloat16}) == {torch.bfloat16}
        assert products.get(("end_task", task), {torch.bfloat16}) == {torch.bfloat16}
        assert products.get(("predict", task), {torch.bfloat16}) == {
            torch.bfloat16
        }  # none where queries suffice
    assert {dtype for step in losses for dtype in step} <= {torch.float32}
    assert bool(losses) == learner.config.trains(0)
    assert set(points) <= {torch.float32}
    assert bool(points) == (name == "s_iprompt")
    kept = [tensor.dtype for tensor in learner.state_dict().values() if tensor.is_floating_point()]
    assert set(kept) == {torch.float32}


def test_build_accelerator__refuses_fp16_on_a_cpu() -> None:
    with pytest.raises(UsageError, match="'fp16' needs a GPU; on a CPU use 'bf16' or 'no'"):
        build_accelerator(device="cpu", mixed_precision="fp16")
    assert build_accelerator(device="cpu").mixed_precision == "no"  # the refused one is forgotten


def test_build_accelerator__names_a_variable_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "banana")
    with pytest.raises(UsageError, match=r"banana.*ACCELERATE_USE_CPU=banana"):
        build_accelerator()


def test_build_accelerator__refuses_a_device_that_is_not_there() -> None:
    absent = "mps" if torch.cuda.is_available() else "cuda"
    with pytest.raises(UsageError, match=rf"device: {absent} is not available here. Available: auto, cpu"):
        build_accelerator(device=absent)


def test_build_accelerator__steps_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")  # would divide every loss by it
    accelerator = build_accelerator(device="cpu")
    assert accelerator.device.type == "cpu"
    assert accelerator.gradient_accumulation_steps == 1


def test_build_accelerator__names_the_tracker_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="wandb is not installed"):
        build_accelerator(device="cpu", trackers=("wandb",))


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
    ],
)
def test_build_accelerator__refuses_sharding_in_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, means: str, tmp_path: Path
) -> None:
    monkeypatch.setenv(name, "true")
    assert main(["train", "--dataset", "digits", "--learner", "slca", "--output", str(tmp_path / "run")]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith(f"error: {means} is not supported: an 86 M backbone needs no sharding.")
    assert not (tmp_path / "run").exists()


def _meet_nobody(_: int, rank: int, port: int) -> None:
    become_rank(rank, port)
    expected = (
        rf"rank {rank} did not meet all 2 processes of this run at 127.0.0.1:{port} within 0.02 minutes"
    )
    with pytest.raises(UsageError, match=rf"{expected} \(.*\)\. Start the same command on every machine"):
        build_accelerator(device="cpu", rank_timeout=timedelta(seconds=1.2))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_build_accelerator__waits_for_other_ranks_only_so_long(rank: int, free_port: int) -> None:
    torch.multiprocessing.start_processes(_meet_nobody, args=(rank, free_port), nprocs=1, start_method="fork")


def _write_alone(rank: int, port: int) -> None:
    become_rank(rank, port)
    accelerator = build_accelerator(device="cpu", rank_timeout=timedelta(seconds=6))
    assert accelerator.num_processes == 2
    if accelerator.is_main_process:
        time.sleep(9)
    wait_for_ranks(accelerator)
    accelerator.wait_for_everyone()  # what was waited for alone has left the ranks together
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_wait_for_ranks__outlasts_the_limit_of_the_process_group(free_port: int) -> None:
    torch.multiprocessing.start_processes(_write_alone, args=(free_port,), nprocs=2, start_method="fork")
