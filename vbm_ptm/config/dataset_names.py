"""What the name of a data set means: a file of settings, or a place with images."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vbm_ptm.config.tree import Tree, find_config, list_configs, merge, read_yaml
from vbm_ptm.errors import UsageError, unknown_name
from vbm_ptm.settings import absolute

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DatasetName:
    """What a name stands for: exactly one of these.

    Attributes:
        file: A file of settings.
        place: A folder or a parquet file.
    """

    file: Path | None = None
    place: Path | None = None


def resolve_dataset(given: str) -> DatasetName:
    """Resolve a name.

    What is written as a path is a path: it begins with ``/``, ``./``, ``../`` or ``~``, or ends with ``/``. Any other
    name is a data set of ``configs/datasets`` if there is one, then a YAML file, then a folder or file. A path is never
    a pattern.

    Args:
        given: A name, a YAML file, a folder or a parquet file.

    Raises:
        UsageError: It is none of these.
    """
    try:
        path = absolute(given if given.strip() else ".")
    except ValueError as error:
        raise UsageError(f"data set: {error}.") from None
    is_yaml = given.endswith((".yaml", ".yml")) and not path.is_dir()
    if given.startswith(("/", "./", "../", "~")) or given.endswith("/") or given in (".", ".."):
        if is_yaml and not path.is_file():
            raise UsageError(unknown_name("configuration file", given, map(str, path.parent.glob("*.yaml"))))
        return DatasetName(file=path) if is_yaml else DatasetName(place=path)
    file = find_config(f"datasets/{given}", is_optional=True) if given else None
    if file is None and is_yaml:
        file = find_config(given)
    elif file is not None and path.exists() and not is_yaml:
        logger.warning(
            "data set '%s' is the one of %s; write './%s' for the folder or file here", *(given, file, given)
        )
    if file is not None:
        return DatasetName(file=file)
    if given.strip() and (path.exists() or "/" in given or path.suffix):
        return DatasetName(place=path)
    raise UsageError(
        unknown_name("data set", given, list_configs("datasets"))
        + " Or give a folder, a parquet file or a YAML file."
    )


def dataset_trees(given: str) -> list[tuple[Tree, str]]:
    """Return the partial configurations that a data set's name stands for, and their origins.

    A file may name another one as its ``base``, over whose settings its own win.

    Raises:
        UsageError: As ``resolve_dataset``, or a file is not valid YAML.
    """
    meant = resolve_dataset(given)
    if meant.place is None:
        contents = read_yaml(meant.file)
        base: Any = contents.pop("base", None)
        if isinstance(base, dict | list):
            raise UsageError(f"base is a single setting, not {base}.")
        bases = [] if base is None else [find_config(f"datasets/{base}")]
        return [*((read_yaml(other), str(other)) for other in bases), (contents, str(meant.file))]
    default = find_config("datasets/folder", is_optional=True)
    tree = read_yaml(default) if default else {}
    place = Path(os.path.normpath(meant.place))  # called as it was given, also where that is a link
    name = place.name if place.is_dir() else place.stem  # site.a and site.b are two folders
    merge(tree, {"dataset": {"name": name, "path": str(meant.place)}})
    return [(tree, f"argument dataset={given}")]
