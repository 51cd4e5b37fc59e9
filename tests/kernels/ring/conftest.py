"""A ring of threads: the ranks of one process, which send by handing over what they have."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from easytorch.kernels.attention import native
from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.attention.contract import resolve
from easytorch.kernels.ring import native as ring_native
from easytorch.kernels.ring.layout import shard, unshard
from easytorch.kernels.ring.native import Shard


class ThreadRing:
    def __init__(self, rank: int, size: int, links: dict[Any, SimpleQueue], sent: list[int]) -> None:
        self.rank, self.size, self._links, self._sent = rank, size, links, sent

    def send(self, tensors: list[torch.Tensor], hops: int = 1) -> Callable[[], list[torch.Tensor]]:
        if hops % self.size == 0:
            return lambda: tensors
        to, source = (self.rank + hops) % self.size, (self.rank - hops) % self.size
        self._sent[self.rank] += 1
        self._links[self.rank, to].put([tensor.clone() for tensor in tensors])
        return lambda: self._links[source, self.rank].get(timeout=600)


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., tuple[list[Any], list[int]]]:
    """`run_ranks(size, function)`: what `function(ring)` gives for each rank, and how often each of them sent."""

    def run(size: int, function: Callable[[Any], Any]) -> tuple[list[Any], list[int]]:
        links: dict[Any, SimpleQueue] = {(a, b): SimpleQueue() for a in range(size) for b in range(size)}
        sent = [0] * size
        rings = [ThreadRing(rank, size, links, sent) for rank in range(size)]
        with ThreadPoolExecutor(size) as pool:
            return [future.result() for future in [pool.submit(function, ring) for ring in rings]], sent

    return run


@pytest.fixture(scope="session")
def ring_errors(run_ranks: Any) -> Callable[..., dict[str, float]]:
    """`ring_errors(kernel, size, layout, tensors, features, dtype)`: relative RMS errors of output and gradients.

    tensors: query, key, value and perhaps bias, sinks of the whole sequence. The definition is given what they are in
    `dtype`, in float64.
    """

    def relative_rms_error(got: torch.Tensor, want: torch.Tensor) -> float:
        error, scale = (x.detach().double().square().mean().sqrt() for x in (got - want, want))
        return float(error / scale)

    def run(
        kernel: Any, size: int, layout: str, tensors: dict[str, torch.Tensor], features: dict[str, Any],
        dtype: torch.dtype, device: str = "cpu",
    ) -> dict[str, float]:  # fmt: skip
        rounded = {name: x.to(dtype) for name, x in tensors.items()}
        leaves = {name: x.double().requires_grad_() for name, x in rounded.items()}
        output, _ = native.attention(**leaves, **features)
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        want = dict(zip(leaves, torch.autograd.grad(output, list(leaves.values()), grad.double()), strict=True))
        length = output.shape[1]

        def part(x: torch.Tensor | None, rank: int, dim: int = 1) -> torch.Tensor | None:
            if x is None:
                return None
            if dim == -2:
                x = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
                if x.shape[-2] != length:
                    return x.to(device)
            return shard(x, rank, size, dim, layout).to(device)

        call = resolve(**rounded, **features)

        def ranks(ring: Any) -> Any:
            own = AttentionCall(
                part(call.mask, ring.rank, -2), part(call.bias, ring.rank, -2),
                part(call.query_segment_ids, ring.rank), part(call.key_segment_ids, ring.rank),
                *(None if x is None else x.to(device) for x in (call.sinks, call.seed)), *call.numbers,
            )  # fmt: skip
            heads = (part(rounded[name], ring.rank) for name in ("query", "key", "value"))
            shard = Shard(*heads, own, layout)
            out, top = ring_native.forward(ring, shard, kernel)
            own_grad = part(grad, ring.rank)
            return out, *ring_native.backward(ring, shard, out, top, own_grad, kernel, bias_grad="bias" in rounded)

        results, _ = run_ranks(size, ranks)
        columns = [[x if x is None else x.cpu() for x in column] for column in zip(*results, strict=True)]
        got = dict(zip(("output", "query", "key", "value"), (unshard(x, 1, layout) for x in columns[:4]), strict=True))
        if "bias" in rounded:
            whole = unshard(columns[4], 2, layout) if columns[4][0].shape[2] != 1 else sum(columns[4])
            got["bias"] = whole.reshape(rounded["bias"].shape)
        if "sinks" in rounded:
            got["sinks"] = sum(columns[5])
        assert all(x.dtype == dtype for x in got.values())
        return {name: relative_rms_error(x, output if name == "output" else want[name]) for name, x in got.items()}

    return run


@pytest.fixture(scope="session")
def ring_cases() -> dict[str, Callable[[int, int], tuple[dict[str, torch.Tensor], dict[str, Any]]]]:
    """name -> `make(queries, keys)`: tensors and features of a call, two batches, heads 6 over 2."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape)

    def mask(queries: int, keys: int) -> torch.Tensor:
        seen = torch.rand(2, 1, queries, keys) > 0.4
        seen[:, :, 5] = False
        return seen

    def ids(queries: int, keys: int) -> dict[str, torch.Tensor]:
        query, key = (torch.arange(n).mul(3).div(n, rounding_mode="floor").repeat(2, 1) for n in (queries, keys))
        query[1, 3] = 9  # sees nothing
        return {"query_segment_ids": query, "key_segment_ids": key}

    extra: dict[str, Callable[[int, int], tuple[dict[str, torch.Tensor], dict[str, Any]]]] = {
        "plain": lambda t, s: ({}, {}),
        "causal": lambda t, s: ({}, {"causal": True}),
        "softcap": lambda t, s: ({}, {"causal": True, "softcap": 1.5, "softmax_scale": 0.3}),
        "window": lambda t, s: ({}, {"causal": True, "sliding_window": 9}),
        "sides": lambda t, s: ({}, {"sliding_window": (7, 3)}),
        "segments": lambda t, s: ({}, {"causal": True, **ids(t, s)}),
        "sinks": lambda t, s: ({"sinks": randn(6)}, {"causal": True, "mask": mask(t, s)}),
        "bias": lambda t, s: ({"bias": randn(2, 6, t, s)}, {"causal": True}),
        "bias of keys": lambda t, s: ({"bias": randn(2, 1, 1, s)}, {"mask": mask(t, s)[0, 0]}),
        "dropout": lambda t, s: ({}, {"causal": True, "dropout_prob": 0.3, "seed": 11}),
        "everything": lambda t, s: (
            {"bias": randn(6, t, s), "sinks": randn(6)},
            {
                "causal": True, "sliding_window": (20, None), "softcap": 3.0, "mask": mask(t, s), **ids(t, s),
                "dropout_prob": 0.2, "seed": 2**40 + 3,
            },
        ),
    }  # fmt: skip

    def case(name: str) -> Callable[[int, int], tuple[dict[str, torch.Tensor], dict[str, Any]]]:
        def make(queries: int, keys: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
            torch.manual_seed(len(name))
            value_dim = 8 if name in ("plain", "everything") else 12
            query, key, value = randn(2, queries, 6, 12), randn(2, keys, 2, 12), randn(2, keys, 2, value_dim)
            more, features = extra[name](queries, keys)
            return {"query": query, "key": key, "value": value, **more}, features

        return make

    return {name: case(name) for name in extra}
