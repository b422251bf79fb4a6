#!/usr/bin/env bash
# bash scripts/test.sh                          the quick tests: one process each, about four minutes
# bash scripts/test.sh --full                   all tests but those for a GPU, with the coverage floor
# bash scripts/test.sh tests/data -k sampler    what pytest's own arguments select, slow tests included
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test

# Two tests at a time, one thread each: more threads than cores make everything slower.
parallel=(--numprocesses 2 --dist worksteal)
case "${1-}" in
"") set -- -m "not slow and not distributed and not gpu" "${parallel[@]}" ;;
--full)
    shift
    set -- -m "not gpu" "${parallel[@]}" --cov --cov-report=term --durations=25 "$@"
    ;;
*) set -- -m "not gpu" "$@" ;;
esac
cd -- "$repository"
export HF_HUB_OFFLINE=1 # no test may reach for the network
export OMP_NUM_THREADS=1
exec "$python" -m pytest "$@"
