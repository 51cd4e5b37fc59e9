#!/usr/bin/env bash
# mypy over the package: strictly, but for models, layers and kernels, which are checked as far as they are annotated.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
# setup.py puts two folders into the package, which mypy looks for where its name says.
mkdir -p build/types/easytorch
for room in bridge kernels; do
  ln -sfn "../../../$room" "build/types/easytorch/$room"
done
"$python" -m mypy -p easytorch
# These two by themselves, as far as they are annotated: what they import under the package's name is Any here.
"$python" -m mypy --config-file= --python-version 3.11 --ignore-missing-imports --explicit-package-bases bridge kernels
