#!/usr/bin/env bash
# bash scripts/test.sh                          the quick tests: one process each, about a minute and a half on two idle cores
# bash scripts/test.sh --full                   these with the coverage floor, then whole runs, several processes, a wheel
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

quick="not slow and not distributed and not gpu"
case "${1-}" in
"") two_at_a_time -m "$quick" ;;
--full)
    # Coverage slows what it watches down, and slow tests, most of them other processes, add little to it. One run
    # for both kinds took 942 s, two take 774.
    status=0
    two_at_a_time -m "$quick" --cov --cov-report=term || status=$?
    two_at_a_time -m "(slow or distributed) and not gpu" --durations=25 || status=$?
    exit "$status"
    ;;
*) "$python" -m pytest -m "not gpu" "$@" ;;
esac
