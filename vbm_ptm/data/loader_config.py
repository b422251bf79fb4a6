"""Settings of the loaders."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from vbm_ptm.settings import Settings

Context = Literal["fork", "spawn", "forkserver"]


class LoaderConfig(Settings):
    """Settings of the loaders; none of them changes what is loaded.

    Attributes:
        num_workers: Processes that decode and augment images; 0 does it in the main process. Default: none when the
            CPU also trains, else up to 8.
        evaluation_batch_size: Images per batch in evaluation and feature extraction.
        multiprocessing_context: How worker processes start; default: that of the platform.
        worker_timeout_minutes: How long workers may take to load a batch before the run ends.
    """

    num_workers: NonNegativeInt | None = None
    evaluation_batch_size: PositiveInt = 128
    multiprocessing_context: Context | None = None
    worker_timeout_minutes: float = Field(default=10.0, gt=0)

    def for_device(self, device_type: str) -> LoaderConfig:
        """Return settings with a definite number of workers, chosen by the training device ("cpu", "cuda", …)."""
        if self.num_workers is not None:
            return self
        return self.model_copy(
            update={"num_workers": 0 if device_type == "cpu" else min(8, os.cpu_count() or 1)}
        )
