"""The base class of every configuration class; each is defined in the module of the unit that it configures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict


def absolute(path: Path | str) -> Path:
    """Return the path that means the same file from any working directory.

    A ``~`` at its beginning is a home; ``./~x`` is a file of that name.

    Raises:
        ValueError: It is empty, or begins with ``~name`` and there is no such user.
    """
    if not str(path).strip():
        raise ValueError("a path is empty; write '.' for the current directory")
    expanded = os.path.expanduser(path)
    if str(path).startswith("~") and str(expanded) == str(path):
        raise ValueError(
            f"'{path}' begins with the home of an unknown user; write './{path}' for a file of that name"
        )
    return Path(expanded).absolute()


def _absolute_text(value: Any) -> Any:
    return str(absolute(value)) if isinstance(value, str | Path) else value  # text: JSON knows no other


# A stored configuration can be run again from anywhere. Read as text: a Path has lost the "./" of "./~x".
AbsolutePath = Annotated[Path, BeforeValidator(_absolute_text)]


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
