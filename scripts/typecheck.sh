#!/usr/bin/env bash
# mypy over the rooms users import from. The bodies of models and kernels are checked as far as they are annotated.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
"$python" -m mypy -p easytorch
# mypy knows nothing of the two rooms that setup.py puts into the package: it reads them where they stand.
"$python" -m mypy --explicit-package-bases bridge kernels
