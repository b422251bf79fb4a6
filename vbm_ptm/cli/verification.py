"""The command that audits a run."""

from __future__ import annotations

from typing import Annotated

import typer

from vbm_ptm.cli.options import AsJson, Changes, DeviceInUse, Run
from vbm_ptm.cli.printing import print_json, stdout
from vbm_ptm.errors import UsageError


def verify(
    run: Run,
    evaluate: Annotated[
        bool,
        typer.Option(
            "--evaluate",
            metavar="",
            help="Measure the newest checkpoint again; needs the test images and weights.",
        ),
    ] = False,
    changes: Changes = None,
    device: DeviceInUse = None,
    as_json: AsJson = False,
) -> None:
    """Compare result, log, checkpoints and settings of a run: exit code 0 if all agree, 1 with a line for each finding.

    Metrics are computed from the stored counts again, files compared with their SHA-256, tasks and steps counted.
    """
    from vbm_ptm.runs.verification import verify as audit

    if not evaluate and (changes or device):
        raise UsageError(
            "--set and --device only apply with --evaluate: the rest needs neither images nor weights."
        )
    findings = audit(run, is_evaluated=evaluate, device=device, overrides=changes or ())
    if as_json:
        print_json(
            {
                "holds": not findings.items,
                "findings": [item._asdict() for item in findings.items],
                "checked": findings.checked,
            }
        )
    else:
        console = stdout()
        for item in findings.items:
            console.print(str(item), soft_wrap=True)
        console.print(f"checked: {'; '.join(findings.checked)}", soft_wrap=True)
        count = len(findings.items)
        console.print(f"{count} finding{'s' * (count != 1)}" if count else "all of it agrees")
    if findings.items:
        raise typer.Exit(1)
