#!/usr/bin/env bash
# The backend xla on several versions of jax and jaxlib, each in an environment of its own: jaxlib's private names
# differ between them. Usage: scripts/test_jaxlib_versions.sh [folder for the environments] [versions...]
set -euo pipefail
cd "$(dirname "$0")/.."
home=${1:-${TMPDIR:-/tmp}/jaxlib-versions}
versions=("${@:2}")
[ ${#versions[@]} -gt 0 ] || versions=(0.7.1 0.8.3 0.9.2 0.10.2)
for version in "${versions[@]}"; do
    if [ ! -x "$home/jax$version/bin/pytest" ]; then
        "${PYTHON:-python}" -m venv "$home/jax$version"
        "$home/jax$version/bin/pip" install --quiet "jax==$version" "jaxlib==$version" flatbuffers pytest
    fi
    echo "jaxlib $version"
    PYTHONPATH=$PWD JAX_PLATFORMS=cpu EASYTORCH_XLA_CACHE='' \
        "$home/jax$version/bin/python" -m pytest -q -p no:cacheprovider tests/backends/test_xla_program.py
done
