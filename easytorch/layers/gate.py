"""`gated(act, gate, up)`: act(gate) * up, by the `swiglu` and `geglu` operations where the activation is theirs."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation

from easytorch.layers.linear import watched
from easytorch.operations import OperationRegistry
from easytorch.operations.dispatch.environment import untouched
from easytorch.operations.glu import GeGLU, SwiGLU

swiglu = cast(SwiGLU, OperationRegistry.create("swiglu"))
geglu = cast(GeGLU, OperationRegistry.create("geglu"))

_SILU = (nn.SiLU, SiLUActivation)


def gated(act: nn.Module, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(..., N), (..., N) -> (..., N). An activation with hooks is called as a module."""
    if gate.dtype is not up.dtype or watched(act):
        return act(gate) * up
    kind = type(act)
    if kind in _SILU:
        product = swiglu.try_cpp(gate, up) if untouched() else None
        return swiglu(gate, up) if product is None else product
    if approximate := _approximation(act):
        product = geglu.try_cpp(gate, up, approximate) if untouched() else None
        return geglu(gate, up, approximate) if product is None else product
    return act(gate) * up


def activation_of(act: nn.Module) -> str | None:
    """Which of kernels/decoder_step's activations the module is; None for another one."""
    if type(act) in _SILU:
        return "silu"
    approximate = _approximation(act)
    return None if approximate is None else "gelu_tanh" if approximate == "tanh" else "gelu"


def _approximation(act: nn.Module) -> str | None:
    """The `approximate` of F.gelu where the module computes the same function.

    transformers has it by formulas of their own roundings too, of which `gelu_new` (T5 1.1, FLAN-T5, mT5) takes eight
    passes over the memory for the same function.
    """
    if type(act) is nn.GELU:
        return act.approximate
    if type(act) is GELUActivation and act.act is F.gelu:
        return "none"
    if type(act) is NewGELUActivation:
        return "tanh"
    if type(act) is GELUTanh and getattr(act.act, "func", None) is F.gelu:
        return "tanh"
    return None
