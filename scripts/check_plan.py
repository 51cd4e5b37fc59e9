"""Compare what `easytorch plan` predicts with what training takes: three small models, alone and over two processes.

    scripts/check_plan.py [--models dense experts latent] [--meshes dp=1 fsdp=2 tp=2] [--compiler auto] [--program]
    scripts/check_plan.py --step [--models ...] [--meshes dp=1 fsdp=2]

Real processes (gloo) train for three steps (`shard_model`, AdamW, float32). Counted: bytes of parameters, gradients and
optimizer state. Measured, in the process that has most: the most bytes that torch's allocator has given out at a time
during the last step (`torch.profiler`, every allocation and release), and beside it, for what is not torch's tensors,
the rise of resident memory. `making` is the most that was given out while the model was made and divided.

--step: the program that plans are of, `train_step`, on as many CPU devices of one process: what resident memory grows
by at most during the third step, of a device, and what it keeps between steps; predicted from two and three layers.
--program: the step of four layers, compiled with all of them, against the extrapolation from two and three.
Exits with 1 where counted bytes differ by 1 %, or those of `--step` or `--program` by 15 %.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
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
    "experts": {
        "model_type": "qwen3_moe", "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 8,
        "num_experts_per_tok": 2, **SIZES,
    },
    "latent": {
        "model_type": "deepseek_v3", "intermediate_size": 1024, "moe_intermediate_size": 256, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2, "q_lora_rank": 192,
        "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, **SIZES,
        "num_key_value_heads": 8, "head_dim": 32,  # of the rotated part
    },
}  # fmt: skip
LENGTH, ROWS, STEPS = 512, 2, 3
MESHES = ("dp=1", "fsdp=2", "tp=2")


def train_here(name: str, axes: str) -> None:
    """One process: prints, as JSON, the bytes that it counts and the most that were allocated."""
    import torch.distributed as dist

    import easytorch
    from easytorch.distributed import make_mesh, shard_model
    from easytorch.training.gradients import clip, total_norm

    devices = _devices(axes)
    if devices > 1:
        dist.init_process_group("gloo")
    resident = _resident()
    torch.manual_seed(0)
    with _Allocations() as making:
        model = easytorch.AutoModelForCausalLM.from_config(config_of(MODELS[name]), dtype=torch.float32).train()
        if devices > 1:
            shard_model(model, None, make_mesh(axes))
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS["adamw"](parameters)
    ids = torch.randint(0, SIZES["vocab_size"], (ROWS // (devices if "fsdp" in axes else 1), LENGTH))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        clip(parameters, 1.0, total_norm(one.grad for one in parameters if one.grad is not None))
        optimizer.step()

    for _ in range(STEPS - 1):
        step()
    optimizer.zero_grad()
    kept = sum(_local(one) for one in (*model.parameters(), *model.buffers(), ids))
    kept += sum(_local(one) for state in optimizer.state.values() for one in state.values())
    with _Allocations() as training:
        step()
    counted = {
        "parameters": sum(_local(one) for one in model.parameters()),
        "gradients": sum(_local(one.grad) for one in model.parameters() if one.grad is not None),
        "optimizer": sum(_local(one) for state in optimizer.state.values() for one in state.values() if one.dim()),
        "memory": kept + training.most,
        "making": making.most,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident,
    }
    every: list[Any] = [counted]
    if devices > 1:
        every = [None] * devices
        dist.all_gather_object(every, counted)
    if devices == 1 or dist.get_rank() == 0:
        print(json.dumps(max(every, key=lambda one: one["memory"])), flush=True)
    if devices > 1:
        dist.destroy_process_group()


def step_here(name: str, axes: str) -> None:
    """One process: prints, as JSON, what a device of the compiled step keeps and takes, experts evenly."""
    from easytorch.frontend import train_step
    from easytorch.plan.balanced import balance_experts

    devices = _devices(axes)
    mesh = axes if devices > 1 else None
    torch.manual_seed(0)
    import easytorch

    model = easytorch.AutoModelForCausalLM.from_config(config_of(MODELS[name]), dtype=torch.float32).train()
    balance_experts(model, {axes.partition("=")[0]: devices} if devices > 1 else {})
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    step = train_step(model, optimizer, mesh=mesh, max_grad_norm=1.0, backend="xla:cpu")
    ids = torch.randint(0, SIZES["vocab_size"], (ROWS, LENGTH))
    for _ in range(STEPS):
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is not taken again without being seen
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak is from here on
        before = _status("VmRSS")
        float(step(input_ids=ids, labels=ids, use_cache=False))
        taken = _status("VmHWM") - before
    print(json.dumps({"taken": taken // devices}), flush=True)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class _Allocations:
    """The most bytes that torch has given out at a time within the block, beside those from before it."""

    most = 0

    def __enter__(self) -> _Allocations:
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        kineto: Any = self._profile.profiler
        events = [one for one in kineto.kineto_results.events() if one.name() == "[memory]"]
        now = 0
        for one in sorted(events, key=lambda one: one.start_ns()):
            now += one.nbytes()
            self.most = max(self.most, now)


def _devices(axes: str) -> int:
    return math.prod(int(part.partition("=")[2]) for part in axes.split(","))


def _local(tensor: Any) -> int:
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(part.numel() * part.element_size())


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * resource.getpagesize()


def measured(name: str, axes: str, work: str = "--train") -> dict[str, int]:
    devices = _devices(axes) if work == "--train" else 1
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)] if devices > 1 else []
    result = subprocess.run(
        [sys.executable, *start, __file__, work, name, axes],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    found: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return found


def predicted(name: str, axes: str, layers: int | None, compiler: str) -> Any:
    settings = dict(MODELS[name])
    if layers is not None:
        settings["num_hidden_layers"] = layers
    return make_plan(
        config_of(settings), axes, "v5p", batch_size=ROWS, sequence_length=LENGTH, precision="fp32", recompute=False,
        compiler=compiler,
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
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    parser.add_argument("--compiler", default="auto")
    parser.add_argument("--program", action="store_true", help="the second comparison alone")
    parser.add_argument("--train", nargs=2, metavar=("MODEL", "MESH"), help="what a process trains")
    parser.add_argument("--step", action="store_true", help="the compiled step alone, by the CPU's compiler")
    parser.add_argument("--run-step", nargs=2, metavar=("MODEL", "MESH"), help="whose compiled step a process takes")
    given = parser.parse_args()
    if given.train or given.run_step:
        train_here(*given.train) if given.train else step_here(*given.run_step)
        return 0
    failed = 0
    for name in given.models:
        for axes in given.meshes if given.step else ():
            plan, taken = predicted(name, axes, None, "cpu"), measured(name, axes, "--run-step")["taken"]
            pairs = {
                "within": (plan.gradients + plan.activations, taken),
                "memory": (plan.memory, plan.parameters + plan.optimizer + taken),
            }
            for key, (few, found_) in pairs.items():
                failed += abs(few / found_ - 1) > 0.15
                print(f"{name:8s} {axes:6s} step {key:7s} {few:>12,} of {found_:>12,}: {few / found_:.3f}", flush=True)
        for axes in () if given.program or given.step else given.meshes:
            plan, found = predicted(name, axes, None, given.compiler), measured(name, axes)
            for key in ("parameters", "gradients", "optimizer", "memory"):
                ratio = getattr(plan, key) / found[key]
                failed += key != "memory" and abs(ratio - 1) > 0.01
                print(f"{name:8s} {axes:6s} {key:10s} {getattr(plan, key):>12,} of {found[key]:>12,}: {ratio:.3f}")
            rest = found["memory"] - found["parameters"] - found["gradients"] - found["optimizer"]
            print(
                f"{name:8s} {axes:6s} activations {plan.activations:>11,} of {rest:>12,}: {plan.activations / rest:.3f}"
            )
            print(f"{name:8s} {axes:6s} making {found['making']:,}, resident {found['resident']:,}", flush=True)
        if given.program:
            few, whole = predicted(name, "fsdp=2", 4, given.compiler), compiled_whole(name, 4, given.compiler)
            ratio = few.memory / whole
            failed += abs(ratio - 1) > 0.15
            print(f"{name:8s} program    {few.memory:>12,} of {whole:>12,}: {ratio:.3f}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
