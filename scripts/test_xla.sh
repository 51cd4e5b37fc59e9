#!/usr/bin/env bash
# Runs tests/xla on torch_xla 2.9 (PJRT on the CPU) in an environment of its own, made once (about 3 minutes, 7 GB) and
# kept outside the checkout.
#
#   scripts/test_xla.sh                     everything
#   scripts/test_xla.sh -k "bert and sgd"   further arguments go to pytest
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/lib/venv.sh"

venv=$(ensure_venv xla "$root/scripts/requirements/xla.txt")
cd "$root"
export PJRT_DEVICE=CPU JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1
# Compiling is most of the time these tests take; without LLVM's optimizations it takes half.
export XLA_FLAGS=${XLA_FLAGS---xla_backend_optimization_level=0}
exec "$venv/bin/python" -m pytest -q tests/xla "$@"
