"""Compare what `easytorch plan` predicts with what training takes: three small models over two gloo processes.

    scripts/check_plan.py [--models dense qk-norms experts] [--compiler auto] [--no-torchrun]

Each process trains for three steps over fsdp=2 (`shard_model`, AdamW, float32). Counted: bytes of its parameters,
gradients and optimizer state. Measured: the rise of its largest resident memory from before the model was made, which
includes what torch's allocator and gloo keep. The plan's activations are those of the XLA program, of which the second
comparison is: the step of four layers, compiled with all of them, against the extrapolation from one and two
(--no-torchrun: that alone). Exits with 1 where the counted bytes differ by 1 %, or the program's by 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEVICES = 2
if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from easytorch.plan.compiled import compile_step, compiler_devices  # noqa: E402
from easytorch.plan.estimate import OPTIMIZERS, make_plan  # noqa: E402
from easytorch.plan.shapes import config_of  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "intermediate_size": 1376, **SIZES},
    "qk-norms": {"model_type": "qwen3", "intermediate_size": 1376, **SIZES, "num_hidden_layers": 4},
    "experts": {
        "model_type": "qwen3_moe", "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 8,
        "num_experts_per_tok": 2, **SIZES,
    },
}  # fmt: skip
LENGTH, ROWS, STEPS = 512, 2, 3


def train_here(name: str) -> None:
    """One process: prints, as JSON, the bytes that it counts and the rise of its largest resident memory."""
    import torch.distributed as dist

    import easytorch
    from easytorch.distributed import make_mesh, shard_model

    dist.init_process_group("gloo")
    mesh = make_mesh("fsdp=-1")
    before = _resident()
    model = easytorch.AutoModelForCausalLM.from_config(config_of(MODELS[name]), dtype=torch.float32).train()
    shard_model(model, None, mesh)
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    ids = torch.randint(0, SIZES["vocab_size"], (ROWS // dist.get_world_size(), LENGTH))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    counted = {
        "parameters": sum(_local(one) for one in model.parameters()),
        "gradients": sum(_local(one.grad) for one in model.parameters()),
        "optimizer": sum(_local(one) for state in optimizer.state.values() for one in state.values() if one.dim()),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
    }
    if dist.get_rank() == 0:
        print(json.dumps(counted), flush=True)
    dist.destroy_process_group()


def _local(tensor: Any) -> int:
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(part.numel() * part.element_size())


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def measured(name: str) -> dict[str, int]:
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(DEVICES), __file__,
         "--train", name],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    found: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return found


def predicted(name: str, layers: int | None, compiler: str) -> Any:
    settings = dict(MODELS[name])
    if layers is not None:
        settings["num_hidden_layers"] = layers
    return make_plan(
        config_of(settings), f"fsdp={DEVICES}", "v5p", batch_size=ROWS, sequence_length=LENGTH, precision="fp32",
        recompute=False, compiler=compiler,
    )  # fmt: skip


def compiled_whole(name: str, layers: int, compiler: str) -> int:
    """Bytes of a device that the compiler states for a step with all its layers."""
    from easytorch.frontend.step_layout import layout_of
    from easytorch.plan.balanced import balance_experts
    from easytorch.plan.estimate import _on_meta

    model = _on_meta(config_of({**MODELS[name], "num_hidden_layers": layers}), torch.float32)
    layout = layout_of(model, {"fsdp": DEVICES}, None)
    balance_experts(model, layout.axes)
    _, devices = compiler_devices(DEVICES, compiler)
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    return compile_step(
        model, optimizer, layout, (ROWS, LENGTH), devices, recompute=False, autocast=None
    ).memory  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--compiler", default="auto")
    parser.add_argument("--no-torchrun", action="store_true", help="the second comparison alone")
    parser.add_argument("--train", metavar="MODEL", help="what a process that torchrun started trains")
    given = parser.parse_args()
    if given.train:
        train_here(given.train)
        return 0
    failed = 0
    for name in given.models:
        if not given.no_torchrun:
            plan, found = predicted(name, None, given.compiler), measured(name)
            for key in ("parameters", "gradients", "optimizer", "memory"):
                ratio = getattr(plan, key) / found[key]
                failed += key != "memory" and abs(ratio - 1) > 0.01
                print(f"{name:8s} {key:10s} {getattr(plan, key):>12,} of {found[key]:>12,}: {ratio:.3f}", flush=True)
        few, whole = predicted(name, 4, given.compiler), compiled_whole(name, 4, given.compiler)
        ratio = few.memory / whole
        failed += abs(ratio - 1) > 0.15
        print(f"{name:8s} program    {few.memory:>12,} of {whole:>12,}: {ratio:.3f}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
