"""Keep the results of studies in the repository, and make the tables of docs/results.md of them.

python scripts/results.py keep RUNS/digits --data $DATA    copies finished results without their timings
python scripts/results.py tables                           writes the tables into docs/results.md

Seconds, which no second run would repeat, go into docs/results/seconds.json.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vbm_ptm.storage.run_result import RunResult

DOCS = Path(__file__).parents[1] / "docs"
KEPT = DOCS / "results" / "runs"
SECONDS = DOCS / "results" / "seconds.json"
PAGE = DOCS / "results.md"

Result = dict[str, Any]


def keep(study: Path, *, data: str | None) -> int:
    """Copy the finished results below a study's folder; return how many there are.

    Args:
        study: Output folder of ``vbm-ptm study``; its name becomes the name of the study.
        data: Folder of the data sets, which is written as $DATA.
    """
    seconds: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    number = 0
    for file in sorted(study.rglob("result.json")):
        text = file.read_text()
        result = json.loads(text.replace(data.rstrip("/"), "$DATA") if data else text)
        if result["status"] != "finished":
            continue
        run = f"{study.name}/{file.parent.relative_to(study).as_posix()}"
        seconds[run] = round(RunResult.model_validate(result).task_seconds, 1)
        del result["timings"]
        kept = KEPT / run / "result.json"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(result, ensure_ascii=False, separators=(",", ":")) + "\n")
        number += 1
    SECONDS.write_text(json.dumps(dict(sorted(seconds.items())), indent=1) + "\n")
    return number


def tables(study: str) -> str:
    """Return a study's tables as Markdown: one row per line of the study, then the paired differences."""
    seconds: dict[str, float] = json.loads(SECONDS.read_text())
    lines: dict[str, dict[str, Result]] = defaultdict(dict)
    for file in sorted((KEPT / study).rglob("result.json")):
        label, *rest = file.parent.relative_to(KEPT / study).parts
        lines[label]["/".join(rest)] = json.loads(file.read_text())
    rows = [
        "| run | average | last | forgetting | last, top-5 | seconds | images | runs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for label, runs in lines.items():
        cells = [
            _spread([headline(result)[name] for result in runs.values()])
            for name in ("average_incremental_accuracy", "last_accuracy", "forgetting")
        ]
        cells.append(_spread([headline(result, top=5)["last_accuracy"] for result in runs.values()]))
        took = [seconds[f"{study}/{label}/{name}".rstrip("/")] for name in runs]
        cells += [
            f"{min(took):.0f}",
            f"{next(iter(runs.values()))['num_images']:,}",
            str(len(runs)),
        ]
        rows.append(f"| `{label}` | {' | '.join(cells)} |")
    pairs = [
        "| learner | average | last | forgetting | pairs |",
        "|---|---|---|---|---|",
    ]
    for label, runs in lines.items():
        baselines = lines.get(label.replace("-V4", "-V1"), {})
        names = sorted(runs.keys() & baselines.keys()) if label.endswith("-V4") else []
        if names:
            cells = [
                _differences([(headline(runs[name])[key], headline(baselines[name])[key]) for name in names])
                for key in ("average_incremental_accuracy", "last_accuracy", "forgetting")
            ]
            pairs.append(f"| `{label.removesuffix('-V4')}` | {' | '.join(cells)} | {len(names)} |")
    return "\n".join([*rows, "", "Four views minus one view:", "", *pairs] if len(pairs) > 2 else rows)


def page_with_tables(page: str) -> str:
    """Return the page with every study's tables between its two marks renewed."""

    def renew(found: re.Match[str]) -> str:
        return f"<!-- {found[1]} -->\n\n{tables(found[1])}\n\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", renew, page, flags=re.DOTALL)


def headline(result: Result, *, top: int = 1) -> dict[str, Any]:
    """Return the numbers over all seen classes of a result, top-1 or top-5."""
    numbers: dict[str, Any] = result["metrics"]["class_incremental"][f"top{top}"]
    return numbers


def _spread(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    spread = f" ± {statistics.stdev(known):.1f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.1f}{spread}"


def _differences(pairs: Sequence[tuple[float | None, float | None]]) -> str:
    """Return the mean of the differences, and all of them where there are several."""
    known = [first - second for first, second in pairs if first is not None and second is not None]
    if not known:
        return "-"
    each = f" ({', '.join(f'{value:+.1f}' for value in known)})" if len(known) > 1 else ""
    return f"{statistics.fmean(known):+.1f}{each}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    keeping = commands.add_parser("keep", help="copy finished results into docs/results")
    keeping.add_argument("study", type=Path, nargs="+", help="output folder of a study")
    keeping.add_argument("--data", help="folder of the data sets, written as $DATA")
    commands.add_parser("tables", help="renew the tables of docs/results.md")
    arguments = parser.parse_args()
    if arguments.command == "keep":
        for study in arguments.study:
            print(f"{study.name}: {keep(study, data=arguments.data)} results kept in {KEPT}")
    else:
        PAGE.write_text(page_with_tables(PAGE.read_text()))


if __name__ == "__main__":
    main()
