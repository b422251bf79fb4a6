"""Whether a run directory still says what was measured, by comparing counts, log, checkpoints and settings.

Every task is recorded three times: in ``result.json``, in a line of ``log.jsonl`` and in ``state.json`` of its
checkpoint, whose files have SHA-256 sums. A change to one of them contradicts the others. Somebody who changes all of
them consistently is only found out by measuring the stored learner again (``is_evaluated``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vbm_ptm.config.run_config import stored_config
from vbm_ptm.config.tree import changes, is_within, leaves
from vbm_ptm.engine.acceleration import Device
from vbm_ptm.errors import UsageError
from vbm_ptm.metrics import AccuracyMatrix
from vbm_ptm.runs.directory import FREE_ON_RESUME, PLACES, RunDirectory
from vbm_ptm.runs.findings import Findings
from vbm_ptm.runs.log_continuity import check_log
from vbm_ptm.runs.stored_learner import evaluate
from vbm_ptm.storage.checkpoint import Checkpoint, CheckpointStore, read_checkpoint
from vbm_ptm.storage.locking import is_held
from vbm_ptm.storage.run_result import RunResult
from vbm_ptm.storage.summary import summary

# Tolerance between results of one formula on two machines.
_TOLERANCE = 1e-9

_BRING_BACK = "restore an intact copy, or train the run again"


def verify(
    run_directory: Path | str,
    *,
    is_evaluated: bool = False,
    device: Device | None = None,
    overrides: Sequence[str] = (),
) -> Findings:
    """Compare everything that a run has left behind, without changing anything.

    Args:
        run_directory: What ``run`` wrote.
        is_evaluated: Measure the newest checkpoint again, which needs the test images and the weights.
        device: Where to compute; None for the device of the run.
        overrides: Items ``path.to.setting=value`` for what has moved since, such as ``dataset.path``.

    Raises:
        UsageError: It is not a run directory; or the images or weights for ``is_evaluated`` are missing.
    """
    directory, findings = RunDirectory(Path(run_directory)), Findings()
    config = directory.config().model_dump(mode="json")
    result = _result(directory, findings)
    checkpoints = _checkpoints(directory, findings)
    matrix = None
    if result is not None:
        matrix = _check_result(result, findings)
        findings.expect(
            "config.yaml against result.json",
            expected="the same settings",
            found=_differing_settings(result.config, config),
            remedy="restore the settings that the run was made with",
        )
        _check_against_result(checkpoints, result, findings)
    newest = checkpoints[-1].state if checkpoints else None
    check_log(
        directory.path / "log.jsonl",
        records=result.task_records if result else newest.records if newest else (),
        curve=matrix.curve() if matrix else newest.accuracies.curve() if newest else (),
        position=newest.log_position if newest else 0,
        findings=findings,
    )
    if is_evaluated and checkpoints:
        _evaluate(directory, checkpoints[-1], findings, device=device, overrides=overrides)
    return findings


def _result(directory: RunDirectory, findings: Findings) -> RunResult | None:
    """Read the result; anything wrong with it is a finding."""
    try:
        result = directory.result()
    except UsageError as error:
        findings.add("result.json", expected="a result", found=error, remedy=_BRING_BACK)
        return None
    is_running = is_held(directory.path / ".lock")
    findings.expect(
        "state of the run",
        expected="finished",
        found="running" if is_running else result.status if result else "not finished, without a result",
        remedy="verify it when it is finished" if is_running else "resume it",
    )
    return result


def _check_result(result: RunResult, findings: Findings) -> AccuracyMatrix | None:
    """Count tasks, steps and images, and recompute the metrics; return the matrix, if the counts form one."""
    records = result.task_records
    finished = [record.task_index + 1 for record in records]
    planned = range(1, len(result.tasks) + 1 if result.is_finished else len(records) + 1)
    findings.expect(
        "finished tasks in result.json", expected=list(planned), found=finished, remedy=_BRING_BACK
    )
    for name in ("num_steps", "num_images"):
        findings.expect(
            f"{name} of result.json",
            expected=sum(getattr(record, name) for record in records),
            found=getattr(result, name),
            remedy=_BRING_BACK,
        )
    try:
        matrix = result.matrix
    except (ValueError, TypeError, KeyError) as error:
        findings.add(
            "accuracy_counts of result.json",
            expected="counts of images",
            found=error,
            remedy="a count was changed: the checkpoints hold the others",
        )
        return None
    findings.expect(
        "rows of accuracy_counts in result.json",
        expected=len(records),
        found=len(matrix.rows),
        remedy=_BRING_BACK,
    )
    for record, row in zip(records, matrix.rows, strict=False):
        if record.num_test_images:  # earlier versions did not count them
            findings.expect(
                f"test images after task {record.task_index + 1} in result.json",
                expected=record.num_test_images,
                found=sum(cell.total for cell in row if cell),
                remedy="a count was changed: the checkpoints hold the others",
            )
    # The note says in words, which differ between versions, what the numbers beside it say.
    recomputed = {name: value for name, value in leaves(summary(matrix)) if name != "note"}
    for name, stored in leaves(result.metrics):
        if name in recomputed and not _agrees(stored, recomputed[name]):
            findings.add(
                f"metrics.{name} of result.json",
                expected=f"{recomputed[name]}, computed from the counts",
                found=stored,
                remedy="a count or the number was changed: the log and the checkpoints tell which",
            )
    findings.checked.append(f"{len(recomputed)} metrics, recomputed from the counts")
    return matrix


def _agrees(one: Any, two: Any) -> bool:
    """Return whether two numbers, or lists of numbers, are the same."""
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_agrees, one, two))
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
    return bool(one == two)


def _checkpoints(directory: RunDirectory, findings: Findings) -> list[Checkpoint]:
    """Return the intact checkpoints after tasks, in order; any damage is a finding."""
    store = CheckpointStore(directory.path / "checkpoints")
    whole = []
    for index in store.tasks():
        path = store.directory / f"task_{index:02d}"
        named = _stored_index(path)
        if named is not None and not findings.expect(
            str(path),
            expected=f"the learner after task {index + 1}",
            found=f"the learner after task {named + 1}",
            remedy="checkpoints were swapped: give each the name of its own task",
        ):
            continue
        try:
            checkpoint = read_checkpoint(path)
            checkpoint.verify()
        except UsageError as error:
            findings.add(str(path), expected="files with their SHA-256", found=error, remedy=_BRING_BACK)
        else:
            whole.append(checkpoint)
    findings.checked.append(f"{len(whole)} checkpoints with their SHA-256")
    return whole


def _stored_index(path: Path) -> int | None:
    """Return the task after which a checkpoint says it was written; None if that cannot be read."""
    try:
        return int(json.loads((path / "state.json").read_text(encoding="utf-8"))["task_index"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_against_result(checkpoints: Sequence[Checkpoint], result: RunResult, findings: Findings) -> None:
    """Compare what checkpoints say about the run with what its result says."""
    first = result.extends.num_earlier_tasks if result.extends else 0
    swapped = "it belongs to another run, or one of the two was changed: restore the run's own"
    for checkpoint in checkpoints:
        state, name = checkpoint.state, f"{checkpoint.path.name}/state.json against result.json"
        num_finished = checkpoint.task_index + 1
        rows = result.accuracy_counts.get("rows", [])[:num_finished]
        _expect_counts(name, state.matrix.get("rows", []), rows, findings, remedy=swapped)
        for then, now in zip(state.records, result.task_records, strict=False):
            differing = changes(then.facts.__dict__, now.__dict__)
            findings.expect(
                f"{name}, record of task {then.task_index + 1}",
                expected="the same record",
                found=_named(differing) or "the same record",
                remedy=swapped,
            )
        if checkpoint.task_index < first:
            continue  # of the run that is extended, which had its own data and settings
        for what, expected, there in (
            ("class names", result.class_names, state.class_names),
            ("SHA-256 of the split", result.split_sha256, state.split_sha256),
            ("SHA-256 of the weights", result.weights and result.weights.sha256, state.weights_sha256),
        ):
            findings.expect(f"{name}, {what}", expected=expected, found=there, remedy=swapped)
        findings.expect(
            f"{name}, settings",
            expected="the same settings",
            found=_differing_settings(result.config, state.config),
            remedy=swapped,
        )
    if result.task_records and not any(
        each.task_index == len(result.task_records) - 1 for each in checkpoints
    ):
        findings.add(
            "whole checkpoints",
            expected=f"one after task {len(result.task_records)}",
            found=f"after task {', '.join(str(each.task_index + 1) for each in checkpoints) or 'none'}",
            remedy=_BRING_BACK,
        )


def _expect_counts(
    name: str, then: Sequence[Any], now: Sequence[Any], findings: Findings, *, remedy: str
) -> None:
    """Compare two matrices of counts cell by cell, as far as both have counts."""
    findings.expect(f"{name}, rows of counts", expected=len(then), found=len(now), remedy=remedy)
    for after, (one, two) in enumerate(zip(then, now, strict=False)):
        for task, (first, second) in enumerate(zip(one, two, strict=False)):
            differing = changes(first or {}, second or {})
            findings.expect(
                f"{name}, counts on task {task + 1} after task {after + 1}",
                expected={key: values[0] for key, values in differing.items()},
                found={key: values[1] for key, values in differing.items()},
                remedy=remedy,
            )


def _differing_settings(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    """Name the settings that differ between two stored configurations and that decide what a run computes."""
    free = (*FREE_ON_RESUME, *PLACES)
    try:
        one, two = (stored_config(each, "stored").validate().model_dump(mode="json") for each in (one, two))
    except UsageError as error:
        return str(error)
    named = _named({key: values for key, values in changes(one, two).items() if not is_within(key, free)})
    return named or "the same settings"


def _named(differing: Mapping[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{key} {one!r} and {two!r}" for key, (one, two) in differing.items())


def _evaluate(
    directory: RunDirectory,
    checkpoint: Checkpoint,
    findings: Findings,
    *,
    device: Device | None,
    overrides: Sequence[str],
) -> None:
    """Measure a stored learner again."""
    measured = evaluate(directory.path, task=checkpoint.task_index, device=device, overrides=overrides)
    _expect_counts(
        "measured again",
        [checkpoint.state.matrix["rows"][checkpoint.task_index]],
        [measured.to_dict()["rows"][-1]],
        findings,
        remedy="the learner, the test images or the counts are not those of the run",
    )
    findings.checked.append(f"the learner after task {checkpoint.task_index + 1}, measured again")
