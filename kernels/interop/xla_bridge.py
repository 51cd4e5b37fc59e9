"""jax functions inside a torch_xla graph: lowered to HLO for the arguments' shapes and embedded as one node.

`call_jax` is the call, `call_jax_with_gradient` pairs a forward and a backward function for torch's autograd. Nothing
runs until torch_xla executes the graph. torch_xla's own `xla_builder.call_jax` needs torchax, which breaks torch_xla's
SPMD checkpoints; this does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.runtime as xr

from easytorch.kernels.interop.lowering import lower_for_export

# torch_xla holds the TPU of this process: jax only traces here, and would hang waiting for the device.
_config: Any = jax.config  # whose settings jax adds at import, unseen by type checkers
if _config.jax_platforms is None:
    _config.update("jax_platforms", "cpu")
_config.update("jax_use_shardy_partitioner", False)  # torch_xla 2.9 reads GSPMD's shardings, not Shardy's

_Spec = tuple[tuple[int, ...], torch.dtype] | None
_platform: str | None = None  # of `lowered_for`


@contextmanager
def lowered_for(platform: str) -> Iterator[None]:
    """Inside, functions are lowered for another platform than the one that runs them: a graph with the TPU's kernels
    can be traced, and compiled elsewhere, on a host that has none. It cannot be run."""
    global _platform
    former, _platform = _platform, platform
    try:
        yield
    finally:
        _platform = former


def call_jax(fn: Callable[..., Any], *tensors: torch.Tensor | None, **static: Hashable) -> Any:
    """`fn(*tensors, **static)` on jax arrays, as a node of the graph: fn's pytree, its arrays as tensors on xla.

    fn: a pure jax function; the same object at every call, since a lambda made anew is lowered anew.
    tensors: on the xla device, of any shape; None is passed on as None.
    static: hashable settings, constants of the lowered computation.
    Raises `TypeError` for a 64-bit tensor while `jax_enable_x64` is off, `ValueError` for a tensor that is not on xla
    or whose gradient would be lost.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    for tensor in given:
        if tensor.device.type != "xla":
            raise ValueError(f"{_name(fn)}: every tensor must be on the xla device, got one on {tensor.device}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{_name(fn)} would lose a gradient: use call_jax_with_gradient, or call it under no_grad")
    specs = tuple(None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    settings = (_config.jax_enable_x64, _config.jax_default_matmul_precision)
    platform = _platform or xr.device_type().lower()
    computation, structure = _lower(fn, specs, tuple(sorted(static.items())), platform, settings)
    outputs = torch_xla._XLAC._xla_user_computation(f"xla::{_name(fn)}", given, computation)
    return jax.tree.unflatten(structure, outputs)


def call_jax_with_gradient(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *tensors: torch.Tensor | None,
    outputs: int = 1,
    **static: Hashable,
) -> Any:
    """`call_jax` that torch's autograd differentiates once: a tensor, or a tuple of `outputs` tensors above one.

    forward(*tensors, **static) -> (*outputs, *residuals): arrays; the residuals are kept for the backward only.
    backward(*tensors, *outputs, *residuals, *grads, **static) -> one gradient, or None, for each of `tensors`; grads
    has one for each output, zeros where none flows.
    """
    return _Differentiable.apply(forward, backward, outputs, static, *tensors)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Any, backward: Any, outputs: int, static: dict[str, Hashable], *tensors: Any
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        results = tuple(call_jax(forward, *tensors, **static))
        ctx.save_for_backward(*tensors, *results)
        ctx.call = functools.partial(call_jax, backward, **static)
        return results[0] if outputs == 1 else results[:outputs]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, None, *_Gradients.apply(ctx.call, *ctx.saved_tensors, *grads)


class _Gradients(torch.autograd.Function):
    """The gradients of a `_Differentiable`.

    torch's `once_differentiable` is not enough: where a tensor reaches the loss on another way too, it leaves this one
    out of the second derivative without an error.
    """

    @staticmethod
    def forward(ctx: Any, call: functools.partial[Any], *tensors: torch.Tensor) -> Any:
        ctx.name = _name(call.args[0])
        return tuple(call(*tensors))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        raise RuntimeError(
            f"{ctx.name}: gradients computed by jax in the graph have no gradient of their own; for second derivatives "
            f"force the definition, OperationMetadata(backend='native') or EASYTORCH_OPS=<operation>=native"
        )


@functools.lru_cache(maxsize=1024)
def _lower(
    fn: Callable[..., Any], specs: tuple[_Spec, ...], static: tuple[Any, ...], platform: str, settings: tuple[Any, ...]
) -> tuple[Any, Any]:
    """The XlaComputation of one signature and the pytree of its outputs. `settings` is part of the key only."""
    structs = [None if spec is None else jax.ShapeDtypeStruct(spec[0], _jax_dtype(fn, spec[1])) for spec in specs]
    # keep_unused: the node is given every tensor, so the computation must have a parameter for each
    traced = jax.jit(functools.partial(fn, **dict(static)), keep_unused=True).trace(*structs)
    lowered = lower_for_export(traced, platform)
    hlo = lowered.compiler_ir("hlo")
    assert hlo is not None, "what jax lowers has an HLO module"
    module = hlo.as_serialized_hlo_module_proto()
    return xb.computation_from_module_proto(_name(fn), module), jax.tree.structure(lowered.out_info)


def _jax_dtype(fn: Callable[..., Any], dtype: torch.dtype) -> Any:
    name = str(dtype).removeprefix("torch.")  # the two libraries agree on every name
    if jax.dtypes.canonicalize_dtype(name) != jnp.dtype(name):
        raise TypeError(
            f"{_name(fn)}: jax would narrow a {name} tensor without a word; cast it to "
            f"{jax.dtypes.canonicalize_dtype(name)}, or set jax_enable_x64"
        )
    return jnp.dtype(name)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
