"""A train step over a mesh of TPUs, compiled without one: its memory, collectives and FLOPs on each device.

    python scripts/spmd_report.py trace step.hlo --mesh fsdp=2,tp=2 --config llama.json --sequence 2048
    python scripts/spmd_report.py compile step.hlo --chips v5e v6e

`trace` needs torch_xla (scripts/test_xla.sh makes an environment): the step (forward, backward, AdamW) of a native
model, as torch_xla's SPMD traces it with the TPU's kernels inside, is written as HLO. Nothing of it runs; the host has
as many virtual devices as the mesh. `compile` needs jax and libtpu, of the same environment or another: libtpu's
compiler takes the HLO for the topologies of `tpu_compile.CHIPS`, of four devices each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# 1.2 B parameters, of which two layers show what every layer adds
DEFAULT = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}  # fmt: skip


def trace(given: argparse.Namespace) -> None:
    """Write the HLO of one step, and a JSON file beside it that says of what."""
    from easytorch.distributed.mesh import parse_axes

    sizes = parse_axes(given.mesh, 4)
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(math.prod(sizes.values())), "JAX_PLATFORMS": "cpu"}
    import torch
    from transformers import AutoConfig

    import easytorch
    from easytorch.distributed import make_mesh, shard_batch, shard_model
    from easytorch.distributed.xla_spmd import shard_optimizer
    from easytorch.kernels.interop.step_hlo import hlo_of_step

    config = json.loads(given.config.read_text()) if given.config else DEFAULT
    mesh = make_mesh(given.mesh, "xla")
    model = easytorch.AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=getattr(torch, given.dtype)
    ).train()
    shard_model(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=True)
    with_moments(optimizer)
    shard_optimizer(model, optimizer)
    tokens = torch.zeros(given.batch, given.sequence, dtype=torch.int64)
    batch = shard_batch({"input_ids": tokens, "labels": tokens}, mesh)
    began = time.perf_counter()
    hlo = hlo_of_step(lambda: model(**batch, use_cache=False).loss, optimizer)
    given.file.write_bytes(hlo)
    facts = {
        "mesh": given.mesh, "batch": given.batch, "sequence": given.sequence, "dtype": given.dtype, "config": config,
        "parameters": sum(one.numel() for one in model.parameters()), "torch_xla": _version("torch_xla"),
    }  # fmt: skip
    given.file.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{given.file}: {len(hlo) / 1e6:.1f} MB of HLO, traced in {time.perf_counter() - began:.1f} s")


def with_moments(optimizer: Any) -> None:
    """The state of every step but the first, which makes it."""
    import torch

    for group in optimizer.param_groups:
        for one in group["params"]:
            zeros = {key: torch.zeros_like(one) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[one] = {"step": torch.zeros((), device=one.device), **zeros}


def compile_(given: argparse.Namespace) -> None:
    from easytorch.kernels.interop.tpu_compile import CHIPS, ENVIRONMENT

    os.environ |= ENVIRONMENT
    from easytorch.kernels.interop.tpu_compile_hlo import compile_hlo, figures_of

    beside = given.file.with_suffix(".json")
    if beside.is_file():
        print(beside.read_text().strip())
    print(f"jax {_version('jax')}, libtpu {_version('libtpu')}; of one device:")
    for chip in given.chips:
        began = time.perf_counter()
        figures = figures_of(compile_hlo(given.file.read_bytes(), CHIPS[chip]))
        taken = time.perf_counter() - began
        print(f"\n{CHIPS[chip]}, compiled in {taken:.0f} s: peak {figures.peak / 2**20:,.0f} MiB (arguments", end=" ")
        print(f"{figures.arguments / 2**20:,.0f}, temporaries {figures.temporaries / 2**20:,.0f}, code", end=" ")
        print(f"{figures.code / 2**20:,.0f}), {figures.flops / 1e12:.3f} TFLOP, {figures.kernels} Pallas kernels")
        for kind, traffic in sorted(figures.collectives.items()):
            print(f"  {kind:20} {traffic.count:4}  {traffic.bytes / 2**20:10,.1f} MiB")


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    tracing = commands.add_parser("trace", help="write the HLO of a step (needs torch_xla)")
    tracing.add_argument("file", type=Path)
    tracing.add_argument("--mesh", default="fsdp=2,tp=2", help="axes over four devices (fsdp=2,tp=2)")
    tracing.add_argument("--config", type=Path, help="a config of transformers as JSON (two layers of a Llama 1B)")
    tracing.add_argument("--batch", type=int, default=8, help="sequences of all devices (8)")
    tracing.add_argument("--sequence", type=int, default=2048, help="tokens (2048)")
    tracing.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    tracing.set_defaults(run=trace)
    compiling = commands.add_parser("compile", help="compile it for TPUs (needs jax and libtpu)")
    compiling.add_argument("file", type=Path)
    compiling.add_argument("--chips", nargs="+", default=["v5e", "v6e"], help="(v5e v6e)")
    compiling.set_defaults(run=compile_)
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
