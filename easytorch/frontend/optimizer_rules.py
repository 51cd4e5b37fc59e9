"""Updates of torch's optimizers as functions of tensors: what a compiled train step computes with a gradient.

The optimizer that the user made gives the settings, group by group, and takes the state back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Group settings that change the update and that the rules below do not have, with the value that leaves it as it is.
_ADAM_ABSENT = {"amsgrad": False, "maximize": False, "differentiable": False}
_SGD_ABSENT = {"maximize": False, "differentiable": False}
KNOWN = ("AdamW", "Adam", "SGD")


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """`NotImplementedError` for another optimizer than `KNOWN`, or a setting that the rules lack."""
    kind = type(optimizer).__name__
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD):
        raise NotImplementedError(
            f"a compiled train step has the updates of torch.optim's {', '.join(KNOWN)}, not of {kind}; "
            'torch.compile(model, backend="easytorch") leaves the optimizer to torch'
        )
    for group in optimizer.param_groups:
        for name, off in (_SGD_ABSENT if kind == "SGD" else _ADAM_ABSENT).items():
            if group.get(name, off) != off:
                raise NotImplementedError(f"a compiled train step has no {name}={group[name]!r} of {kind}")


def slots(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the tensors that the optimizer keeps of a parameter, each of its shape, zero at first."""
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("exp_avg", "exp_avg_sq")


def numbers(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], step: int) -> list[float]:
    """What differs from step to step, computed in float64 as torch does: four numbers that `update` is given.

    step: of this update, from 1.
    """
    rate = float(group["lr"])
    if isinstance(optimizer, torch.optim.SGD):
        # torch starts the momentum with the gradient, undamped
        return [rate, 1.0 if step == 1 else 1.0 - group["dampening"], 0.0, 0.0]
    beta1, beta2 = group["betas"]
    return [rate, rate / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step), 1 - rate * group["weight_decay"]]


NUMBERS = 4


def update(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: Tensor,
    grad: Tensor,
    state: Mapping[str, Tensor],
    given: Sequence[Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """The new value of a parameter, and its new state. given: `numbers`, float32.

    Loshchilov and Hutter 2019 (AdamW, algorithm 2), Kingma and Ba 2015 (Adam).
    """
    rate, second, third, decay = (one.to(parameter.dtype) for one in given)
    weight_decay = float(group["weight_decay"])
    if isinstance(optimizer, torch.optim.SGD):
        if weight_decay:
            grad = grad + weight_decay * parameter
        if not group["momentum"]:
            return parameter - rate * grad, {}
        buffer = group["momentum"] * state["momentum_buffer"] + second * grad
        step = grad + group["momentum"] * buffer if group["nesterov"] else buffer
        return parameter - rate * step, {"momentum_buffer": buffer}
    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay", False))
    if weight_decay and decoupled:
        parameter = parameter * decay
    elif weight_decay:
        grad = grad + weight_decay * parameter
    beta1, beta2 = (float(beta) for beta in group["betas"])
    mean = state["exp_avg"] + (1 - beta1) * (grad - state["exp_avg"])
    square = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad * grad
    root = square.sqrt() * third + group["eps"]
    return parameter - second * mean / root, {"exp_avg": mean, "exp_avg_sq": square}


def count_of(optimizer: torch.optim.Optimizer) -> int:
    """How many steps the optimizer has taken; `ValueError` where its parameters differ in that."""
    taken = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    if len(taken) > 1:
        raise ValueError(
            f"a compiled train step counts steps once for all parameters, and theirs are {sorted(taken)}; "
            "load a state whose parameters were updated together"
        )
    if not taken and isinstance(optimizer, torch.optim.SGD):
        return int(any(state.get("momentum_buffer") is not None for state in optimizer.state.values()))
    return taken.pop() if taken else 0
