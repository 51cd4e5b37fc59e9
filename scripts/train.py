r"""Train a causal language model: `python scripts/train.py ...` or `torchrun --nproc-per-node N scripts/train.py ...`.

    torchrun --standalone --nproc-per-node 2 scripts/train.py --text corpus.txt --output runs/first \
        --model '{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4}' --steps 500

`--help` lists the settings; `--config run.json` reads them from a file.
"""

import sys
from pathlib import Path

# torchrun puts scripts/ on the path; this makes the script run from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from easytorch.training.arguments import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], "train.py"))
