"""Which precision a device computes fastest in."""

from __future__ import annotations

import os
from typing import Any

import torch

from vbm_ptm.settings import Precision, PrecisionSetting

# The names of bf16 units in torch's report on a CPU; without them bf16 is several times slower than fp32.
_BF16_UNITS = ("amx_bf16", "avx512_bf16")


def resolve_precision(setting: PrecisionSetting, device_type: str) -> Precision:
    """Return the precision that a setting means on a device: "auto" becomes bf16 where the device multiplies it faster.

    Args:
        setting: As ``trainer.mixed_precision``.
        device_type: "cpu", "cuda" or "mps".
    """
    if setting != "auto":
        return setting
    return "bf16" if has_fast_bf16(device_type) else "no"


def has_fast_bf16(device_type: str) -> bool:
    """Return whether a device has units that multiply bf16 faster than fp32."""
    if device_type == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return device_type == "cpu" and cpu_has_bf16_units()


def cpu_has_bf16_units() -> bool:
    """Return whether the CPU has AMX-BF16 or AVX512-BF16; ARM's units for bf16 have not been measured."""
    cpu: Any = torch.cpu
    if hasattr(cpu, "get_capabilities"):
        capabilities = cpu.get_capabilities()
        return any(capabilities.get(unit, False) for unit in _BF16_UNITS)
    # Older releases of torch, the oldest supported one among them, have only these questions.
    return bool(cpu._is_amx_tile_supported() or cpu._is_avx512_bf16_supported())


def chosen_device_type(device: str) -> str:
    """Return the type of the device that Accelerate chooses for a ``device`` setting, "auto" included."""
    if device != "auto":
        return device
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes"):
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
