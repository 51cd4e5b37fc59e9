"""What each process of test_ring.py's torchrun does: python -m torch.distributed.run ... ring_ranks.py.

Prints "rank r ok" when everything held.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from easytorch.kernels.attention import native
from easytorch.kernels.ring.layout import shard
from easytorch.operations import OperationMetadata, OperationRegistry, UnsupportedOperationError
from easytorch.operations.dispatch.check import relative_rms_error
from tests.processes import leave_group

B, T, H, K, D = 2, 48, 6, 2, 12


def features_of(name: str) -> tuple[dict, dict]:
    """Differentiable ones and the others, for the whole sequence."""
    causal = {"causal": True}
    if name == "window":
        return {}, {**causal, "sliding_window": 9}
    if name == "everything":
        ids = torch.arange(T).mul(3).div(T, rounding_mode="floor").repeat(B, 1)
        mask = torch.rand(B, 1, T, T) > 0.4
        mask[:, :, 5] = False
        return {"bias": torch.randn(B, H, T, T).double(), "sinks": torch.randn(H).double()}, {
            **causal, "softcap": 2.0, "mask": mask, "query_segment_ids": ids, "key_segment_ids": ids,
            "dropout_prob": 0.2, "seed": 2**40 + 3, "softmax_scale": 0.3,
        }  # fmt: skip
    return {}, causal


def check_equals_the_definition(mesh, size: int, rank: int) -> None:
    for name in ("causal", "window", "everything"):
        for layout in ("contiguous", "zigzag"):
            torch.manual_seed(3)
            tensors = [torch.randn(B, T, heads, D, dtype=torch.float64) for heads in (H, K, K)]
            extra, features = features_of(name)
            whole = {**dict(zip(("query", "key", "value"), tensors, strict=True)), **extra}
            grad = torch.randn(B, T, H, D, dtype=torch.float64)
            leaves = {key: x.requires_grad_() for key, x in whole.items()}
            output, _ = native.attention(**leaves, **features)
            wanted = dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), grad), strict=True))

            def own(key, x, layout=layout):
                if key in ("mask", "bias"):
                    return shard(x, rank, size, 2, layout)
                return shard(x, rank, size, 1, layout) if isinstance(x, torch.Tensor) and key != "sinks" else x

            attend = OperationRegistry.create("ring", OperationMetadata(mesh=mesh, sequence_layout=layout))
            local = {key: own(key, x.detach()).requires_grad_() for key, x in whole.items()}
            given = {key: own(key, x) for key, x in features.items()}
            result = attend(**local, **given).attention_outputs
            got = dict(zip(local, torch.autograd.grad(result, list(local.values()), own("", grad)), strict=True))
            if "sinks" in got:
                dist.all_reduce(got["sinks"])
            assert relative_rms_error(result, own("", output)) < 1e-12, (name, layout)
            for key in got:
                assert relative_rms_error(got[key], own(key, wanted[key])) < 1e-12, (name, layout, key)


def check_modes(mesh, size: int, rank: int) -> None:
    """Under torch.compile, checkpointing, autocast and without gradients: the same numbers."""
    torch.manual_seed(4)
    shards = [shard(torch.randn(B, T, heads, D), rank, size).requires_grad_() for heads in (H, K, K)]
    attend = OperationRegistry.create("ring", OperationMetadata(mesh=mesh))

    def call(query, key, value):
        return attend(query, key, value, causal=True).attention_outputs

    def results(function):
        output = function(*shards)
        return [output, *torch.autograd.grad(output.square().sum(), shards)]

    plain = results(call)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for other in (compiled, lambda *x: checkpoint(call, *x, use_reentrant=False)):
        for got, want in zip(results(other), plain, strict=True):
            torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(call(*shards), plain[0])
    # without a seed every rank must drop by the same one: on a ring where all hold the same keys and queries, the
    # weights that rank 0 keeps are those of the definition under its seed
    torch.manual_seed(rank)
    dropped = attend(*shards, dropout_prob=0.5).attention_outputs
    torch.manual_seed(0)
    seed = torch.randint(0, 2**31 - 1, (), dtype=torch.int64)
    torch.testing.assert_close(dropped, attend(*shards, dropout_prob=0.5, seed=seed).attention_outputs)


def check_errors(mesh, size: int, rank: int) -> None:
    """Every rank raises, none waits for the others."""
    attend = OperationRegistry.create("ring", OperationMetadata(mesh=mesh))
    zigzag = OperationRegistry.create("ring", OperationMetadata(mesh=mesh, sequence_layout="zigzag"))
    query, key = torch.randn(1, 6, 4, 8), torch.randn(1, 6, 2, 8)

    def refused(message, function):
        try:
            function()
        except ValueError as error:
            assert message in str(error), f"{error} instead of {message}"
        else:
            raise AssertionError(f"{message}: was not refused")

    refused("softcap differs between rank", lambda: attend(query, key, key, softcap=1.0 + rank))
    refused("left differs between rank", lambda: attend(query, key, key, sliding_window=(rank, 0)))
    refused("the local key length differs", lambda: attend(query, key[:, rank:], key[:, rank:]))
    refused("seed differs", lambda: attend(query, key, key, dropout_prob=0.1, seed=rank))
    wrong = "head_dim differ" if rank == 0 else "rank 0 of the ring refused its part"
    refused(wrong, lambda: attend(query[..., rank == 0 :], key, key))
    refused("two chunks of one length, got 5 queries", lambda: zigzag(query[:, 1:], key, key))
    refused("the ring none of them", lambda: OperationRegistry.create("ring")(query, key, key))
    grad = query.clone().requires_grad_(rank == 0)
    refused("whether gradients are recorded differs", lambda: attend(grad, key, key))
    try:
        OperationRegistry.create("ring", OperationMetadata(mesh=mesh, sequence_axis="tp"))(query, key, key)
    except UnsupportedOperationError as error:
        assert "no axis of the mesh (dp, sp)" in str(error)
    # and it still works
    attend(query, key, key)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, rank = int(sys.argv[1]), dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("dp", "sp"))
    group = mesh.get_group("sp")
    check_errors(mesh, size, group.rank())
    if size == 2:
        check_modes(mesh, size, group.rank())
    else:  # a process group does in the place of a mesh
        check_equals_the_definition(group, size, group.rank())
    check_equals_the_definition(mesh, size, group.rank())
    print(f"rank {rank} ok", flush=True)
    dist.barrier()
    leave_group()
