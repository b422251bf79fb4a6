#!/usr/bin/env bash
# bash scripts/test.sh                          the quick tests: one process each, about a minute and a half on two idle cores
# bash scripts/test.sh --full                   whole runs, several processes and a wheel, too, and the coverage floor
# bash scripts/test.sh tests/data -k sampler    what pytest's own arguments select, slow tests included
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test

cd -- "$repository"
export HF_HUB_OFFLINE=1 # no test may reach for the network
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE # without it every process compiles the package, and every worker all tests, again

# Two tests at a time, one thread each: more threads than cores make everything slower.
two_at_a_time() {
    "$python" -m pytest --numprocesses 2 --dist worksteal "$@"
}

case "${1-}" in
"") two_at_a_time -m "not slow and not distributed and not gpu" ;;
--full) two_at_a_time -m "not gpu" --cov --cov-report=term --durations=25 ;;
*) "$python" -m pytest -m "not gpu" "$@" ;;
esac
