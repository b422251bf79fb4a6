"""Where the images and weights of runs are: whether they exist, and whether they are those of a result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from vbm_ptm.backbones.weights_file import file_sha256
from vbm_ptm.config.run_config import RunConfig
from vbm_ptm.config.tree import Tree
from vbm_ptm.data.reading.datasets import DatasetSpec, load_image_dataset, split_lists_of
from vbm_ptm.errors import UsageError
from vbm_ptm.storage.run_result import RunResult

logger = logging.getLogger(__name__)

# Endings of weights files; the first one that exists is used.
WEIGHTS_SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin")


@dataclass(frozen=True)
class Places:
    """Where the data and weights of a study are on this machine.

    Attributes:
        datasets: Name of a data set of the study -> its settings, such as its path.
        weights: Folder with a file ``<timm tag>.safetensors`` (or another of ``WEIGHTS_SUFFIXES``) per backbone.
    """

    datasets: Mapping[str, Tree] = field(default_factory=dict)
    weights: Path | None = None

    def weights_file(self, tag: str) -> Path:
        """Return the file of a backbone: the one that exists, or else the usual one."""
        assert self.weights is not None
        files = [self.weights / f"{tag}{suffix}" for suffix in WEIGHTS_SUFFIXES]
        return next((file for file in files if file.is_file()), files[0])


def check_files(configs: Iterable[RunConfig]) -> None:
    """Refuse to start if data or weights are missing: hours later would be too late.

    Raises:
        UsageError: One message for each missing thing.
    """
    problems: list[str] = []
    for config in configs:
        dataset, backbone = config.dataset, config.backbone
        if dataset.path is None and dataset.source is None:
            problems.append(f"the images of data set '{dataset.name}' are needed: dataset.path is not set.")
        if dataset.path is not None and not dataset.path.exists():
            problems.append(f"data set '{dataset.name}': '{dataset.path}' does not exist (dataset.path).")
        try:
            split_lists_of(dataset)
        except UsageError as error:
            problems += error.problems
        if backbone.checkpoint is not None and not backbone.checkpoint.is_file():
            problems.append(
                f"the weights {backbone.name} are needed: there is no file {backbone.checkpoint} (backbone.checkpoint)."
            )
    if problems:
        raise UsageError(*dict.fromkeys(problems))


def moved_content(finished: Iterable[tuple[Path, RunConfig, RunResult]]) -> list[str]:
    """Return a problem for each run whose images or weights, now looked for elsewhere, are different there.

    Args:
        finished: Run directory, configuration as requested now, and result.
    """
    sha256_of = cache(file_sha256)

    @cache
    def split_at(spec: str) -> str:
        dataset = DatasetSpec.model_validate_json(spec).model_copy(update={"verify": "none"})
        return load_image_dataset(dataset).split_sha256

    problems = []
    for directory, config, result in finished:
        stored = result.config
        path, checkpoint = config.dataset.path, config.backbone.checkpoint
        made_of: list[tuple[Path | str, str, str, Callable[[], str]]] = []
        if (path and str(path)) != stored["dataset"]["path"]:
            row_names = stored["dataset"].get("row_names", "number")
            spec = config.dataset.model_copy(update={"row_names": row_names}).model_dump_json()
            made_of.append(
                (
                    path or config.dataset.name,
                    "the images or their split",
                    result.split_sha256,
                    partial(split_at, spec),
                )
            )
        if checkpoint is None and stored["backbone"]["checkpoint"] is not None:
            logger.warning(
                "%s was made with its own weights file, which is not compared with '%s'",
                directory,
                config.backbone.name,
            )
        elif checkpoint is not None and str(checkpoint) != stored["backbone"]["checkpoint"]:
            recorded = result.weights.sha256 if result.weights else ""
            made_of.append((checkpoint, "the weights", recorded, partial(sha256_of, checkpoint)))
        for place, what, recorded, hash_of in made_of:
            try:
                now = hash_of()
            except (UsageError, OSError) as error:
                logger.warning("%s: assumed to be made from %s; not checked: %s", directory, place, error)
                continue
            if now != recorded:
                problems.append(
                    f"{directory} was made with data other than those at {place} now: SHA-256 of {what} is "
                    f"{recorded[:12]} there against {now[:12]}. Use another output folder for these data."
                )
    return problems
