"""Models over meshes of four virtual devices, by SPMD: run by test_spmd.py in a process of its own. Prints "ok"."""

from __future__ import annotations

import copy

import torch
import torch_xla
from torch_xla.debug import metrics
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from easytorch.distributed import make_mesh, shard_batch, shard_model
from easytorch.distributed.xla_spmd import mark
from easytorch.kernels.cross_entropy import fused_linear
from easytorch.layers import deferred_logits
from easytorch.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from easytorch.models.qwen3 import Qwen3ForCausalLM
from easytorch.models.qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeForCausalLM

SIZES = {
    "vocab_size": 62, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip
STEPS = 5


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def tied_qwen3() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))


def experts() -> Qwen3MoeForCausalLM:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, output_router_logits=True))


def wrapped(model, mesh):
    """torch_xla's FSDPv2, by its own wrapper."""

    def shard_output(output, mesh) -> None:
        tensor = output if isinstance(output, torch.Tensor) else output.logits
        mark(tensor, mesh, ("fsdp", None, None))

    def policy(module, recurse, unwrapped_params) -> bool:
        return transformer_auto_wrap_policy(
            module, recurse, unwrapped_params, {LlamaDecoderLayer, Qwen3MoeDecoderLayer}
        )

    return SpmdFullyShardedDataParallel(model, mesh=mesh, shard_output=shard_output, auto_wrap_policy=policy)


def sharded(model, mesh):
    return shard_model(model, mesh=mesh)


CASES = {
    llama: [("dp=4", sharded), ("fsdp=2,tp=2", sharded), ("dp=2,fsdp=2", sharded), ("fsdp=4", wrapped)],
    tied_qwen3: [("fsdp=4", sharded), ("dp=2,tp=2", sharded)],
    experts: [("fsdp=2,ep=2", sharded), ("ep=2,tp=2", sharded), ("dp=4", sharded), ("fsdp=4", wrapped)],
}


def train(model, mesh=None):
    """The loss of each step, the gradients of the first, and the programs that each step compiled."""
    # eps far above the rounding of gradients: Adam's first step is otherwise the sign of one that may be noise
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, capturable=mesh is not None)
    generator = torch.Generator().manual_seed(1)
    losses, programs, gradients = [], [], {}
    for step in range(STEPS):
        ids = torch.randint(0, SIZES["vocab_size"], (4, 16), generator=generator)
        before = metrics.counter_value("UncachedCompile") or 0
        batch = {"input_ids": ids, "labels": ids}
        if mesh is not None:
            batch = shard_batch(batch, mesh)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        kept = {name.replace("_orig_module.", ""): one.grad for name, one in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        if mesh is not None:
            torch_xla.sync()
        programs.append((metrics.counter_value("UncachedCompile") or 0) - before)
        losses.append(loss.detach().cpu())
        if step == 0:
            gradients = {name: grad.cpu() for name, grad in kept.items()}
    return torch.stack(losses), gradients, programs


def main() -> None:
    # before the first backward pass: autograd makes a queue for each device that it knows then
    meshes = {axes: make_mesh(axes, "xla") for cases in CASES.values() for axes, _ in cases}
    fused_linear.LOGITS_AT_ONCE = 8 * SIZES["vocab_size"]
    for make, cases in CASES.items():
        # Llama's loss by chunks of eight rows, and that of the others by its logits
        deferred_logits.SMALLEST = 0 if make is llama else 2**22
        torch.manual_seed(0)
        model = make().train()
        start = copy.deepcopy(model)
        want, gradients, _ = train(model)
        assert abs(want[-1] - want[0]) > 0.01
        for axes, over in cases:
            losses, found, programs = train(over(copy.deepcopy(start), meshes[axes]), meshes[axes])
            worst = float(((losses - want).abs() / want).max())
            errors = {name: float((found[name] - one).norm() / one.norm()) for name, one in gradients.items()}
            print(
                make.__name__, axes, over.__name__, f"loss {worst:.1e}, gradient {max(errors.values()):.1e}", programs
            )
            assert worst < 1e-5, (axes, losses, want)
            assert found.keys() == gradients.keys() and max(errors.values()) < 1e-5, errors
            # the first step makes the optimizer's state; all others are one program
            assert programs[:2] == [1, 1] and not any(programs[2:]), programs
    print("ok")


if __name__ == "__main__":
    main()
