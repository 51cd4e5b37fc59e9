"""`python -m easytorch.training` and `torchrun -m easytorch.training`: one process of a training run."""

import sys

from easytorch.training.arguments import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], "python -m easytorch.training"))
