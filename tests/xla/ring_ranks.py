"""`ring` under SPMD over four virtual CPU devices: run by test_ring.py in a process of its own. Prints "ok"."""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from easytorch.kernels.attention import native
from easytorch.kernels.ring.layout import shard, unshard
from easytorch.operations import OperationMetadata, OperationRegistry
from easytorch.operations.dispatch.check import relative_rms_error

B, T, H, K, D = 2, 64, 4, 2, 8


def whole_sequence(layout: str, features: dict, mesh, size: int, backend: str, tolerance: float = 1e-5) -> None:
    """Output and gradients, given and returned as the ranks' shards one after another."""
    torch.manual_seed(0)
    tensors = [torch.randn(B, T, heads, D) for heads in (H, K, K)]
    sinks, grad = torch.randn(H), torch.randn(B, T, H, D)
    leaves = [x.double().requires_grad_() for x in (*tensors, sinks)]
    output, _ = native.attention(*leaves[:3], sinks=leaves[3], **features)
    want = [output, *torch.autograd.grad(output, leaves, grad.double())]

    def stored(x, dim=1):
        return torch.cat([shard(x, rank, size, dim, layout) for rank in range(size)], dim)

    def moved(x, spec):
        on_device = x.to("xla")
        xs.mark_sharding(on_device, mesh, spec)
        return on_device

    spec = ("dp" if "dp" in mesh.axis_names else None, "sp", None, None)
    given = [moved(stored(x), spec).requires_grad_() for x in tensors]
    given.append(sinks.to("xla").requires_grad_())
    settings = dict(features)
    for name in ("query_segment_ids", "key_segment_ids"):
        if name in settings:
            settings[name] = moved(stored(settings[name]), (None, "sp"))
    if "mask" in settings:
        settings["mask"] = stored(settings["mask"], -2).to("xla")
    attend = OperationRegistry.create("ring", OperationMetadata(mesh=mesh, sequence_layout=layout))
    assert attend.choose(*given[:3], **settings).backend == backend
    result = attend(*given[:3], sinks=given[3], **settings).attention_outputs
    gradients = torch.autograd.grad(result, given, moved(stored(grad), spec))
    if backend == "xla":
        # nobody gathers the sequence: what is sent is sent round the ring
        program = torch_xla._XLAC._get_xla_tensors_hlo([result, *gradients])
        assert "collective-permute" in program and "all-gather" not in program
    torch_xla.sync()
    for index, (got, expected) in enumerate(zip((result, *gradients), want, strict=True)):
        got = got.detach().cpu()
        if index < 4:
            got = unshard(got.chunk(size, 1), 1, layout)
        error = relative_rms_error(got, expected)
        assert error < tolerance, (layout, list(features), index, error)


def main() -> None:
    xr.use_spmd()
    count = xr.global_runtime_device_count()
    assert count == int(sys.argv[1])
    flat = xs.Mesh(np.arange(count), (count,), ("sp",))
    grid = xs.Mesh(np.arange(count), (2, count // 2), ("dp", "sp"))
    ids = torch.arange(T).mul(3).div(T, rounding_mode="floor").repeat(B, 1).to(torch.int32)
    segments = {"query_segment_ids": ids, "key_segment_ids": ids}
    for layout in ("contiguous", "zigzag"):
        whole_sequence(layout, {"causal": True}, flat, count, "xla")
    whole_sequence("zigzag", {"causal": True, "sliding_window": 9, "softcap": 2.0, **segments}, flat, count, "xla")
    whole_sequence("zigzag", {"causal": True}, grid, count // 2, "xla")
    mask = torch.rand(T, T) > 0.5
    whole_sequence("zigzag", {"causal": True, "mask": mask, **segments}, flat, count, "native")
    print("ok")


if __name__ == "__main__":
    main()
