"""One linear classifier per task, side by side.

A module per task keeps finished tasks bit-frozen: neither weight decay nor stale momentum moves them.
Shapes: N images, D width, K columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn


class TaskHead(nn.Linear):
    """A linear layer that starts from a truncated normal with std 0.02 and bias 0."""

    def reset_parameters(self) -> None:
        """Draw the weights from the global generator and set the bias to zero."""
        nn.init.trunc_normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class TaskHeads(nn.Module):
    """Heads in task order; a row of logits is the concatenation of theirs.

    Args:
        width: D.
        head_class: Of every head: linear layers or cosines.
    """

    def __init__(self, width: int, *, head_class: Callable[[int, int], TaskHead] = TaskHead) -> None:
        super().__init__()
        self.width = width
        self.head_class = head_class
        self.tasks = nn.ModuleList()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of columns of each head, in task order."""
        return tuple(head.out_features for head in self.tasks if isinstance(head, TaskHead))

    def append(self, num_classes: int) -> None:
        """Add the next task's head, drawn from the global generator; without new classes it has no column."""
        self.tasks.append(self.head_class(self.width, num_classes))

    def train_only(self, classes: Collection[int]) -> None:
        """Make the heads trainable that have a column of the given class indices, and freeze the others."""
        first = 0
        for head, size in zip(self.tasks, self.sizes, strict=True):
            columns = range(first, first + size)
            head.requires_grad_(any(column in classes for column in columns))
            first += size

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the heads that are not frozen."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits (N,K) of all heads for features (N,D); (N,0) while there is no head."""
        if not self.sizes:
            return features.new_zeros(len(features), 0)
        return torch.cat([self.forward_task(index, features) for index in range(len(self.tasks))], dim=1)

    def forward_task(self, index: int, features: Tensor) -> Tensor:
        """Return the logits of one task's head, (N, columns of the task), for features (N,D).

        Autocast is disabled: logits rounded to bf16 are often equal, and the older class would win.
        """
        weight = self.tasks[index].get_parameter("weight")
        with torch.autocast(features.device.type, enabled=False):
            logits: Tensor = self.tasks[index](features.to(weight.dtype))
        return logits

    def joined(self) -> TaskHead:
        """Return a copy of all heads as one, (D) -> (K): the same logits from a single product."""
        head = self.head_class(self.width, sum(self.sizes)).to(next(self.parameters()))
        with torch.no_grad():
            for name, parameter in head.named_parameters():
                parameter.copy_(torch.cat([own.get_parameter(name) for own in self.tasks]))
        return head

    @torch.no_grad()
    def load_joined(self, head: TaskHead) -> None:
        """Give every head its rows of what ``joined`` returned."""
        for name, parameter in head.named_parameters():
            for own, rows in zip(self.tasks, parameter.split(self.sizes), strict=True):
                own.get_parameter(name).copy_(rows)
