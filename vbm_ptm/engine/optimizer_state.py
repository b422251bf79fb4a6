"""The state of an optimizer, by names that a fresh optimizer of the same learner understands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the averages that an optimizer keeps, as "average/parameter" -> tensor."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{average}/{names[parameter]}": value
        for parameter, averages in optimizer.state.items()
        for average, value in averages.items()
        if value is not None
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]
) -> None:
    """Give a fresh optimizer the averages that ``optimizer_tensors`` returned."""
    parameters = dict(model.named_parameters())
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {parameter: number for number, parameter in enumerate(ordered)}
    averages: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        average, _, parameter = name.partition("/")
        averages.setdefault(numbers[parameters[parameter]], {})[average] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": averages})


def start_momentum(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give parameters their momentum before a step: the fused kernel takes a whole group with it, or without.

    The plain form starts with the first gradient of each parameter, which is what zeros lead to.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
