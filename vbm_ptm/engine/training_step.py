"""One training step on one rank: forward and backward over its part of the batch, and a step of the optimizer.

Shapes: G groups of this rank, V views, N = G * V images.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vbm_ptm.data.benchmark import Benchmark
from vbm_ptm.data.scenario import Task
from vbm_ptm.data.view_batch_config import ViewBatchConfig
from vbm_ptm.data.views import ViewBatch
from vbm_ptm.engine.contract import check_output, check_terms
from vbm_ptm.engine.objective import PartSize
from vbm_ptm.engine.optimization import build_optimizer
from vbm_ptm.engine.optimizer_state import load_optimizer_tensors, optimizer_tensors
from vbm_ptm.engine.passes import take_passes
from vbm_ptm.engine.recipe import Recipe
from vbm_ptm.engine.schedule import set_learning_rate
from vbm_ptm.engine.view_queries import view_queries
from vbm_ptm.learners.base import Learner, LearnerOutput
from vbm_ptm.randomness import seed_for, seed_step
from vbm_ptm.replay import Replay


class TrainingStep:
    """Takes the steps of one task.

    Args:
        learner: Has begun the task, and is on its device.
        task: The task.
        recipe: The loss, and how the task is trained.
        benchmark: Normalisation of views, and class names.
        accelerator: Devices, ranks and precision.
        num_views: V.
        restored: What ``optimizer_tensors`` returned, if training is resumed.

    Attributes:
        weak_logits: Of the step that was taken last, if the learner remembers logits: (G, K) in one part for each
            micro-batch.
    """

    def __init__(
        self,
        learner: Learner,
        task: Task,
        *,
        recipe: Recipe,
        benchmark: Benchmark,
        accelerator: Accelerator,
        num_views: int,
        restored: Mapping[str, Tensor],
    ) -> None:
        self._learner = learner
        self._task = task
        self._recipe = recipe
        self._benchmark = benchmark
        self._accelerator = accelerator
        self._num_views = num_views
        self.weak_logits: list[Tensor] = []
        groups = learner.parameter_groups()
        self._trained = [parameter for group in groups for parameter in group.parameters]
        self._plain_optimizer = build_optimizer(recipe.optimization, groups)
        load_optimizer_tensors(self._plain_optimizer, learner, restored)
        # A fresh wrapper per task: growing a module that is wrapped already would leave ranks unequal.
        with warnings.catch_warnings():
            # Accelerate has no replacement for it yet.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            forward = _TrainingForward(learner, recipe.view_batch, num_views=num_views)
            self._model, self._optimizer = accelerator.prepare(forward, self._plain_optimizer)

    @property
    def learning_rates(self) -> dict[str, float]:
        """Rates by parameter group."""
        return {group["name"]: group["lr"] for group in self._optimizer.param_groups}

    def set_epoch(self, epoch: int, *, cycle_length: int) -> None:
        """Set the learning rates of an epoch; arguments as of ``learning_rate_factor``."""
        set_learning_rate(self._optimizer, self._recipe.optimization, epoch, cycle_length=cycle_length)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return what the optimizer keeps, by name."""
        return optimizer_tensors(self._plain_optimizer, self._learner)

    def __call__(self, batch: ViewBatch, *, epoch: int, step: int, is_first: bool) -> dict[str, Tensor]:
        """Train on this rank's part of a step; return the parts of its loss, and the norm of the gradient.

        Args:
            batch: On the CPU.
            epoch: Epoch of the task, from 0.
            step: Step in the epoch, from 0.
            is_first: Whether it is the first step of the task, whose outputs are checked more closely.
        """
        rank = self._accelerator.process_index
        seed_step(
            seed_for(
                "step", seed=self._recipe.seed, task=self._task.index, epoch=epoch, sample=step, rank=rank
            )
        )
        self.weak_logits.clear()
        parts = take_passes(
            self._learner,
            batch,
            gradient=lambda part: self._accumulate_gradients(part, epoch=epoch, is_first=is_first),
            update=self._update,
            parameters=self._trained,
        )
        parts["gradient_norm"] = self._update()
        return parts

    def _update(self) -> Tensor:
        """Clip, apply and clear the gradient; return its norm before clipping."""
        norm = self._clip_gradient()
        self._optimizer.step()
        self._learner.after_step()
        self._optimizer.zero_grad()
        return norm

    def _accumulate_gradients(self, batch: ViewBatch, *, epoch: int, is_first: bool) -> dict[str, Tensor]:
        """Leave the gradient of a whole pass with the parameters; return the loss parts, those of the whole pass."""
        micro_batches = batch.micro_batches(self._recipe.optimization.gradient_accumulation_steps)
        transforms = self._benchmark.transforms
        totals: dict[str, Tensor] = {}
        for number, micro_batch in enumerate(micro_batches, start=1):
            here = micro_batch.to(self._accelerator.device, non_blocking=True)
            # Ranks share their gradients once a step.
            is_last = number == len(micro_batches)
            with nullcontext() if is_last else self._accelerator.no_sync(self._model):
                images, labels, *slots = here.flattened(transforms)
                replays = tuple(Replay(*draw.flattened(transforms)) for draw in here.replays)
                output = self._model(images, labels, replays, *slots)
                self._check(output, num_images=len(images), is_first=is_first and number == 1 and not slots)
                loss, parts = self._recipe.objective(
                    output,
                    here.labels,
                    num_views=here.num_views,
                    epoch=epoch,
                    num_global_groups=here.num_global_groups,
                    num_ranks=self._accelerator.num_processes,
                    num_micro_batches=len(micro_batches),
                    exemplars=here.exemplars and (here.exemplars.labels, PartSize.of(here.exemplars)),
                    replays=[PartSize.of(draw) for draw in here.replays],
                )
                self._accelerator.backward(loss)
            if self._learner.rehearsal and self._learner.rehearsal.remembers_logits:
                self.weak_logits.append(output.logits.detach()[:: self._num_views])
            for name, value in parts.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def _check(self, output: LearnerOutput, *, num_images: int, is_first: bool) -> None:
        """Refuse what breaks the contract: everything in the first step, later only the names of terms."""
        if is_first:
            check_output(
                output,
                num_images=num_images,
                task=self._task,
                class_names=self._benchmark.scenario.class_names,
                accelerator=self._accelerator,
            )
        else:
            check_terms([*output.auxiliary, *(name for draw in output.replays for name in draw.terms)])

    def _clip_gradient(self) -> Tensor:
        """Return the norm of the gradient before it is clipped, and clip it."""
        self._accelerator.unscale_gradients()
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad for parameter in self._trained if parameter.grad is not None]
        )
        largest = self._recipe.optimization.clip_gradient_norm
        if largest is not None:
            torch.nn.utils.clip_grads_with_norm_(self._trained, largest, norm)
        return norm


class _TrainingForward(nn.Module):
    """The module that DDP and autocast wrap; the learner itself stays unwrapped."""

    def __init__(self, learner: Learner, view_batch: ViewBatchConfig, *, num_views: int) -> None:
        super().__init__()
        self.learner = learner
        self.view_batch = view_batch
        self.num_views = num_views

    def forward(
        self, images: Tensor, labels: Tensor, replays: tuple[Replay, ...], slots: Tensor | None = None
    ) -> LearnerOutput:
        if slots is not None:  # a draw with its own pass
            return self.learner.rehearse(Replay(images, labels, slots))
        rehearsal = self.learner.rehearsal
        more: tuple[Any, ...] = ()
        if rehearsal is not None and rehearsal.mode == "stream" and rehearsal.passes == "one":
            more = (replays,)
        elif queries := view_queries(self.learner, images, num_views=self.num_views, config=self.view_batch):
            more = (queries,)
        output: LearnerOutput = self.learner(images, labels, *more)
        return output
