"""Stage 2: the conversion command to Flax and back, bit for bit, and the Flax parameters run by plain jax."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from easytorch.cli.demo.sentences import Encoded, sentence_embeddings
from easytorch.cli.demo.stage import Demo
from easytorch.operations.dispatch.check import relative_rms_error

TOLERANCE = 1e-5


def run(demo: Demo, weights: Path, encoded: Encoded) -> None:
    flax, back = demo.output / "minilm-flax", demo.output / "minilm-torch"
    demo.easytorch("convert", str(weights), str(flax), "--to", "flax")
    demo.easytorch("convert", str(flax), str(back), "--to", "torch")
    demo.made("MiniLM as a Flax checkpoint", flax)
    demo.made("and back as torch safetensors", back)
    count, different = compare_bits(weights / "model.safetensors", back / "model.safetensors")
    demo.check(
        "tensors bit-identical after torch -> Flax -> torch",
        f"{count - len(different)} of {count}" + (f", not {', '.join(different)}" if different else ""),
        not different,
    )
    hidden = run_in_jax(flax, encoded)
    mask = encoded.inputs["attention_mask"]
    for what, got, expected in (
        ("last hidden state", hidden, encoded.hidden),
        ("sentence embeddings", sentence_embeddings(hidden, mask), sentence_embeddings(encoded.hidden, mask)),
    ):
        error = relative_rms_error(got, expected)
        demo.check(
            f"{what} by plain jax against torch, relative RMS difference",
            f"{error:.1e} (allowed {TOLERANCE:.0e})",
            error <= TOLERANCE,
        )


def compare_bits(first: Path, second: Path) -> tuple[int, list[str]]:
    """How many tensors the two files have, and the names of those that only one has or that differ in any bit."""
    from safetensors.numpy import load_file

    before, after = load_file(first), load_file(second)
    names = sorted({*before, *after})
    different = [
        name for name in names if name not in before or name not in after or not _same_bits(before[name], after[name])
    ]
    return len(names), different


def _same_bits(first: np.ndarray, second: np.ndarray) -> bool:
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


def run_in_jax(folder: Path, encoded: Encoded) -> torch.Tensor:
    """The last hidden state (B, T, D) that a jax function computes from the converted parameters."""
    import jax

    from easytorch.bridge.load_tree import load_tree
    from easytorch.cli.demo.jax_bert import bert

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ids, types, mask = (encoded.inputs[name].numpy() for name in ("input_ids", "token_type_ids", "attention_mask"))
    run = jax.jit(bert, static_argnames=("num_heads", "epsilon"))
    params = jax.tree.map(jax.numpy.asarray, load_tree(folder))
    hidden = run(
        params, ids, types, mask, num_heads=config["num_attention_heads"], epsilon=config["layer_norm_eps"]
    )  # fmt: skip
    return torch.from_numpy(np.array(hidden))
