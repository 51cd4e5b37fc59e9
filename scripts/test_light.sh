#!/usr/bin/env bash
# Runs the light tests in the environment of scripts/test.sh, on the Python that $PYTHON names.
#
#   PYTHON=python3.13 scripts/test_light.sh
#   scripts/test_light.sh tests/models          further arguments go to pytest
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib/venv.sh"
source "$root/scripts/lib/light.sh"

venv=$(ensure_venv test "$root/scripts/requirements/test.txt")
cd "$root"
run_light "$venv" "$@"
