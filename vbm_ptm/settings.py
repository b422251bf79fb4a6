"""The base class of every configuration class; each stands beside the unit that it configures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

# A path that means the same file from any working directory: a stored configuration can be run again anywhere.
AbsolutePath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]


class Settings(BaseModel):
    """A frozen group of settings: unknown keys and non-finite numbers are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)
