#!/usr/bin/env bash
# Builds the documentation site into build/site, and fails at a broken link, a page that is left out of the navigation, or
# a name of the reference that is not there. Arguments go to `mkdocs`: `scripts/docs.sh serve` shows it while you write.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib/venv.sh"

venv=$(ensure_venv docs "$root/scripts/requirements/docs.txt")
cd "$root"
# The package as it is installed (setup.py): the rooms `kernels` and `bridge` inside it.
packages=build/docs-packages
rm -rf "$packages" && mkdir -p "$packages"/easytorch/{bridge,kernels}
ln -s "$root"/easytorch/* "$packages/easytorch/"
for room in bridge kernels; do
    touch "$packages/easytorch/$room/__init__.py"
    ln -s "$root/$room"/* "$packages/easytorch/$room/"
done
[[ $# -gt 0 ]] || set -- build --quiet
# mkdocs-material says on every build that mkdocs 2 will be another program.
NO_MKDOCS_2_WARNING=1 exec "$venv/bin/python" -m mkdocs "$@"
