"""An optimizer's slots by parameter name, and what an optimizer of torch can go on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from easytorch.bridge.errors import nearest
from easytorch.protocol.optimizer_checks import check_settings, check_slots_of

_ADAGRAD = "torch.optim.adagrad.Adagrad"


def plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of accelerate's `AcceleratedOptimizer`, else the same."""
    while type(optimizer).__module__.startswith("accelerate.") and isinstance(
        inside := getattr(optimizer, "optimizer", None), Optimizer
    ):
        optimizer = inside
    return optimizer


@dataclass(frozen=True)
class OptimizerState:
    """The slots of a torch optimizer by parameter name, and its groups, whose "params" are names."""

    kind: str
    slots: Mapping[str, Mapping[str, Any]]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer, model: nn.Module) -> OptimizerState:
        """The state of `optimizer` for the parameters of `model`; `ValueError` for a parameter of another model."""
        optimizer = plain_optimizer(optimizer)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            if any(id(parameter) not in names for parameter in group["params"]):
                raise ValueError(
                    f"group {number} of {type(optimizer).__name__} has a parameter that is not one of "
                    f"{type(model).__name__}; make the optimizer of model.parameters()"
                )
            groups.append({**group, "params": [names[id(parameter)] for parameter in group["params"]]})
        slots = {names[id(parameter)]: dict(values) for parameter, values in optimizer.state.items()}
        return cls(_kind(optimizer), slots, groups)

    def check(self, optimizer: Optimizer, model: nn.Module) -> None:
        """`ValueError` where slots or settings do not fit `optimizer` over `model`."""
        optimizer = plain_optimizer(optimizer)
        if _kind(optimizer) != self.kind:
            raise ValueError(f"the state is that of {self.kind}, and the optimizer is {_kind(optimizer)}")
        parameters = dict(model.named_parameters())
        there = OptimizerState.of(optimizer, model).groups
        if [set(group["params"]) for group in there] != [set(group["params"]) for group in self.groups]:
            have, given = ([len(group["params"]) for group in groups] for groups in (there, self.groups))
            raise ValueError(f"the optimizer's groups hold {have} parameters, and the state's {given}, or others")
        for number, (group, saved) in enumerate(zip(there, self.groups, strict=True)):
            check_settings(number, group, saved)
        self.check_slots(parameters)

    def check_slots(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """`ValueError` for slots of no parameter, of another shape or dtype, and where torch's optimizer needs more."""
        groups = {name: group for group in self.groups for name in group["params"]}
        if unknown := next((name for name in groups if name not in parameters), None):
            raise ValueError(f"{unknown!r} is in a group, and is no parameter{nearest(unknown, parameters)}")
        for name, values in self.slots.items():
            if name not in parameters:
                raise ValueError(f"{name!r} has slots, and is no parameter{nearest(name, parameters)}")
            check_slots_of(self.kind, name, parameters[name], values, groups.get(name, {}))
        # the only one that makes its slots before the first step
        missing = [name for name in groups if not self.slots.get(name)] if self.kind == _ADAGRAD else []
        if missing:
            raise ValueError(f"{missing[0]!r} has no slots, and Adagrad has some for every parameter")

    def restore(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Puts slots and settings into `optimizer`. Unlike `Optimizer.load_state_dict` it keeps the slots' dtypes."""
        optimizer = plain_optimizer(optimizer)
        self.check(optimizer, model)
        parameters = dict(model.named_parameters())
        optimizer.state.clear()
        groups = {name: group for group in self.groups for name in group["params"]}
        for name, values in self.slots.items():
            device, group = parameters[name].device, groups.get(name, {})
            placed = {slot: _placed(slot, one, device, group) for slot, one in values.items()}
            optimizer.state[parameters[name]] = placed
        for group, saved in zip(optimizer.param_groups, self.groups, strict=True):
            for key, value in saved.items():
                if key != "params":
                    # a copy: schedulers write to a learning rate that is a tensor
                    device = value.device if isinstance(value, torch.Tensor) else torch.device("cpu")
                    there = group.get(key)
                    group[key] = _placed(key, value, there.device if isinstance(there, torch.Tensor) else device, saved)


def _kind(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _placed(slot: str, value: Any, device: torch.device, group: Mapping[str, Any]) -> Any:
    """A copy of a slot beside its parameter; torch's optimizers count steps on the CPU unless they are fused there."""
    if isinstance(value, list | tuple):  # LBFGS keeps lists of directions
        return type(value)(_placed(slot, one, device, group) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    if slot == "step" and not (group.get("fused") or group.get("capturable")):
        return value.clone()
    return value.to(device, copy=True)
