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
# mypy knows nothing of the two rooms that setup.py puts into the package: it reads them where they stand.
"$python" -m mypy --explicit-package-bases bridge kernels
