"""One of three processes: FSDP2's collectives over gloo, and layers that use them, against gloo's own."""

from __future__ import annotations

import copy
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig

from easytorch.distributed import fully_sharded
from easytorch.distributed.gloo import DirectAllGather, DirectReduceScatter
from easytorch.layers import deferred_logits
from easytorch.models.llama import LlamaForCausalLM
from tests.processes import leave_group


def collectives(dtype: torch.dtype) -> None:
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    ranks = [torch.randn(world * 35, generator=torch.Generator().manual_seed(one)).to(dtype) for one in range(world)]
    gather, reduce = DirectAllGather(), DirectReduceScatter()
    for in_place in (False, True):
        for async_op in (False, True):
            gathered = gather.allocate((world * world * 35,), dtype=dtype, device=torch.device("cpu")).fill_(torch.nan)
            own = gathered.view(world, -1)[rank].copy_(ranks[rank]) if in_place else ranks[rank]
            work = gather(gathered, own, group, async_op=async_op)
            assert (work is not None) == async_op
            if work is not None:
                assert work.wait()
            assert torch.equal(gathered, torch.cat(ranks))
    for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, world)):
        output = reduce.allocate((35,), dtype=dtype, device=torch.device("cpu")).fill_(torch.nan)
        assert reduce(output, ranks[rank], group, op) is None
        wanted = torch.stack(ranks).double().sum(0).view(world, -1)[rank] / divisor
        error = (output - wanted).norm() / wanted.norm()
        assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype], (dtype, op, float(error))


def layers() -> None:
    """Sizes that three do not divide, one group that stays gathered, two backwards before the reduction."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 10), nn.GELU(), nn.Linear(10, 5, bias=False))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    found = dict[str, dict[str, torch.Tensor]]()
    kept, used = fully_sharded.use_direct_collectives, list[nn.Module]()
    for name in ("gloo", "direct"):
        sharded = copy.deepcopy(model)
        fully_sharded.use_direct_collectives = lambda module, group, name=name: (  # type: ignore[assignment]
            used.append(module) or kept(module, group) if name == "direct" else None  # type: ignore[func-returns-value]
        )
        fully_sharded.shard_fully(sharded, mesh, {})
        for number in range(2):
            torch.manual_seed(10 * dist.get_rank() + number)
            sharded.set_requires_gradient_sync(number == 1)  # type: ignore[operator]
            sharded(torch.randn(4, 7)).square().sum().backward()
        found[name] = {key: one.grad.full_tensor() for key, one in sharded.named_parameters()}  # type: ignore
    assert used
    for key, wanted in found["gloo"].items():
        assert (found["direct"][key] - wanted).norm() / wanted.norm() < 1e-6, key


def outputs() -> None:
    """FSDP2's hooks do not compute logits that nothing reads; who reads them gets them, and their gradients."""
    config = LlamaConfig(
        hidden_size=12, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=15,
        tie_word_embeddings=True,
    )  # fmt: skip
    deferred_logits.SMALLEST = 0
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    sharded, ids = copy.deepcopy(model), torch.arange(10)[None]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    fully_sharded.shard_fully(sharded, mesh, {})
    output = sharded(input_ids=ids, labels=ids)
    assert output.__dict__["logits"]._tensor is None
    output.loss.backward()
    wanted = model(input_ids=ids, labels=ids)
    torch.testing.assert_close(output.loss, wanted.loss)
    wanted.loss.backward()
    for (name, one), other in zip(sharded.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, msg=name)  # type: ignore[union-attr]
    # the backward pass leaves a shard of the head's weight
    torch.testing.assert_close(output.logits, wanted.logits)
    output = sharded(input_ids=ids, labels=ids)
    loss, logits = output.loss, weakref.ref(output.__dict__["logits"])
    del output
    assert logits() is None
    loss.backward()
    for one in (sharded, model):
        one.zero_grad()
        one(input_ids=ids, labels=ids).logits.square().sum().backward()
    for (name, one), other in zip(sharded.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, msg=name)  # type: ignore[union-attr]
    fully_sharded.undo(sharded)
    assert not sharded._forward_hooks


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for dtype in (torch.float32, torch.bfloat16):
        collectives(dtype)
    layers()
    outputs()
    dist.barrier()
    print(f"rank {dist.get_rank()} ok\n", end="", flush=True)
    leave_group()
