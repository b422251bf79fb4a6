"""Options that several commands share, and what they mean to a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vbm_ptm.errors import UsageError

Dataset = Annotated[
    str | None,
    typer.Option(help="Name ('vbm-ptm list datasets'), a YAML file, a folder of images, or a parquet file."),
]
LearnerName = Annotated[
    str | None, typer.Option(help="Name ('vbm-ptm list learners') or package.module:Class of your own.")
]
Preset = Annotated[
    str | None,
    typer.Option(help="Preset of the learner's file: official, paper, embedded; none for plain defaults."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML file that wins over data set and learner files.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="path.to.setting=value; may be repeated. Wins over all files."),
]
DeviceName = Annotated[
    Literal["cpu", "cuda", "mps"] | None, typer.Option(help="Where to compute; default: the best device.")
]
DeviceInUse = Annotated[
    Literal["cpu", "cuda", "mps"] | None,
    typer.Option(
        help="Where to compute; default: the device of the run, or the best one for an exported learner."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON instead of a table.")]
Run = Annotated[Path, typer.Argument(help="A run directory.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="What has moved, or how to compute: dataset.path=…, dataset.split_file=…, "
        "backbone.checkpoint=…, data.…=….",
    ),
]
TaskNumber = Annotated[
    int | None,
    typer.Option(
        "--task", min=1, help="Use the learner as it was after this task (from 1); default: the last."
    ),
]
Shard = Annotated[
    str | None, typer.Option(help="Part of the runs: 2/8 is the second of eight parts of about equal cost.")
]
ImagesPerSecond = Annotated[
    float,
    typer.Option(min=1e-3, help="Images per second on your device, a forward and a backward pass each."),
]
SkipDamaged = Annotated[
    bool,
    typer.Option(
        "--skip-damaged",
        metavar="",
        help="Continue from the newest intact checkpoint if newer ones are damaged.",
    ),
]
WritesPage = Annotated[
    bool, typer.Option("--report", metavar="", help="Write report.html beside the runs, as 'report' does.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", metavar="", help="Run nothing; show the runs and what they will cost.")
]


def sources_of(
    dataset: str | None, learner: str | None, preset: str | None, config: Path | None
) -> dict[str, Any]:
    """Return the sources of a configuration as ``compose`` and ``plan_runs`` take them."""
    return {"dataset": dataset, "learner": learner, "preset": preset, "config_file": config}


def all_overrides(
    given: list[str] | None,
    *,
    seed: int | None = None,
    class_order_seed: int | None = None,
    device: str | None = None,
) -> list[str]:
    """Return what --set gave, and after it what stands for a setting as an option of its own."""
    named = {"seed": seed, "scenario.class_order_seed": class_order_seed, "device": device}
    return [*(given or ()), *(f"{key}={value}" for key, value in named.items() if value is not None)]


def parse_shard(text: str) -> tuple[int, int]:
    """Read "2/8", the second of eight parts; return index, from 0, and number of parts.

    Raises:
        UsageError: It is not such a part.
    """
    first, _, second = text.partition("/")
    if first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second):
        return int(first) - 1, int(second)
    raise UsageError(f"--shard '{text}' is not of the form PART/PARTS, such as 1/8 to 8/8.")


def integers(option: str, text: str | None) -> tuple[int, ...]:
    """Read a list of whole numbers; empty without a text.

    Raises:
        UsageError: It is not such a list.
    """
    if text is None:
        return ()
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} '{text}' is not a list of whole numbers such as 1993,1996,1997."
        ) from None
