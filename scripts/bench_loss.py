"""The memory and time of `compute_loss` where the vocabulary is large, against the logits themselves.

    python scripts/bench_loss.py [--tokens 4096] [--vocabulary 131072] [--hidden 256]

Prints the most memory that a step (forward and backward) takes beyond the model, its gradients and the hidden states,
as a share of the float32 logits, which a step that forms them holds at least twice. The bar is 0.35. Linux only: it is
the process's own high-water mark (VmHWM).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import transformers

import easytorch
from easytorch.protocol import LossConfig, compute_loss

SETTINGS = {
    "default": LossConfig(),
    "z-loss, smoothing": LossConfig(z_loss=1e-4, label_smoothing=0.1),
    "chunk_vocab_size=4096": LossConfig(chunk_vocab_size=4096),
}


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=given.vocabulary, hidden_size=given.hidden, intermediate_size=given.hidden, num_hidden_layers=1,
        num_attention_heads=4, dtype=given.dtype,
    )  # fmt: skip
    model = easytorch.AutoModelForCausalLM.from_config(config).train()
    ids = torch.randint(given.vocabulary, (1, given.tokens))
    weights = torch.rand(given.vocabulary)
    settings = SETTINGS | {"class weights, smoothing": LossConfig(class_weights=weights, label_smoothing=0.1)}
    logits = 4 * given.tokens * given.vocabulary
    print(f"{given.tokens} tokens, {given.vocabulary} words: logits {logits / 2**20:.0f} MiB")
    model(input_ids=ids[:, :64], labels=ids[:, :64]).loss.backward()  # gradients are there
    for name, loss_config in settings.items():
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark begins anew
        before, start = status("VmRSS"), time.perf_counter()
        compute_loss(model, input_ids=ids, loss_config=loss_config)[1].loss.backward()
        peak = status("VmHWM") - before
        print(f"{name:28} {peak / 2**20:6.0f} MiB  {peak / logits:.3f}  {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
