"""The experts of few tokens by one operator in C++ (kernels/experts_step), where a module of experts is plain."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from easytorch.kernels.decoder_step.native import AnyProjection, Projection, QuantizedProjection
from easytorch.kernels.experts_step import cpu
from easytorch.kernels.experts_step.native import CLAMPED, Unit
from easytorch.layers.gate import activation_of
from easytorch.layers.linear import eager_inference, watched
from easytorch.layers.quantized import QuantizedStacks

__all__ = ["Unit", "clamped_unit", "experts_step", "stack_of", "unit_of", "unit_of_activation"]

_TENSORS = (Tensor, nn.Parameter)


def experts_step(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor | None:
    """`apply_experts` of a few tokens: (N, D), (N, k), (N, k) -> (N, D); None where the operations are to run."""
    if not 0 < len(hidden_states) <= cpu.MOST_TOKENS or not eager_inference():
        return None
    if not module.has_gate or module.has_post_expert_norm or getattr(module, "scales_inputs", False):
        return None
    # of no choice, and of what is none, the operations say what comes out
    if top_k_index.dim() != 2 or top_k_index.is_floating_point() or top_k_index.numel() == 0:
        return None
    unit = unit_of(module)
    if unit is None:
        return None
    gate_up, down = stack_of(module, "gate_up_proj"), stack_of(module, "down_proj")
    if gate_up is None or down is None or not cpu.takes(hidden_states, gate_up, down):
        return None
    return cpu.experts_step(hidden_states, top_k_index, top_k_weights, gate_up, down, unit)


def unit_of(module: Any) -> Unit | None:
    """What the module computes of gate and up; None where the operator has nothing like it."""
    if "_apply_gate" in module.__dict__:  # an instance's own
        return None
    own = getattr(module, "step_unit", None)
    if own is not None:
        found: Unit | None = own()
        return found
    # transformers' classes: their gates are known by where they come from
    gate = type(module)._apply_gate
    if gate.__module__ != "transformers.integrations.moe" or not getattr(module, "is_concatenated", True):
        return None
    return unit_of_activation(module.act_fn)


def unit_of_activation(act: nn.Module) -> Unit | None:
    name = None if watched(act) else activation_of(act)
    return None if name is None else Unit(name)


def clamped_unit(alpha: float, limit: float) -> Unit:
    """That of gpt-oss: gate and up are clamped, and lie in turns."""
    return Unit(CLAMPED, float(alpha), float(limit))


def stack_of(module: Any, name: str) -> AnyProjection | None:
    """The weights of a stack as the operator takes them; None for what it does not."""
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    if isinstance(module, QuantizedStacks):
        settings, (shape, transposed) = module.settings[name], module.stacks[name]
        rows, columns = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
        parts = module._buffers
        codes, bits = parts[f"codes_{name}"], parts[f"scale_bits_{name}"]
        if settings.ordered or type(codes) is not Tensor or type(bits) is not Tensor or not codes.is_cpu:
            return None
        group = settings.columns(columns)
        return QuantizedProjection(codes, bits, parts.get(f"zero_{name}"), bias, settings.storage, columns, group, rows)
    weight = getattr(module, name)
    if type(weight) not in _TENSORS or len(weight) != module.num_experts:
        return None
    return Projection(weight.transpose(1, 2) if module.is_transposed else weight, bias)
