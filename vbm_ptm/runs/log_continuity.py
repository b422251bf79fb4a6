"""Whether ``log.jsonl`` holds every step of every finished task, and agrees with the run's other records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from vbm_ptm.config.tree import changes
from vbm_ptm.runs.findings import Findings
from vbm_ptm.storage.log_reader import parse_line
from vbm_ptm.storage.task_record import TaskFacts

_REMEDY = "the log was cut or edited: restore it; counts and checkpoints do not depend on it"
_FACTS = tuple(each.name for each in fields(TaskFacts))


class _TaskSteps:
    """The steps of one task, in the order of the log.

    Args:
        name: Name of the task in findings.
        findings: Where the first gap is recorded.
    """

    def __init__(self, name: str, findings: Findings) -> None:
        self._name = name
        self._findings = findings
        self._last = (0, -1)
        self._has_gap = False
        self.num_steps = 0
        self.num_images = 0

    def add(self, event: dict[str, Any], *, line: int) -> None:
        """Count a step, which must follow the previous one."""
        epoch, step = self._last
        here = event.get("epoch", -1), event.get("step", -1)
        if here not in ((epoch, step + 1), (epoch + 1, 0)) and not self._has_gap:
            self._has_gap = True
            self._findings.add(
                f"log.jsonl, line {line}, {self._name}",
                expected=f"epoch {epoch} step {step + 1}, or epoch {epoch + 1} step 0",
                found=f"epoch {here[0]} step {here[1]}",
                remedy=_REMEDY,
            )
        self._last = here
        self.num_steps += 1
        self.num_images += event.get("images", 0)


def check_log(
    path: Path,
    *,
    records: Sequence[TaskFacts],
    curve: Sequence[float | None],
    position: int,
    findings: Findings,
) -> None:
    """Read the whole log; record what it lacks and what it contradicts.

    Args:
        path: The file.
        records: Those of the finished tasks, from the result.
        curve: Accuracy over all seen classes after each of these tasks, in percent.
        position: Bytes that the newest checkpoint knows of.
        findings: Where contradictions are recorded.
    """
    if not path.is_file():
        findings.add("log.jsonl", expected="a log", found="no such file", remedy=_REMEDY)
        return
    findings.expect(
        "log.jsonl",
        expected=f"at least the {position} bytes that the newest checkpoint refers to",
        found=f"at least the {min(path.stat().st_size, position)} bytes that the newest checkpoint refers to",
        remedy=_REMEDY,
    )
    steps: dict[int, _TaskSteps] = {}
    ended: list[int] = []
    num_lines = 0
    with path.open("rb") as file:
        for num_lines, line in enumerate(file, start=1):
            event = parse_line(line) if line.endswith(b"\n") else None
            if event is None:
                findings.add(
                    f"log.jsonl, line {num_lines}", expected="a whole event", found="none", remedy=_REMEDY
                )
                continue
            task = event.get("task")
            if not isinstance(task, int):
                task = event.get("task_index")
            if not isinstance(task, int):
                continue  # an event of the run as a whole
            of_task = steps.setdefault(task, _TaskSteps(f"task {task + 1}", findings))
            if event["event"] == "step":
                of_task.add(event, line=num_lines)
            elif event["event"] == "task":
                ended.append(task)
                _compare(event, of_task, records[task : task + 1], curve[task : task + 1], findings)
    findings.expect(
        "finished tasks in log.jsonl",
        expected=[record.task_index + 1 for record in records],
        found=[task + 1 for task in ended],
        remedy=_REMEDY,
    )
    findings.checked.append(f"{num_lines} lines of log.jsonl")


def _compare(
    event: dict[str, Any],
    steps: _TaskSteps,
    record: Sequence[TaskFacts],
    accuracy: Sequence[float | None],
    findings: Findings,
) -> None:
    """Compare the event that ends a task with the steps before it and with the task's record."""
    name = f"task {event['task_index'] + 1}"
    for key in ("num_steps", "num_images"):
        findings.expect(
            f"log.jsonl, {name}, {key} of its steps",
            expected=event.get(key),
            found=getattr(steps, key),
            remedy=_REMEDY,
        )
    for each in record:
        stored = {key: getattr(each, key) for key in _FACTS if key in event}
        logged = {key: event[key] for key in _FACTS if key in event}
        for key, (in_result, in_log) in changes(_plain(stored), _plain(logged)).items():
            findings.add(
                f"log.jsonl against result.json, {name}, {key}",
                expected=in_result,
                found=in_log,
                remedy="one of the two was changed; the checkpoint of the task tells which",
            )
    for known in accuracy:
        said = event.get("accuracy")
        if known is None or said is None or not math.isclose(known, said, rel_tol=1e-9, abs_tol=1e-9):
            findings.expect(
                f"log.jsonl against result.json, {name}, accuracy over all seen classes",
                expected=known,
                found=said,
                remedy="a count was changed in one of the two; the checkpoint of the task tells which",
            )


def _plain(value: Any) -> Any:
    """Return a value with lists in place of tuples, as in JSON."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
