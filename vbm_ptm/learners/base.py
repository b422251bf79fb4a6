"""The interface of all learners: one module that grows with the tasks and knows nothing of views, loaders or ranks.

Shapes: N images, C colour channels, H x W pixels, D backbone width, K columns of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vbm_ptm.backbones import Backbone, PromptableViT
from vbm_ptm.data.scenario import Task
from vbm_ptm.errors import UsageError
from vbm_ptm.learners.config import LearnerConfig as LearnerConfig  # a method's file finds it here
from vbm_ptm.learners.rehearsing import Rehearsing
from vbm_ptm.prompts.queries import QueryRole
from vbm_ptm.replay import ReplayOutput

# How an image is prepared for its features.
ImageTransform = Literal["eval", "flip", "weak"]


class LearnerOutput(NamedTuple):
    """What a training forward returns; a NamedTuple, so that autocast hands it back in fp32.

    Attributes:
        logits: (N, K) scores that the cross-entropy sees; never -inf.
        columns: (K,) int64, the class index of every column; holds every label of the batch. Often
            ``Learner.task_columns``, the classes of the current task.
        auxiliary: Signed and weighted terms by name: (N,) is averaged over the images of the global
            step, () is a term of the parameters alone and counts as it is.
        supervised: Losses that replace the cross-entropy, one for each image of the step, those of its draws
            behind the N current ones; averaged over all of them.
        replays: One for each draw.
    """

    logits: Tensor
    columns: Tensor
    auxiliary: dict[str, Tensor]
    supervised: Tensor | None = None
    replays: tuple[ReplayOutput, ...] = ()


class ParameterGroup(NamedTuple):
    """Trainable parameters that share one factor of the learning rate."""

    name: str
    parameters: list[nn.Parameter]
    learning_rate_scale: float = 1.0


class Features(Protocol):
    """Query features, sums and labels of the current task's training images, computed on demand."""

    def __call__(
        self,
        rows: Sequence[int] | None = None,
        transform: ImageTransform = "eval",
        *,
        draw: int = 0,
        function: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return features (n, D) float32, class indices (n,), sample ids (n,), each row exactly once.

        Args:
            rows: Row numbers of the training split; None for all rows of the task.
            transform: "eval" for the test transform, "flip" for its mirror image, "weak" for the baseline's training
                transform.
            draw: For "weak", which of its draws.
            function: Images (N, C, H, W) -> features (N, D), in place of the learner's query.
        """

    def labels(self) -> tuple[Tensor, Tensor]:
        """Return class indices (n,) and sample ids (n,) of all images of the task; none of them is read."""

    def sum(
        self, function: Callable[[Tensor], Mapping[str, Tensor]], transform: ImageTransform = "eval"
    ) -> dict[str, Tensor]:
        """Return the sums of a function over all images of the task, float64 on the CPU, the same on every rank.

        Args:
            function: Images (N, C, H, W) on the learner's device -> sums over these images by name, of shapes that do
                not depend on N.
            transform: As above.
        """


class TaskStatistics(nn.Module):
    """Tensors that one task leaves behind and that never change afterwards, kept as buffers."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in sorted(tensors.items()):  # as files list them
            self.register_buffer(name, tensor.detach().clone().contiguous())


class Learner(Rehearsing):
    """A continual-learning method on a backbone.

    Life of a task: ``begin_task``, ``prepare_task``, training steps through ``forward``, ``end_task``, ``predict``.
    Restoring calls ``begin_task`` and ``allocate`` for every finished task, then loads the state strictly.
    Whatever ``end_task`` computes once and never changes goes into ``self.statistics[str(task.index)]``: the
    checkpoint writes it once per task, and ``allocate`` makes room for it.

    Args:
        backbone: Of ``backbone_class``; the learner owns and may change it.
        config: The method's settings.
        num_tasks: Tasks planned, for methods that divide a pool among them.
    """

    config_class: ClassVar[type[LearnerConfig]]
    # What the learner needs queries for in training; its ``forward`` then takes ``queries``.
    query_roles: ClassVar[frozenset[QueryRole]] = frozenset()
    # Whether each task has its own expert: the learner then implements ``predict_task``.
    has_task_experts: ClassVar[bool] = False
    # Whether ``predict`` rules seen classes out (-inf): task-incremental accuracy is then that of the task's expert.
    rules_out_classes: ClassVar[bool] = False
    # Whether ``predict`` tells a task's classes apart before ``end_task``; if not, no epoch can be measured.
    predicts_while_training: ClassVar[bool] = True
    # Whether ``predict`` depends on the query alone: with a known query the images may be an empty tensor.
    predicts_from_query: ClassVar[bool] = False
    # Whether the method is defined where tasks share classes: in domains, or with more images of known classes.
    takes_domains: ClassVar[bool] = True
    # What kind of backbone the method needs: a ViT that takes prompts, or just features (``Backbone``). A method
    # for ViTs also narrows the annotation of ``backbone``.
    backbone_class: ClassVar[type[Backbone]] = PromptableViT
    # A short description of what the method trains, to be shown.
    trained_parts: ClassVar[str] = ""
    backbone: Backbone
    task_columns: Tensor

    def __init__(self, backbone: Backbone, config: Any, *, num_tasks: int) -> None:
        super().__init__()
        if not isinstance(backbone, self.backbone_class):
            raise UsageError(
                f"learner '{config.name}' needs a vision transformer that takes prompts, not a "
                f"{type(backbone).__name__}."
            )
        self.backbone = backbone
        self.config = config
        self.num_tasks = num_tasks
        self.tasks: list[Task] = []
        self.statistics = nn.ModuleDict()
        # What the training steps of the task counted on this rank, by name; the result has the sums over ranks.
        self.tallies: dict[str, Tensor] = {}
        # A buffer moves with the learner: made from ``task.classes`` in a step, it would wait for the device.
        self.register_buffer("task_columns", torch.empty(0, dtype=torch.long), persistent=False)
        self.backbone.requires_grad_(False)

    @property
    def task(self) -> Task:
        """The current task."""
        return self.tasks[-1]

    @property
    def num_seen_classes(self) -> int:
        """Classes seen so far, the current task's included."""
        return self.tasks[-1].num_seen_classes if self.tasks else 0

    @property
    def num_known_classes(self) -> int:
        """Classes that were seen before the current task."""
        return self.num_seen_classes - len(self.task.new_classes)

    @property
    def backbone_is_frozen(self) -> bool:
        """Whether no parameter of the backbone is trained; its weights are then not stored."""
        return not any(parameter.requires_grad for parameter in self.backbone.parameters())

    @property
    def query_parts(self) -> tuple[tuple[nn.Module, ...], ...]:
        """The modules that compute each part of a query; without an override beside ``query``, queries are not cached.

        A query that grows with the tasks has a part per task, so that known parts can be cached.
        """
        return ((self.backbone,),)

    def query_part(self, images: Tensor, number: int) -> Tensor:
        """Return one of the ``query_parts`` (N, D of the part) of a query; concatenated, they are the query."""
        return self.query(images)

    def train(self, mode: bool = True) -> Learner:
        """Set training mode, but keep a frozen backbone in eval mode."""
        super().train(mode)
        if self.backbone_is_frozen:
            self.backbone.eval()
        return self

    def begin_task(self, task: Task) -> None:
        """Grow for the task and set ``requires_grad`` of every parameter; overrides call this first."""
        if task.index != len(self.tasks):
            raise ValueError(f"task {task.index} cannot begin after {len(self.tasks)} tasks")
        self.check_task(task)
        self.tasks.append(task)
        self.tallies = {}
        self.task_columns = self.columns(task.classes, self.task_columns.device)

    def prepare_task(self, task: Task, features: Features) -> None:
        """Do what the method does with the task's images before training; on every rank with identical inputs.

        What it changes must be in the state dict: a run that resumes within the task does not prepare it again.
        """

    def begin_epoch(self, epoch: int) -> None:
        """Do what the method does at the beginning of an epoch of the task, counted from 0, before its first step."""

    def after_step(self) -> None:
        """Do what the method does to its parameters after every step of the optimizer, e.g. keep them in bounds."""

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return all trainable parameters, each in exactly one group; empty for a learner without any.

        By default, each of its modules is a group, in the order in which they were created.
        """
        trained = {
            name: [parameter for parameter in part.parameters() if parameter.requires_grad]
            for name, part in self.named_children()
        }
        return [ParameterGroup(name, parameters) for name, parameters in trained.items() if parameters]

    def forward(self, images: Tensor, labels: Tensor) -> LearnerOutput:
        """Return what the objective needs for a training step.

        A learner whose ``rehearsal`` is a stream takes a third argument, ``replays``: the step's draws, a tuple of
        ``Replay`` that is empty as long as the buffer is; except where draws have their own pass.

        Args:
            images: (N, C, H, W) float, any mixture of views; N may be 0.
            labels: (N,) int64 class indices.

        A learner with ``query_roles`` also takes ``queries: Queries | None = None``, in place of each image's own.
        """
        raise NotImplementedError

    def query(self, images: Tensor) -> Tensor:
        """Return the features (N, D) of the backbone alone, without prompts, without gradient and in eval mode."""
        return self.backbone.query(images)

    def predict(self, images: Tensor, query: Tensor | None = None) -> Tensor:
        """Return scores over all seen classes (N, seen); each row depends on its own image alone.

        Unless overridden, it applies the learner's ``head`` to the query.

        Args:
            images: (N, C, H, W) float.
            query: (N, D) result of ``query(images)`` if it is known already.
        """
        scores: Tensor = self.get_submodule("head")(self.query(images) if query is None else query)
        return scores[:, : self.num_seen_classes]

    def predict_task(self, images: Tensor, task: Task) -> Tensor:
        """Return scores (N, classes of the task) of the task's own expert; where ``has_task_experts``.

        Args:
            images: (N, C, H, W) float.
            task: A task that has begun; columns are in the order of its ``classes``.
        """
        raise NotImplementedError

    def chosen_tasks(self, query: Tensor) -> Tensor | None:
        """Return the task (N,) whose expert alone gives an image its scores in ``predict``; None if no single one does.

        Where that is the image's own task, ``predict_task`` would compute the same once more, and may not be asked. A
        class that overrides ``predict`` without this method has no single choice.

        Args:
            query: (N, D) result of ``query(images)``.
        """
        return None

    def end_task(self, task: Task, features: Features) -> None:
        """Do what the method does after training on a task; runs on every rank with identical inputs."""

    def allocate(self, task: Task, shapes: Mapping[str, Sequence[int]]) -> None:
        """Make room for what ``end_task`` made for this task, so that a strict load fits.

        Args:
            task: A finished task; ``begin_task`` has been called for it.
            shapes: Name and shape of each tensor in ``self.statistics[str(task.index)]``.
        """
        if shapes:
            empty = {name: torch.zeros(tuple(shape)) for name, shape in shapes.items()}
            self.statistics[str(task.index)] = TaskStatistics(empty)

    def statistics_of(self, task: Task) -> dict[str, Tensor]:
        """Return the statistics of a task by name; empty before its end."""
        key = str(task.index)
        return dict(self.statistics[key].named_buffers()) if key in self.statistics else {}

    def report(self, task: Task) -> dict[str, Any]:
        """Return what the result of the run should report on a finished task, as JSON values."""
        return {}

    def statistics_size(self, class_sizes: Sequence[int]) -> int:
        """Return the numbers that ``end_task`` will keep for classes with these numbers of training images."""
        return 0

    def check_task(self, task: Task) -> None:
        """Refuse a task that holds classes of earlier ones, or may do so, if the method is not defined for that."""
        if not self.takes_domains and (task.domain is not None or task.classes != task.new_classes):
            raise UsageError(
                f"learner '{self.config.name}' is not defined where a class comes back (scenario.kind "
                "domain_incremental, scenario.allow_known_classes): take tasks of new classes, or another learner."
            )

    def check_room(self, num_tasks: int) -> None:
        """Refuse this many tasks if the method has no room for them; a run may be extended beyond its plan."""

    def columns(self, classes: Sequence[int], device: torch.device) -> Tensor:
        """Return class indices as a (K,) tensor; in a training step take ``task_columns``."""
        return torch.tensor(classes, dtype=torch.long, device=device)
