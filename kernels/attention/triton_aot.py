"""The flash kernels compiled ahead of time for GPUs that need not be present, and the resources they use.

    python -m easytorch.kernels.attention.triton_aot sm_90 bfloat16 128

prints one line of JSON per kernel. A process that has loaded Triton under TRITON_INTERPRET=1 cannot compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import torch

from easytorch.kernels.attention.call import AttentionCall
from easytorch.kernels.interop.triton_aot_compile import ARCHITECTURES, compile_call

KERNELS = ("forward", "delta", "key_value_grad", "query_grad")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources of one compiled kernel.

    registers (AMD: vector and accumulation registers) and bytes of stack per thread; bytes of shared memory per block;
    columns of the tensor memory of Blackwell, of which a multiprocessor has 512.
    """

    kernel: str
    architecture: str
    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    registers: int
    stack: int
    shared: int
    tensor_memory: int


def compile_kernels(
    architecture: str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    everything: bool = False,
    kernels: tuple[str, ...] = KERNELS,
) -> Iterator[Resources]:
    """Compile the kernels of one causal training step, query (2, 4096, 32, D), key and value (2, 4096, 8, D).

    everything: with every feature of the contract, and the gradient of the bias.
    """
    for name, call in _calls(architecture, dtype, head_dim, everything):
        if name not in kernels:
            continue
        usage = compile_call(call, architecture)
        yield Resources(
            kernel=name, architecture=architecture, dtype=str(dtype).removeprefix("torch."), head_dim=head_dim,
            block_m=call.arguments["BLOCK_M"], block_n=call.arguments.get("BLOCK_N", 0), num_warps=call.num_warps,
            num_stages=call.num_stages, **usage._asdict(),
        )  # fmt: skip


def typical_calls(dtype: torch.dtype, architecture: str) -> Iterator[tuple[str, Any]]:
    """The kernels of `compile_kernels` at head_dim 128, causal."""
    yield from _calls(architecture, dtype, 128, everything=False)


def _calls(architecture: str, dtype: torch.dtype, head_dim: int, everything: bool) -> Iterator[tuple[str, Any]]:
    from easytorch.kernels.attention import triton_flash_calls as calls

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    query, key = empty(2, 4096, 32, head_dim), empty(2, 4096, 8, head_dim)
    lse, delta = empty(2, 32, 2, 4096, dtype=torch.float32), empty(2, 32, 4096, dtype=torch.float32)
    call = AttentionCall(right=0, scale=head_dim**-0.5)
    bias_grad = None
    if everything:
        ids, seed = empty(2, 4096, dtype=torch.int64), empty(dtype=torch.int64)
        call = call._replace(
            bias=empty(1, 32, 4096, 4096, dtype=torch.float32), mask=empty(2, 1, 4096, 4096, dtype=torch.bool),
            query_segment_ids=ids, key_segment_ids=ids, sinks=empty(32), seed=seed, left=1023, softcap=30.0,
            dropout_prob=0.1,
        )  # fmt: skip
        bias_grad = empty(2, 32, 4096, 4096, dtype=torch.float32)
    yield "forward", calls.forward_call(architecture, query, key, key, query, lse, call)
    yield "delta", calls.delta_call(query, query, delta)
    yield (
        "key_value_grad",
        calls.key_value_grad_call(architecture, query, key, key, query, lse, delta, key, key, call),
    )
    yield (
        "query_grad",
        calls.query_grad_call(architecture, query, key, key, query, lse, delta, query, bias_grad, call),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architecture", choices=ARCHITECTURES)
    parser.add_argument("dtype", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("head_dim", type=int)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--everything", action="store_true", help="with every feature, not only causal")
    given = parser.parse_args()
    dtype, kernels = getattr(torch, given.dtype), tuple(given.kernels)
    for resources in compile_kernels(
        given.architecture, dtype, given.head_dim, everything=given.everything, kernels=kernels
    ):
        print(json.dumps(dataclasses.asdict(resources)), flush=True)


if __name__ == "__main__":
    main()
