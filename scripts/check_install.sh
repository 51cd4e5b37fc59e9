#!/usr/bin/env bash
# Try `pip install .` and `pip install -e .` as a user would, from a folder outside the checkout.
#
#   scripts/check_install.sh PYTHON     PYTHON: an interpreter whose environment has EasyTorch's dependencies
#
# Each way gets an environment of its own that borrows PYTHON's packages, and a copy of the tree, so that nothing is
# built inside the checkout and the checkout cannot be what is imported.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:?usage: scripts/check_install.sh PYTHON}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

check() { # check NAME PIP_ARGUMENTS...
    local name=$1 env="$work/$1/env" tree="$work/$1/tree"
    shift
    mkdir -p "$tree" "$work/$name/away"
    (cd "$root" && git ls-files -z --cached --others --exclude-standard | tar --null --files-from=- -cf - --ignore-failed-read) | tar -xf - -C "$tree"
    "$python" -m venv --without-pip "$env"
    echo "$packages" >"$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
    (cd "$tree" && "$env/bin/python" -m pip install --quiet --no-deps --no-build-isolation --force-reinstall "$@" .)
    (cd "$work/$name/away" && PATH="$env/bin:$PATH" "$env/bin/python" "$root/tests/packaging/installed.py" "$tree" "$name")
}

check wheel
check editable -e
echo "both installs work from outside the checkout"
