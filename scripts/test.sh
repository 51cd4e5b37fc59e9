#!/usr/bin/env bash
# Installs what the tests need (once, outside the checkout) and passes them: lint, types, tests, both kinds of install.
#
#   scripts/test.sh                          everything
#   scripts/test.sh tests/operations -k sdpa       only these tests: arguments go to pytest
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib/venv.sh"

venv=$(ensure_venv test "$root/scripts/requirements/test.txt")
cd "$root"
# Two pytest processes on two cores: torch's and XLA's own threads beside them would only wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1
workers=${EASYTORCH_TEST_WORKERS:-2}

if [[ $# -gt 0 ]]; then
    exec "$venv/bin/python" -m pytest "$@"
fi
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
PYTHON="$venv/bin/python" scripts/typecheck.sh
scripts/check_install.sh "$venv/bin/python"
exec "$venv/bin/python" -m pytest -q -n "$workers" --dist loadfile --ignore tests/xla
