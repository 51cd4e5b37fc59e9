"""The choice of the backend where the user leaves it open.

XLA multiplies bfloat16 and float16 matrices on a CPU 3 to 12 times slower than torch does. A graph that does so runs on
the backend `torch` where "xla" was asked for, which leaves the platform open, and that platform is the CPU; "xla:cpu",
and a backend itself, are taken as they are. Two-layer Llama, hidden 1024, 256 tokens, bfloat16, two threads of an EPYC
with avx512_bf16: eager 41.5 ms, the captured graph called in torch 42.0 ms, this backend 42.6 ms.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch.fx import GraphModule

from easytorch import backends
from easytorch.backends.interface import Backend

_log = logging.getLogger(__name__)
_BACKENDS: dict[str, Backend] = {}
_NARROW = (torch.bfloat16, torch.float16)
# Overloads of these multiply matrices.
_PRODUCTS = frozenset(
    (
        *(
            "mm",
            "bmm",
            "mv",
            "dot",
            "matmul",
            "linear",
            "addmm",
            "addbmm",
            "baddbmm",
            "addmv",
            "bilinear",
            "_grouped_mm",
        ),
        *("convolution", "convolution_backward", "conv1d", "conv2d", "conv3d", "conv_transpose1d"),
        *("conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"),
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
)


def backend_for(graph: GraphModule, asked: str | Backend | None) -> Backend:
    """The requested backend or, if none was requested, the one that `graph` should run on."""
    backend = backend_of(asked)
    open_choice = asked == "xla" or asked is None
    if not open_choice or backend.name != "xla" or not backend.has_shared_buffers() or not multiplies_narrow(graph):
        return backend
    _say_once()
    return backend_of("torch")


def backend_of(backend: str | Backend | None) -> Backend:
    """The backend itself; one of each configuration is made and kept."""
    if isinstance(backend, Backend):
        return backend
    key = backend or ""
    if key not in _BACKENDS or _BACKENDS[key].is_finalized():
        _BACKENDS[key] = backends.new(backend)
    return _BACKENDS[key]


@cache
def _say_once() -> None:
    _log.warning(
        "bfloat16 and float16 products are slower in XLA than in torch on a CPU: such modules run on the backend "
        '"torch". backend="xla:cpu" keeps them on XLA.'
    )


def multiplies_narrow(graph: GraphModule) -> bool:
    """Whether matrices of bfloat16 or float16 are multiplied."""
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if (
                not isinstance(node.target, torch._ops.OpOverload)
                or node.target.overloadpacket.__name__ not in _PRODUCTS
            ):
                continue
            values = (source.meta.get("val") for source in node.all_input_nodes)
            if any(isinstance(value, torch.Tensor) and value.dtype in _NARROW for value in values):
                return True
    return False
