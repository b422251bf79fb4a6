"""The base class of every configuration class; each stands beside the unit that it configures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict


def absolute(path: Path) -> Path:
    """Return the path that means the same file from any working directory.

    Raises:
        ValueError: It begins with ``~name``, and there is no such user.
    """
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise ValueError(f"'{path}' begins with the home of a user who is not known here") from None


# A stored configuration can be run again from anywhere.
AbsolutePath = Annotated[Path, AfterValidator(absolute)]


class Settings(BaseModel):
    """A frozen group of settings: unknown keys and non-finite numbers are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    def idle(self) -> dict[str, str]:
        """Return the settings that have no effect beside the others, and what would give them one."""
        return {}


# What the forward pass computes in; "no" is full precision.
Precision = Literal["no", "bf16", "fp16"]

# What a setting may say of it; "auto" is what the device computes fastest in.
PrecisionSetting = Literal["auto", "no", "bf16", "fp16"]
