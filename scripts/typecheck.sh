#!/usr/bin/env bash
# mypy over the rooms users import from. The bodies of models and kernels are checked as far as they are annotated.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m mypy -p easytorch
