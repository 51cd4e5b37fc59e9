#!/usr/bin/env bash
# Imports every module with the dependencies that pyproject.toml declares and no extra, on the Python that $PYTHON names.
#
#   PYTHON=python3.13 scripts/test_imports.sh
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib/venv.sh"

venv=$(ensure_venv minimal "$root/scripts/requirements/minimal.txt")
cd "$root"
exec "$venv/bin/python" scripts/import_all.py
