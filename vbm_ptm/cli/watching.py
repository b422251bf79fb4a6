"""The command that follows a run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from vbm_ptm.cli.advice import WHAT_TO_TYPE
from vbm_ptm.cli.options import Run
from vbm_ptm.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from vbm_ptm.report.live_view import Snapshot
    from vbm_ptm.report.run_progress import RunProgress
    from vbm_ptm.runs.watching import RunWatcher

# A run in one of these states will write no more by itself.
_OVER = ("finished", "stopped", "failed", "dead")


def watch(
    run: Run,
    once: Annotated[
        bool, typer.Option("--once", metavar="", help="Show the current state and exit.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Follow a run in the terminal by its log, even a run of another process or one that has not begun.

    The exit code is 0 when the run is finished and 1 when no process works on it any more; with --once always 0.
    Ctrl-C ends the watch, not the run.
    """
    from vbm_ptm.cli.printing import stdout
    from vbm_ptm.runs.watching import RunWatcher

    if once and not run.exists():
        raise UsageError(f"{run} does not exist; give the run directory, or leave out --once to wait for it.")
    watcher, console = RunWatcher(run), stdout()
    if once:
        _show(console, _look(watcher, is_thorough=True))
        return
    follow = _follow_on_screen if console.is_terminal else _follow_in_lines
    try:
        last = follow(watcher, console, interval)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if last.state != "finished":
        raise typer.Exit(1)


def _look(watcher: RunWatcher, *, is_thorough: bool = False) -> Snapshot:
    """Look at the run; where it can be resumed, say what to type."""
    snapshot = watcher.look(is_thorough=is_thorough)
    if snapshot.state not in ("stopped", "failed", "dead") or snapshot.quiet_seconds is None:
        return snapshot
    return replace(snapshot, note=f"{snapshot.note} {WHAT_TO_TYPE['resume']}")


def _show(console: Console, snapshot: Snapshot) -> None:
    from vbm_ptm.report.live_view import live_view

    width = max(10, min(console.width, 160) - 46)
    console.print(live_view(snapshot, width=min(width, 60), is_plain=_is_plain(console)))


def _is_plain(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")


def _follow_on_screen(watcher: RunWatcher, console: Console, interval: float) -> Snapshot:
    """Redraw the run at every update, until it is over."""
    from rich.live import Live

    from vbm_ptm.report.live_view import live_view

    with Live(console=console, auto_refresh=False) as live:
        while True:
            snapshot = _look(watcher)
            width = max(10, min(console.width - 46, 60))
            live.update(live_view(snapshot, width=width, is_plain=_is_plain(console)), refresh=True)
            if snapshot.state in _OVER:
                return snapshot
            time.sleep(interval)


def _follow_in_lines(watcher: RunWatcher, console: Console, interval: float) -> Snapshot:
    """Print a line for every epoch and task, and where the run stops moving, until it is over."""
    said: tuple[str, str] | None = None
    progress: RunProgress | None = None
    num_shown = 0
    while True:
        snapshot = _look(watcher)
        if snapshot.progress is not progress:
            if progress is not None:
                console.print("the run has gone back to its checkpoint", soft_wrap=True)
            progress, num_shown = snapshot.progress, 0
            console.print(snapshot.title, soft_wrap=True)
        for line in snapshot.progress.lines[num_shown:]:
            console.print(line, soft_wrap=True)
        num_shown = len(snapshot.progress.lines)
        if said is None or snapshot.state != said[0]:
            said = snapshot.state, snapshot.note
            console.print(": ".join(part for part in said if part), soft_wrap=True)
        if snapshot.state in _OVER:
            return snapshot
        time.sleep(interval)
