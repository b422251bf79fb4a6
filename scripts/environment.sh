# Makes the .venv of this checkout ready: bash scripts/environment.sh [EXTRA ...], or source it and call
# prepare_environment. Nothing is installed when pyproject.toml, Python and the place have not changed.
set -euo pipefail

repository=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
environment="$repository/.venv"
python="$environment/bin/python"

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11 or newer, with its venv module, is needed: no python3, python3.13, python3.12 or" \
        "python3.11 on the PATH is. (On Debian and Ubuntu: apt install python3 python3-venv.)" >&2
    return 1
}

fingerprint() {
    "$python" - "$repository" <<'PYTHON'
import hashlib, pathlib, sys

pyproject = (pathlib.Path(sys.argv[1]) / "pyproject.toml").read_bytes()
print(hashlib.sha256(pyproject + f"{sys.version}{sys.argv[1]}".encode()).hexdigest())
PYTHON
}

installed() {
    ls "$environment"/lib/python*/site-packages
}

# prepare_environment [EXTRA ...]
#
# .venv/vbm_ptm_state holds "installing PID" during an installation and afterwards the fingerprint and the
# extras that are there. An installation that was cut off half-way is thus noticed, and done again from
# scratch; one that failed before it changed anything (no network) leaves the environment as it was.
prepare_environment() {
    local state="$environment/vbm_ptm_state" word="" rest="" before now extra extras=() missing=0
    if [ -f "$state" ]; then
        read -r word rest <"$state" || true
    fi
    if [ "$word" = installing ] && kill -0 "$rest" 2>/dev/null; then
        echo "Process $rest is installing into $environment: wait for it, or remove $state." >&2
        return 1
    fi
    if [ "$word" = installing ] || ! "$python" -c '' 2>/dev/null; then
        local base
        base=$(find_python)
        echo "Creating $environment with $("$base" --version)"
        "$base" -m venv --clear "$environment"
        word="" rest=""
    fi

    now=$(fingerprint)
    for extra in "$@"; do
        [[ " $rest " == *" $extra "* ]] || missing=1
    done
    if [ "$word" = "$now" ] && [ "$missing" = 0 ]; then
        return
    fi
    # Extras installed earlier stay part of the environment, so that their versions follow pyproject.toml.
    for extra in $(printf '%s\n' $rest "$@" | sort -u); do
        extras+=("$extra")
    done
    local joined
    joined=$(IFS=,; echo "${extras[*]-}")
    echo "Installing vbm_ptm${joined:+[$joined]} into $environment (the first time takes minutes)"
    before=$(installed)
    echo "installing $$" >"$state"
    # Two thirds of the modules are never imported; those that are get compiled then.
    (cd -- "$repository" && "$python" -m pip install --quiet --disable-pip-version-check --no-compile \
        --editable ".${joined:+[$joined]}") || {
        if [ "$(installed)" = "$before" ]; then
            echo "$word $rest" >"$state"
        fi
        echo "The installation failed (see above). The next run tries it again." >&2
        return 1
    }
    echo "$now ${extras[*]-}" >"$state"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    prepare_environment "$@"
fi
