#!/usr/bin/env bash
# Trains and compares learners on the embedded digits and backbone, without any download of data or weights.
# Results go to runs/quickstart of the current directory; a second run shows them at once. Ends with a page, runs/quickstart/report.html.
set -euo pipefail

source "$(dirname -- "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment
exec "$environment/bin/vbm-ptm" study "$repository/configs/quickstart.yaml" --report "$@"
