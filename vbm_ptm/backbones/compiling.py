"""Compiled forward passes: of the blocks of a ViT, or of another network as a whole, whatever grows around them.

Heads, prompts and statistics grow with the tasks; blocks do not, so only they are compiled. Parameters are inputs of a
graph: blocks of one kind share it, and their state-dict keys stay the same. There is one graph for every way in which
blocks are used: with gradients or without, frozen or trained, plain or changed; and another one, with dynamic sizes,
once the number of images or tokens changes.
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

# Graphs per function, beyond which torch leaves it uncompiled; its default of 8 is too few for several learners.
_MOST_GRAPHS = 32


def compile_backbones(learner: nn.Module, device_type: str) -> None:
    """Compile all backbones of a learner.

    Raises:
        UsageError: As for ``check_compiler``.
    """
    check_compiler(device_type)
    for module in learner.modules():
        if isinstance(module, Backbone):
            module.compile_parts()


def check_compiler(device_type: str) -> None:
    """Refuse a device for which there is no compiler.

    Args:
        device_type: "cpu", "cuda" or "mps".

    Raises:
        UsageError: One message that names what is missing.
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
            f"trainer.compile is true, but torch lacks what it needs to compile: {problem}. Install it, or set "
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
    """Return whether a change of a block, if there is one, consists of tensors and modules only.

    Functions that are created for every pass, such as those that watch activations, would be compiled each time.
    """
    changes = [each for each in inputs if isinstance(each, BlockChange)]
    functions = [function for change in changes for function in (change.adapter, *change.affines.values())]
    return all(function is None or isinstance(function, nn.Module) for function in functions)


@cache
def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return the compiled form of a function, always the same one."""
    torch._dynamo.config.optimize_ddp = False  # gradients are shared between blocks as it is
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    result: Callable[..., Any] = torch.compile(function, backend=backend)
    return result
