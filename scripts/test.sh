#!/usr/bin/env bash
# bash scripts/test.sh                          all tests but the slow ones, with the coverage floor
# bash scripts/test.sh --slow                   the slow ones as well
# bash scripts/test.sh tests/data -k sampler    what pytest's own arguments select, without coverage
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test

selection="not slow and not gpu"
if [ "${1-}" = --slow ]; then
    selection="not gpu"
    shift
fi
if [ $# = 0 ]; then
    set -- --cov --cov-report=term
fi
cd -- "$repository"
export HF_HUB_OFFLINE=1 # no test may reach for the network
exec "$python" -m pytest -m "$selection" "$@"
