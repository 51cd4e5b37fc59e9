#!/usr/bin/env bash
# From a fresh checkout to a running demo: makes .venv in the checkout (again only when its pins change), installs
# EasyTorch into it, and runs `easytorch demo`. Needs Python 3.11 to 3.13.
#
#   scripts/quickstart.sh            the demo is under 5 minutes on 2 CPU cores
#   scripts/quickstart.sh --quick    the same at test size; arguments go to `easytorch demo`
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib/venv.sh"

ensure_venv_at "$root/.venv" "$root/scripts/requirements/quickstart.txt"
# The pins are all that it needs; without dependencies and isolation this takes seconds and asks no index.
"$root/.venv/bin/python" -m pip install -qq --no-deps --no-build-isolation -e "$root"
exec "$root/.venv/bin/easytorch" demo "$@"
