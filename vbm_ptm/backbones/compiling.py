"""Compiled forward passes: the blocks of a ViT, another network as a whole, whatever grows around them.

Heads, prompts and statistics grow with the tasks; blocks stay as they are, so that they alone are compiled. Parameters
are inputs of a graph: blocks of one kind share it, and their state-dict keys stay. A graph is made for every way in
which blocks are used: with gradients or without, frozen or trained, plain or changed; and once more, with open sizes,
for another number of images or tokens.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

from vbm_ptm.backbones.blocks import BlockChange
from vbm_ptm.backbones.support import Backbone
from vbm_ptm.errors import UsageError, first_line

# Graphs of one function, beyond which torch leaves it uncompiled; its own 8 is too few for several learners.
_MOST_GRAPHS = 32


def compile_backbones(learner: nn.Module, device_type: str) -> None:
    """Compile all backbones of a learner.

    Raises:
        UsageError: As ``check_compiler``.
    """
    check_compiler(device_type)
    for module in learner.modules():
        if isinstance(module, Backbone):
            module.compile_parts()


def check_compiler(device_type: str) -> None:
    """Refuse a device for which no compiler is found.

    Args:
        device_type: "cpu", "cuda" or "mps".

    Raises:
        UsageError: One message with what is missing.
    """
    if device_type == "cuda":
        missing = [] if importlib.util.find_spec("triton") else ["triton"]
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            missing.append("a C compiler (cc, gcc or clang)")
        problem = " and ".join(missing)
    else:
        problem = _cpp_problem()
    if problem:
        raise UsageError(
            f"trainer.compile is true, but what torch compiles with is not there: {problem}. Install it, or set "
            "trainer.compile=false."
        )


def _cpp_problem() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError, RuntimeError) as error:
        return f"a C++ compiler ({first_line(error)})"
    return ""


def is_compilable(inputs: tuple[Any, ...]) -> bool:
    """Return whether a change of a block, if there is one, is made of tensors and modules alone.

    Functions that are made anew for every pass, as those that watch activations, would be compiled anew as well.
    """
    changes = [each for each in inputs if isinstance(each, BlockChange)]
    functions = [function for change in changes for function in (change.adapter, *change.affines.values())]
    return all(function is None or isinstance(function, nn.Module) for function in functions)


@cache
def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return the compiled form of a function, the same one every time."""
    torch._dynamo.config.optimize_ddp = False  # gradients are shared between blocks as it is
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    result: Callable[..., Any] = torch.compile(function, backend=backend)
    return result
