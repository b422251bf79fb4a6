"""Seeds by purpose, and a context that borrows the global generators and gives them back unchanged."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def seed_for(
    purpose: str,
    *,
    seed: int,
    task: int = 0,
    epoch: int = 0,
    sample: int = 0,
    view: int = 0,
    rank: int = 0,
) -> int:
    """Return a 63-bit seed that depends on every argument and on nothing else.

    The same arguments give the same seed in any process, on any platform and in any Python version.
    """
    fields = f"{purpose}|{seed}|{task}|{epoch}|{sample}|{view}"
    if rank:  # what rank 0 draws is what a single process draws
        fields += f"|{rank}"
    return int.from_bytes(hashlib.blake2b(fields.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generators of torch, NumPy and ``random`` inside the block; restore them after it.

    ``torch.default_generator`` is used directly: ``torch.manual_seed`` also seeds every accelerator
    and costs as much as one AutoAugment draw.
    """
    torch_state = torch.default_generator.get_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    try:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def seed_step(seed: int) -> None:
    """Seed all global generators, an accelerator's included, as the engine does before every training step."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # it would write down the call stack for each kind of accelerator that is not there
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
