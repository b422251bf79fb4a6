"""What prompts are chosen by in training, where it is not each image's own query.

Shapes: N images, D backbone width.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

# What a query serves for in training: choosing or mixing prompts, and drawing keys near.
QueryRole = Literal["query", "pull"]


class Queries(NamedTuple):
    """Query features (N, D) for a training forward, where they are not to be each image's own.

    Attributes:
        query: What prompts are chosen, or mixed, by.
        pull: What keys are pulled towards.
    """

    query: Tensor
    pull: Tensor
