"""Times one process until it has the first token of a prompt, for scripts/bench_generation.py.

    python scripts/generation/first_token.py MODEL PROMPT DTYPE

What `easytorch generate` cannot do without: the imports, the weights, the tokenizer, and one forward of the prompt.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import easytorch
from easytorch.auto.tokenizer import load_tokenizer


def main() -> None:
    folder, prompt, dtype = sys.argv[1:]
    model = easytorch.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ids = load_tokenizer(folder)(prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        token = int(model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
    print(token, flush=True)


if __name__ == "__main__":
    main()
