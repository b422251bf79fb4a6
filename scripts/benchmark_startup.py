"""How long the command line takes to answer: medians over five starts, beside Python's own start.

Usage: python scripts/benchmark_startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

NUM_STARTS = 5
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "vbm-ptm --help": ["-m", "vbm_ptm", "--help"],
    "vbm-ptm list learners": ["-m", "vbm_ptm", "list", "learners"],
}


def seconds_of(arguments: list[str]) -> float:
    """Return the wall-clock seconds that Python takes to run with the arguments."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Print one line for each command: its median and how many starts of Python it is worth."""
    reference = None
    for title, arguments in COMMANDS.items():
        seconds_of(arguments)  # a first start, not counted, fills the file cache and __pycache__
        median = statistics.median(seconds_of(arguments) for _ in range(NUM_STARTS))
        reference = reference or median
        print(f"{title:24}{median:7.3f} s{median / reference:7.1f} x python")


if __name__ == "__main__":
    main()
