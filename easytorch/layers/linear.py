"""`linear(layer, x)`: a model's `nn.Linear`, by the `linear` operation where that is faster.

The layers stay `torch.nn.Linear` itself, not a subclass: transformers' bitsandbytes, fp8 and GGUF loading, and
torch's `quantize_dynamic`, replace modules of exactly that type and would silently leave a subclass as it is.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as hooks

from easytorch.kernels.linear import products, recorded
from easytorch.kernels.linear.preference import smallest_weight
from easytorch.layers.output_hooks import idle
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.environment import checking, forced_by_environment, untouched
from easytorch.operations.linear import Linear as LinearOperation

_OPERATION = cast(LinearOperation, OperationRegistry.create("linear"))

# The smallest float32 weight, in elements, whatever the table of `linear` says: other libraries round differently from
# MKL, and MiniLM's layers would differ by 1.3e-5 from transformers', where less than 1e-5 is promised.
SMALLEST_WEIGHT = 2**20

_CALL, _FORWARD = nn.Module.__call__, nn.Linear.forward


def linear(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`layer(x)`: x (..., K) -> (..., N).

    On a CPU few rows go to the C++ operator where it is faster. The `linear` operation computes a float32 `nn.Linear`
    that is large enough by its table, or any if EASYTORCH_OPS or EASYTORCH_CHECK is set; other calls of a plain
    `nn.Linear` skip `nn.Module.__call__`. A layer that is wrapped or hooked (PEFT, quantization, FSDP, accelerate,
    parametrizations) is called as a module, and so is one in a traced graph, to keep its name.
    """
    if type(layer) is not nn.Linear or watched(layer):
        return layer(x)
    parameters = layer._parameters
    weight = parameters.get("weight")
    plain = untouched()
    if (
        plain
        and weight is not None
        and "bias" in parameters
        and (x.dtype != torch.float32 or weight.numel() >= SMALLEST_WEIGHT)
    ):
        rows = _OPERATION.few_rows(x, weight, parameters["bias"])
        if rows is not None:
            return rows
    # the dtype first: it decides for nearly every layer of a model in half precision
    if (x.dtype == torch.float32 and _profits(layer, x)) or (not plain and _asked()):
        return _OPERATION(x, layer.weight, layer.bias)
    if weight is None or "bias" not in parameters:  # FSDP, for one, stores them elsewhere
        return layer(x)
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return layer(x)
    if plain and torch.is_grad_enabled() and _recordable(weight) and recorded.prefers(x, (weight,)):
        bias = parameters["bias"]
        return recorded.linear(x, (weight,), () if bias is None else (bias,))
    if plain and x.dtype in products.WIDENED:
        return products.linear(x, weight, parameters["bias"])
    # calling the module takes 2 of 7 us more: its attribute lookups of the weights are slow
    return F.linear(x, weight, parameters["bias"])


def argmax(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """`linear(layer, x).argmax(-1)`: x (..., K) -> (...), int64. On a CPU few rows do not materialize the product."""
    weight = plain_weight(layer)
    large = weight is not None and (x.dtype != torch.float32 or weight.numel() >= SMALLEST_WEIGHT)
    if weight is not None and large and "bias" in layer._parameters and untouched():
        found = _OPERATION.argmax_of_few_rows(x, weight, layer._parameters["bias"])
        if found is not None:
            return found
    return linear(layer, x).argmax(-1)


def plain_weight(layer: nn.Module) -> torch.Tensor | None:
    """The weight of a plain `nn.Linear` without hooks or parametrizations, else None."""
    return None if type(layer) is not nn.Linear or watched(layer) else layer._parameters.get("weight")


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias by the path that `linear` chooses for these sizes, in eager mode without gradients."""
    if x.dtype == torch.float32 and weight.numel() < SMALLEST_WEIGHT:
        return F.linear(x, weight, bias)
    rows = _OPERATION.few_rows(x, weight, bias)
    if rows is not None:
        return rows
    asks = x.dtype == torch.float32 and x.is_cpu and weight.numel() >= smallest_weight()
    return _OPERATION(x, weight, bias) if asks else products.linear(x, weight, bias)


def few_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """x @ weight.T + bias by the operator in C++ where a layer of these sizes would take it, else None."""
    if x.dtype == torch.float32 and weight.numel() < SMALLEST_WEIGHT:
        return None
    return _OPERATION.few_rows(x, weight, bias)


def eager_inference() -> bool:
    """True where no gradient is recorded, no graph is traced and nothing is forced or compared."""
    return (
        not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and untouched()
    )


def _profits(layer: nn.Linear, x: torch.Tensor) -> bool:
    """True where `linear` may choose oneDNN: asking for every product would take longer than the small ones do."""
    size = layer.in_features * layer.out_features
    if size < SMALLEST_WEIGHT or size < smallest_weight():
        return False
    return x.dtype == torch.float32 and x.device.type == "cpu" and not torch.compiler.is_exporting()


def _recordable(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.is_cpu and weight.is_contiguous()


def _asked() -> bool:
    return forced_by_environment("linear") is not None or checking()


def watched(layer: nn.Module) -> bool:
    """True where calling the layer does more than its class's `forward`."""
    return bool(
        (layer._forward_hooks and not idle(layer._forward_hooks))
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in layer.__dict__
        or layer._compiled_call_impl is not None
        # not `_has_any_global_hook()`: one more call per product of each layer and token
        or hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
        or nn.Linear.forward is not _FORWARD
        or nn.Module.__call__ is not _CALL  # torch.fx replaces it to trace
    )


def __getattr__(name: str) -> Any:
    """The parallel layers, which `easydel.layers.linear` has under these names."""
    from easytorch import layers

    return getattr(layers, name)
