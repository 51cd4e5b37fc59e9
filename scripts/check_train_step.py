"""Train small models by one compiled program over meshes of 4 CPU devices and compare each with torch on one device.

    scripts/check_train_step.py [--steps 5] [--models dense experts] [--meshes fsdp=2,tp=2 ...] [--tpu v5e:2x2]

Same seed and data, float32: losses to 1e-5 of torch's own over all steps, weights after them to 1e-3 (Adam divides by
roots of small gradients). With --tpu the same steps are compiled by libtpu for that topology, and a line says what they
take of a chip. Exits with 1 where one differs.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEVICES = 4
if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

import easytorch  # noqa: E402
from easytorch.frontend import train_step  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2,
}  # fmt: skip
MODELS: Mapping[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "intermediate_size": 48, "tie_word_embeddings": True, **SIZES},
    "experts": {
        "model_type": "qwen3_moe", "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 4,
        "num_experts_per_tok": 2, "head_dim": 8, **SIZES,
    },
}  # fmt: skip
MESHES = ("dp=4", "fsdp=4", "tp=4", "fsdp=2,tp=2", "dp=2,sp=2")
OF_EXPERTS = ("fsdp=2,ep=2",)
TOLERANCE = {"loss": 1e-5, "weights": 1e-3}


def make(name: str, layers: int) -> torch.nn.Module:
    from transformers import AutoConfig

    torch.manual_seed(3)
    config = AutoConfig.for_model(**{**MODELS[name], "num_hidden_layers": layers})
    model: torch.nn.Module = easytorch.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.train()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def compare(name: str, mesh: str, steps: int, layers: int = 2, recompute: bool = False) -> dict[str, float]:
    """The largest relative differences of losses and of weights."""
    model = make(name, layers)
    alone = copy.deepcopy(model)
    eager, optimizer = optimizer_of(alone), optimizer_of(model)
    step = train_step(model, optimizer, mesh=mesh, max_grad_norm=1.0, recompute=recompute, backend="xla:cpu")
    worst = 0.0
    for ids in torch.randint(0, 96, (steps, 4, 12)):
        eager.zero_grad()
        wanted = alone(input_ids=ids, labels=ids, use_cache=False).loss
        wanted.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        eager.step()
        found = float(step(input_ids=ids, labels=ids, use_cache=False))
        worst = max(worst, abs(found / float(wanted.detach()) - 1))
    step.sync()
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    return {"loss": worst, "weights": max(float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs)}


def compiled_for_tpu(name: str, mesh: str, topology: str, layers: int = 2) -> Any:
    """What libtpu says of the step (`easytorch.backends.xla.aot.Facts`)."""
    model = make(name, layers)
    step = train_step(model, optimizer_of(model), mesh=mesh, max_grad_norm=1.0, recompute=True, backend="xla:cpu")
    ids = torch.zeros(4, 12, dtype=torch.long)
    return step.compile_for_tpu(topology, input_ids=ids, labels=ids, use_cache=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--meshes", nargs="+", help="for each of the models")
    parser.add_argument("--tpu", metavar="TOPOLOGY", help="compile for it, and run nothing")
    given = parser.parse_args()
    if given.tpu:
        from easytorch.kernels.interop.tpu_compile import ENVIRONMENT

        os.environ.update({name: value for name, value in ENVIRONMENT.items() if name != "JAX_PLATFORMS"})
    failed = 0
    for name in given.models:
        for mesh in given.meshes or (*MESHES, *(OF_EXPERTS if name == "experts" else ())):
            assert math.prod(int(part.partition("=")[2]) for part in mesh.split(",")) == DEVICES
            if given.tpu:
                found = compiled_for_tpu(name, mesh, given.tpu)
                print(
                    f"{name:8s} {mesh:12s} {given.tpu}: {found.memory} bytes, {found.flops:.3g} FLOPs a chip, ", end=""
                )
                print(", ".join(f"{n} {kind} ({size} B)" for kind, (n, size) in found.collectives.items()), flush=True)
                continue
            worst = compare(name, mesh, given.steps)
            good = all(worst[key] <= bound for key, bound in TOLERANCE.items())
            failed += not good
            words = ", ".join(f"{key} {value:.1e}" for key, value in worst.items())
            print(f"{'ok  ' if good else 'FAIL'} {name:8s} {mesh:12s} {given.steps} steps: {words}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
