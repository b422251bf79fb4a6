"""How two runs differ: in settings, versions, images, weights and machine, but not in what follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vbm_ptm.config.tree import changes, leaves
from vbm_ptm.runs.directory import RunDirectory
from vbm_ptm.storage.run_result import RunResult

Section = dict[str, tuple[Any, Any]]


def compare_runs(one: Path, two: Path) -> dict[str, Section]:
    """Return, by section and name, everything in which two runs differ.

    If a run has no result yet, only settings are compared.

    Args:
        one: A run directory.
        two: Another run directory.

    Raises:
        UsageError: One of them is not a run directory.
    """
    directories = RunDirectory(one), RunDirectory(two)
    first, second = (directory.config().model_dump(mode="json") for directory in directories)
    compared = {"settings": changes(first, second)}
    results = [directory.result() for directory in directories]
    if results[0] and results[1]:
        facts, others = _facts(results[0]), _facts(results[1])
        compared |= {section: changes(facts[section], others[section]) for section in facts}
    return compared


def compared_facts(run: Path) -> dict[str, dict[str, Any]]:
    """Return, by section and name, what ``compare_runs`` compares about a run; settings by their dotted paths.

    Raises:
        UsageError: It is not a run directory.
    """
    directory = RunDirectory(run)
    facts: dict[str, dict[str, Any]] = {"settings": dict(leaves(directory.config().model_dump(mode="json")))}
    result = directory.result()
    return facts | (_facts(result) if result else {})


def _facts(result: RunResult) -> dict[str, dict[str, Any]]:
    weights = result.weights
    return {
        "versions": result.versions,
        "images and weights": {
            "split SHA-256": result.split_sha256,
            "images held out": result.data.held_out,
            "images left out": list(result.data.skipped_images),
            "weights": weights and weights.name,
            "weights SHA-256": weights and weights.sha256,
            "extends": result.extends and result.extends.to_json(),
        },
        "machine": {name: getattr(result, name) for name in ("num_ranks", "device", "num_threads")},
        "state": {"status": result.status, "finished tasks": len(result.task_records)},
    }
