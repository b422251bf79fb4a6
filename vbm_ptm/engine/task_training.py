"""The training steps of one task, from a position that can be told and taken up again.

Shapes: G groups of this rank, V views, N = G * V images.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vbm_ptm.data.loaders import Loaders
from vbm_ptm.data.scenario import Task
from vbm_ptm.data.view_batch import ViewBatch, ViewBatchConfig, chunk
from vbm_ptm.engine.contract import check_output, check_terms
from vbm_ptm.engine.memory import forget_peak_memory, peak_memory
from vbm_ptm.engine.objective import PartSize
from vbm_ptm.engine.optimization import (
    build_optimizer,
    learning_rate_factor,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)
from vbm_ptm.engine.passes import take_passes
from vbm_ptm.engine.readings import Readings
from vbm_ptm.engine.recipe import Recipe
from vbm_ptm.engine.replay_planner import ReplayPlanner, StepPlan, rows_to_train
from vbm_ptm.engine.view_queries import view_queries
from vbm_ptm.engine.visits import VisitLog
from vbm_ptm.learners.base import Learner, LearnerOutput, Replay
from vbm_ptm.randomness import seed_for, seed_step, seeded

Integers = npt.NDArray[np.int64]


class TaskTraining:
    """Trains a learner on one task; ``steps`` goes on from the position, wherever it is.

    Args:
        learner: Has begun the task, and is on its device.
        task: What to train on.
        recipe: The loss, and how the task is trained.
        loaders: Bring the training images.
        accelerator: Devices, ranks and precision.
        readings: Receives the loss parts of every step.
        planner: Decides the draws of past samples; None for a learner without a stream.

    Attributes:
        epoch: Epoch of the next step, from 0.
        step: Next step in the epoch, from 0.
        visits: When each sample of the task was trained on.
        num_steps: Steps done.
        num_images: Images that they had, over all ranks.
        data_seconds: How long this rank has waited for them.
        step_seconds: How long its steps have taken, this included.
    """

    def __init__(
        self,
        learner: Learner,
        task: Task,
        *,
        recipe: Recipe,
        loaders: Loaders,
        accelerator: Accelerator,
        readings: Readings,
        planner: ReplayPlanner | None = None,
    ) -> None:
        self.learner = learner
        self.task = task
        self.recipe = recipe
        self.loaders = loaders
        self.accelerator = accelerator
        self.readings = readings
        self.planner = planner
        benchmark = loaders.benchmark
        classes = benchmark.class_indices(benchmark.datasets.train)
        self.rows = rows_to_train(learner, benchmark.training_rows(task), classes)
        self.groups = learner.parameter_groups()
        self.sampler = recipe.sampler(classes[self.rows], task_index=task.index)
        self.num_planned_steps = recipe.workload(self.sampler).num_steps if self.groups else 0
        self.epoch = self.step = self.num_steps = self.num_images = 0
        self.data_seconds = self.step_seconds = 0.0
        self.visits = VisitLog(len(self.rows))
        self._optimizer: torch.optim.Optimizer | None = None
        self._restored: Mapping[str, Tensor] = {}
        self._weak_logits: list[Tensor] = []

    @property
    def num_views(self) -> int:
        """V, fewer than asked for where the task has fewer samples."""
        return self.sampler.num_views

    @property
    def is_complete(self) -> bool:
        """Whether no step is left."""
        return self.num_steps == self.num_planned_steps

    def steps(self) -> Iterator[int]:
        """Train to the end of the task; yield the epoch of each step after it, where a run may be stopped."""
        if self.is_complete:
            return
        loader = self.loaders.training(
            self.task, self.sampler, rows=self.rows, strong_share=self.recipe.view_batch.strong_share
        )
        self.learner.train()
        forget_peak_memory(self.accelerator.device)
        self._optimizer = build_optimizer(self.recipe.optimization, self.groups)
        load_optimizer_tensors(self._optimizer, self.learner, self._restored)
        # A fresh wrapper per task: growing a module that is wrapped already would leave ranks unequal.
        with warnings.catch_warnings():
            # Accelerate knows no other word for it yet.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            forward = _TrainingForward(self.learner, self.recipe.view_batch, num_views=self.num_views)
            model, optimizer = self.accelerator.prepare(forward, self._optimizer)
        while not self.is_complete:
            epoch = self.epoch
            if not self.step:
                with seeded(
                    seed_for("begin_epoch", seed=self.recipe.seed, task=self.task.index, epoch=epoch)
                ):
                    self.learner.begin_epoch(epoch)
            self.sampler.set_epoch(epoch)
            steps = self.sampler.steps()[self.step :]
            plans = self._plan(steps[: self.num_planned_steps - self.num_steps])
            loader.set_epoch(epoch, start_step=self.step, replays=[plan.draws for plan in plans])
            set_learning_rate(
                optimizer, self.recipe.optimization, epoch, cycle_length=self.sampler.cycle_length
            )
            began = time.monotonic()
            for number, (positions, batch) in enumerate(zip(steps, loader, strict=True)):
                self.data_seconds += loader.waited_seconds
                self._take_step(model, optimizer, positions, batch, data_seconds=loader.waited_seconds)
                if plans:
                    self._remember(plans[number], num_groups=len(positions))
                self._advance(positions)
                self.step_seconds += time.monotonic() - began
                yield epoch
                began = time.monotonic()
                if self.is_complete:
                    break
        self.accelerator.free_memory()

    def state(self) -> dict[str, Any]:
        """Return the position as JSON values; all ranks must ask for it together."""
        self.readings.catch_up()
        return {
            "epoch": self.epoch,
            "step": self.step,
            "num_steps": self.num_steps,
            "data_seconds": self.data_seconds,
            "step_seconds": self.step_seconds,
            "readings": self.readings.state(),
            "tallies": self.tallies(),
        }

    def costs(self) -> dict[str, Any]:
        """Return what the steps have taken, by the names of ``TaskTimings``."""
        return {
            "data_seconds": round(self.data_seconds, 3),
            "step_seconds": round(self.step_seconds, 3),
            "peak_memory_bytes": peak_memory(self.accelerator.device),
        }

    def tallies(self) -> dict[str, list[int]]:
        """Return what the learner has counted in the steps so far, over all ranks, which must ask for it together."""
        return {
            name: self.accelerator.reduce(counts, reduction="sum").tolist()
            for name, counts in self.learner.tallies.items()
        }

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return what the optimizer keeps, as long as there are steps to take."""
        if self._optimizer is None or self.is_complete:
            return {}
        return optimizer_tensors(self._optimizer, self.learner)

    def load_state(self, state: Mapping[str, Any], optimizer: Mapping[str, Tensor]) -> None:
        """Go on where ``state`` and ``optimizer_tensors`` were taken; what has been counted is counted again."""
        for epoch in range(state["epoch"] + 1):
            self.epoch = epoch
            self.sampler.set_epoch(epoch)
            is_over = epoch < state["epoch"]
            steps = self.sampler.steps()[: None if is_over else state["step"]]
            self._plan(steps)
            for positions in steps:
                self._count(positions, epoch)
        self.epoch, self.step = state["epoch"], state["step"]
        assert self.num_steps == state["num_steps"]
        self.data_seconds = state.get("data_seconds", 0.0)
        self.step_seconds = state.get("step_seconds", 0.0)
        self.readings.load_state(state["readings"])
        for name, counts in state.get(
            "tallies", {}
        ).items():  # a sum over ranks, of which the main one takes charge
            own = torch.tensor(counts, device=self.accelerator.device)
            self.learner.tallies[name] = own if self.accelerator.is_main_process else torch.zeros_like(own)
        self._restored = optimizer

    def _plan(self, steps: Sequence[Sequence[int]]) -> list[StepPlan]:
        """Decide the draws of the steps that follow; nothing where the learner has no stream."""
        if self.planner is None:
            return []
        rows = [self.rows[list(positions)].tolist() for positions in steps]
        return self.planner.plan(rows, task=self.task.index, epoch=self.epoch, first_step=self.num_steps)

    def _remember(self, plan: StepPlan, *, num_groups: int) -> None:
        """Hand the learner the weak views' logits of what has entered the buffer; all ranks get all of them."""
        if not (plan.admissions and self._weak_logits):
            return
        logits = torch.cat(self._weak_logits)
        num_ranks = self.accelerator.num_processes
        first, last = chunk(num_groups, self.accelerator.process_index, num_ranks)
        admitted = logits.new_zeros(len(plan.admissions), logits.shape[1])
        for number, (position, _) in enumerate(plan.admissions):
            if first <= position < last:
                admitted[number] = logits[position - first]
        if num_ranks > 1:
            admitted = self.accelerator.reduce(admitted, reduction="sum")
        slots = torch.tensor([slot for _, slot in plan.admissions]).to(logits.device, non_blocking=True)
        self.learner.remember(slots, admitted)

    def _take_step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        positions: list[int],
        batch: ViewBatch,
        *,
        data_seconds: float,
    ) -> None:
        """Forward and backward over the micro-batches, one step of the optimizer."""
        rank = self.accelerator.process_index
        seed_step(
            seed_for(
                "step",
                seed=self.recipe.seed,
                task=self.task.index,
                epoch=self.epoch,
                sample=self.step,
                rank=rank,
            )
        )
        self._weak_logits.clear()
        parts = take_passes(
            self.learner,
            batch,
            gradient=lambda part: self._accumulate_gradients(model, part),
            update=lambda: self._update(optimizer),
            parameters=[parameter for group in self.groups for parameter in group.parameters],
        )
        parts["gradient_norm"] = self._update(optimizer)
        self.readings.add(
            parts,
            sample_ids=self.rows[positions],
            is_skipped=self.accelerator.optimizer_step_was_skipped,
            epoch=self.epoch,
            step=self.step,
            images=len(positions) * self.num_views,
            groups=len(positions),
            views=self.num_views,
            data_seconds=round(data_seconds, 6),
            learning_rates={group["name"]: group["lr"] for group in optimizer.param_groups},
        )

    def _update(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Apply the gradient, clipped, and forget it; return its norm before."""
        norm = self._gradient_norm()
        optimizer.step()
        self.learner.after_step()
        optimizer.zero_grad()
        return norm

    def _accumulate_gradients(self, model: nn.Module, batch: ViewBatch) -> dict[str, Tensor]:
        """Leave the gradient of a whole pass with the parameters; return the loss parts, those of the whole pass."""
        micro_batches = cut_into_micro_batches(batch, self.recipe.optimization.gradient_accumulation_steps)
        normalize = self.loaders.benchmark.transforms.normalization
        totals: dict[str, Tensor] = {}
        for number, micro_batch in enumerate(micro_batches, start=1):
            here = micro_batch.to(self.accelerator.device, non_blocking=True)
            # Ranks share their gradients once a step.
            is_last = number == len(micro_batches)
            with nullcontext() if is_last else self.accelerator.no_sync(model):
                images, labels, *slots = flattened(here, normalize)
                replays = tuple(Replay(*flattened(draw, normalize)) for draw in here.replays)
                output = model(images, labels, replays, *slots)
                if self.num_steps or number > 1 or slots:
                    check_terms(
                        [*output.auxiliary, *(name for draw in output.replays for name in draw.terms)]
                    )
                else:
                    self._check_first(output, num_images=len(images))
                loss, parts = self.recipe.objective(
                    output,
                    here.labels,
                    num_views=here.num_views,
                    epoch=self.epoch,
                    num_global_groups=here.num_global_groups,
                    num_ranks=self.accelerator.num_processes,
                    num_micro_batches=len(micro_batches),
                    replays=[PartSize(draw.num_views, draw.num_global_groups) for draw in here.replays],
                )
                self.accelerator.backward(loss)
            if self.learner.rehearsal and self.learner.rehearsal.remembers_logits:
                self._weak_logits.append(output.logits.detach()[:: self.num_views])
            totals = {name: totals[name] + value for name, value in parts.items()} if totals else parts
        return totals

    def _check_first(self, output: LearnerOutput, *, num_images: int) -> None:
        check_output(
            output,
            num_images=num_images,
            task=self.task,
            class_names=self.loaders.benchmark.scenario.class_names,
            accelerator=self.accelerator,
        )

    def _gradient_norm(self) -> Tensor:
        """Return the norm of the gradient before it is clipped, and clip it."""
        trained = [parameter for group in self.groups for parameter in group.parameters]
        self.accelerator.unscale_gradients()
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in trained if parameter.grad is not None]
        )
        if self.recipe.optimization.clip_gradient_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(trained, self.recipe.optimization.clip_gradient_norm, norm)
        return norm

    def _advance(self, positions: list[int]) -> None:
        """Count a step that has been taken."""
        self._count(positions, self.epoch)
        self.step += 1
        if self.step == len(self.sampler):
            self.epoch, self.step = self.epoch + 1, 0

    def visited_in(self, epoch: int) -> list[int]:
        """Return the positions of the samples that an epoch visits."""
        self.sampler.set_epoch(epoch)
        return sorted({position for positions in self.sampler.steps() for position in positions})

    def _count(self, positions: list[int], epoch: int) -> None:
        optimization = self.recipe.optimization
        factor = learning_rate_factor(optimization, epoch, cycle_length=self.sampler.cycle_length)
        self.visits.add(positions, num_images=self.num_images, rate=optimization.learning_rate * factor)
        self.num_steps += 1
        self.num_images += len(positions) * self.num_views


def cut_into_micro_batches(batch: ViewBatch, count: int) -> list[ViewBatch]:
    """Return micro-batches of whole groups whose sizes differ by at most one; some may be empty."""

    def part_of(whole: ViewBatch, number: int) -> ViewBatch:
        return whole.groups(slice(*chunk(whole.num_groups, number, count)))

    return [
        replace(part_of(batch, number), replays=tuple(part_of(draw, number) for draw in batch.replays))
        for number in range(count)
    ]


def flattened(batch: ViewBatch, normalize: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """Return normalised images (N,C,H,W), labels (N,) and, of a draw, slots (N,), the views of a group side by side."""
    columns = (batch.labels,) if batch.slots is None else (batch.labels, batch.slots)
    images = normalize(batch.images.flatten(0, 1))
    return images, *(column.repeat_interleave(batch.num_views) for column in columns)


class _TrainingForward(nn.Module):
    """All that DDP and autocast wrap; the learner itself stays as it is."""

    def __init__(self, learner: Learner, view_batch: ViewBatchConfig, *, num_views: int) -> None:
        super().__init__()
        self.learner = learner
        self.view_batch = view_batch
        self.num_views = num_views

    def forward(
        self, images: Tensor, labels: Tensor, replays: tuple[Replay, ...], slots: Tensor | None = None
    ) -> LearnerOutput:
        if slots is not None:  # a draw that has a pass of its own
            return self.learner.rehearse(Replay(images, labels, slots))
        rehearsal = self.learner.rehearsal
        more: tuple[Any, ...] = ()
        if rehearsal is not None and rehearsal.mode == "stream" and rehearsal.passes == "one":
            more = (replays,)
        elif queries := view_queries(self.learner, images, num_views=self.num_views, config=self.view_batch):
            more = (queries,)
        output: LearnerOutput = self.learner(images, labels, *more)
        return output
