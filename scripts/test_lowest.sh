#!/usr/bin/env bash
# Runs the light tests on the lowest transformers that pyproject.toml admits, in an environment of its own, made once and
# kept outside the checkout.
#
#   scripts/test_lowest.sh                     the rooms that touch transformers
#   scripts/test_lowest.sh tests/models        further arguments go to pytest
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib/venv.sh"
source "$root/scripts/lib/light.sh"

venv=$(ensure_venv lowest "$root/scripts/requirements/lowest.txt")
cd "$root"
run_light "$venv" "$@"
