#!/usr/bin/env bash
# mypy over the package, strictly; pyproject.toml says where a flag is off, and why.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
# setup.py puts two folders into the package, which mypy looks for where its name says.
mkdir -p build/types/easytorch
for room in bridge kernels; do
  ln -sfn "../../../$room" "build/types/easytorch/$room"
done
"$python" -m mypy -p easytorch -p easytorch.bridge -p easytorch.kernels
