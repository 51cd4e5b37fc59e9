#!/usr/bin/env bash
# Runs the light tests on the lowest transformers that pyproject.toml admits, in an environment of its own, made once and
# kept outside the checkout.
#
#   scripts/test_lowest.sh                     the rooms that touch transformers
#   scripts/test_lowest.sh tests/models        further arguments go to pytest
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib/venv.sh"

venv=$(ensure_venv lowest "$root/scripts/requirements/lowest.txt")
cd "$root"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1
if [[ $# -eq 0 ]]; then
    # The rooms, and the files of the drop-in beside them, that call transformers; docs/training.md and README as well.
    set -- tests/models tests/layers tests/protocol tests/generation tests/training tests/cli tests/packaging tests/test_*.py
fi
exec "$venv/bin/python" -m pytest -q -m "not slow" -n "${EASYTORCH_TEST_WORKERS:-2}" --dist loadfile "$@"
