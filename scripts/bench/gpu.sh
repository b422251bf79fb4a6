#!/usr/bin/env bash
# Measures one GPU in under 8 minutes, without network: numbers against the CPU, images per second, memory, share of the
# floor. Random weights.
#   bash scripts/bench/gpu.sh [--wheels FOLDER] [options of gpu.py; --help lists them]
# With --wheels, packages that are missing are installed from that folder alone. PYTHON names the interpreter.
set -euo pipefail

repository=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python}
if [ "${1:-}" = --wheels ]; then
    "$python" -m pip install --quiet --no-index --find-links "${2:?--wheels needs a folder}" "$repository"
    shift 2
fi
export HF_HUB_OFFLINE=1 PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$repository/scripts/bench/gpu.py" "$@"
