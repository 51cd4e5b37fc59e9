"""Train states of JAX: step, parameters and optax's slots as trees, to and from a torch model and its optimizer.

    tree = to_optax(model, optimizer, step=100, opt_state=tx.init(params))    # what flax's TrainState holds
    step = from_optax(tree, model, optimizer)

Slots take the way of the weights they belong to: names, layouts and stacked experts change alike. Those that mean the
same in both libraries are carried over; of another optimizer neither has a state that says what the other's says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from easytorch.argument_types import check_types
from easytorch.bridge.core.nested import flat
from easytorch.protocol import conversion
from easytorch.protocol.optimizer_state import OptimizerState, plain_optimizer
from easytorch.protocol.state import graphother, graphstate, split_module
from easytorch.protocol.train_state import TrainState
from easytorch.protocol.wrappers import unwrapped

# Class of torch.optim -> optax's field -> the slot; "count" is the number of steps, the same for all parameters.
_SLOTS = {
    "Adam": {"count": "step", "mu": "exp_avg", "nu": "exp_avg_sq"},
    "AdamW": {"count": "step", "mu": "exp_avg", "nu": "exp_avg_sq"},
    "SGD": {"trace": "momentum_buffer"},
    "Adagrad": {"sum_of_squares": "sum"},
    "RMSprop": {"nu": "square_avg"},
}
_CENTERED = {"mu": "grad_avg", "nu": "square_avg"}  # of RMSprop
# Those that count steps where optax does not: they take the train state's own.
_COUNTED = ("Adagrad", "RMSprop")
# Those of which optax has one of the same name that goes on otherwise from the same slots.
_OTHER_RULES = {
    "Adafactor": (
        "optax.adafactor factors the two largest dimensions of a parameter in Flax's layout, where both have 128 or "
        "more, and torch the last two of its own; the one adds epsilon to squared gradients, the other clamps them"
    ),
    "Muon": (
        "optax.contrib.muon corrects the bias of the momentum before it adds Nesterov's gradient, which turns the "
        "direction, and steps what is no matrix by Adam, where torch's takes matrices alone"
    ),
}
# Settings of a group by which a slot means another thing than optax's.
_OTHERWISE = ("amsgrad", "dampening")
# What optax.MultiSteps keeps of the steps that it makes of several.
_MULTI_STEPS = {"mini_step", "gradient_step", "acc_grads"}


@check_types()
def to_optax(model: PreTrainedModel, optimizer: Optimizer, *, step: int, opt_state: Any = None) -> dict[str, Any]:
    """`{"step": ..., "params": tree, "opt_state": ...}` of numpy arrays of their own, in Flax's names.

    opt_state: a state of the optax optimizer, as its `init` gives it, whose slots and counts of schedules are replaced
    and whose structure is kept; without one `opt_state` is `{"0": slots}`, which optax's `adam` has first in its chain.
    `ValueError` for an optimizer whose slots optax has not, or where `opt_state` has no place for them.
    """
    model, optimizer = unwrapped(model), plain_optimizer(optimizer)
    fields, step = _fields(optimizer), _step_of(step)
    _check_whole_steps(opt_state)
    saved = OptimizerState.of(optimizer, model)
    transform = conversion.transform_fn(model, copy=True)
    node: dict[str, Any] = {field: _tree(model, saved, slot, transform) for field, slot in fields.items()}
    if opt_state is None:
        filled: Any = {"0": node} if node else {}
    elif not node:
        _check_without_slots(opt_state, optimizer)
        filled = opt_state
    else:
        found = list(_nodes(opt_state, set(fields)))
        if len(found) != 1:
            raise ValueError(f"opt_state has not one place for {sorted(fields)}, the slots of {_name(optimizer)}")
        _check_places(found[0], node)
        filled = _replaced(opt_state, node)
    if opt_state is not None:
        # those of learning rate schedules, which would begin anew
        filled = _counted(filled, int(node.get("count", step)), set(fields))
    params, stats = _apart(conversion.to_flax(model, copy=True))
    return {"step": step, "params": params, **stats, "opt_state": filled}


@check_types()
def from_optax(train_state: Any, model: PreTrainedModel, optimizer: Optimizer) -> int:
    """Puts a train state of JAX into `model` and `optimizer`, in place, and returns its step.

    train_state: flax's `TrainState`, or a tree with "step", "params" and "opt_state", as Orbax restores one.
    `CheckpointError` or `ValueError` where something does not fit; both are then unchanged.
    """
    model, optimizer = unwrapped(model), plain_optimizer(optimizer)
    fields = _fields(optimizer)
    parts = {key: _part(train_state, key) for key in ("step", "params")}
    parts["opt_state"] = _part(train_state, "opt_state", optional=not fields)
    step = _step_of(parts["step"])
    _check_whole_steps(parts["opt_state"])
    found = list(_nodes(parts["opt_state"], set(fields))) if fields else [{}]
    if not fields:
        _check_without_slots(parts["opt_state"], optimizer)
    if len(found) != 1:
        raise ValueError(
            f"the opt_state has {len(found)} parts with {sorted(fields)}, the slots of {_name(optimizer)}; pass the "
            "state of one such optimizer over all parameters"
        )
    own, stats = _apart(conversion.to_flax(model))
    _check_floating("params", parts["params"], own)
    for field in fields.keys() - {"count"}:
        _check_places(found[0], {field: parts["params"]})
        _check_floating(field, _field(found[0], field), own)
    given_stats = _part(train_state, "batch_stats", optional=not stats)
    values = _by_name(model, parts["params"], {"batch_stats": given_stats} if stats else {})
    slots: dict[str, dict[str, Any]] = {name: {} for name in graphstate(model)}
    for field, slot in fields.items():
        given = _field(found[0], field)
        if field == "count":
            count = float(np.asarray(given))
            of_each = {name: torch.tensor(count) for name in slots}
        else:
            numbers, kinds = _by_name(model, given, stats), _kinds_by_name(model, given, stats)
            of_each = {name: numbers[name].to(kind) for name, kind in kinds.items()}
        for name, value in slots.items():
            value[slot] = of_each[name]
    if _name(optimizer) in _COUNTED:
        for value in slots.values():
            value["step"] = torch.tensor(float(step))
    now = OptimizerState.of(optimizer, model)
    trained = [name for group in now.groups for name in group["params"]] if fields else []
    state = OptimizerState(now.kind, {name: slots[name] for name in trained}, now.groups)
    graphdef, _, others = split_module(model)
    buffers = {name: values.get(name, one) for name, one in others.items()}
    parameters = {name: values[name] for name in graphstate(model)}
    return TrainState(step, graphdef, parameters, buffers, state).restore(model, optimizer)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _fields(optimizer: Optimizer) -> Mapping[str, str]:
    fields = _SLOTS.get(_name(optimizer))
    if _name(optimizer) in _OTHER_RULES and type(optimizer).__module__.startswith("torch.optim"):
        reason = _OTHER_RULES[_name(optimizer)]
        raise ValueError(f"{_name(optimizer)} goes on from its slots as no optimizer of optax: {reason}")
    if fields is None or not type(optimizer).__module__.startswith("torch.optim"):
        raise ValueError(f"{_name(optimizer)} keeps slots that optax has not; {', '.join(_SLOTS)} are carried over")
    for group in optimizer.param_groups:
        wrong = [f"{key}={group[key]!r}" for key in _OTHERWISE if group.get(key)]
        if _name(optimizer) == "RMSprop" and group.get("momentum"):
            raise ValueError(
                f"RMSprop with momentum={group['momentum']!r} sums gradients in its slot, and optax.rmsprop steps, "
                "which have the learning rate in them: train without momentum, or begin anew"
            )
        if wrong:
            raise ValueError(f"{_name(optimizer)} with {wrong[0]} keeps slots that optax has not")
    if _name(optimizer) == "SGD" and not any(group["momentum"] for group in optimizer.param_groups):
        return {}
    if _name(optimizer) == "RMSprop" and any(group["centered"] for group in optimizer.param_groups):
        if not all(group["centered"] for group in optimizer.param_groups):
            raise ValueError("RMSprop is centered for some parameters only, and optax's for all or none")
        return _CENTERED
    return fields


def _step_of(step: Any) -> int:
    """A step as an int; `ValueError` for what counts none."""
    given = np.asarray(step)
    if given.ndim or given.dtype.kind not in "iu" or given < 0:
        raise ValueError(f"step={step!r} must be an int of at least 0")
    return int(given)


def _check_whole_steps(opt_state: Any) -> None:
    """`ValueError` between the steps of `optax.MultiSteps`, whose sum of gradients no optimizer of torch keeps."""
    for node in _with_fields(opt_state, _MULTI_STEPS):
        if mini := int(np.asarray(_field(node, "mini_step"))):
            raise ValueError(
                f"opt_state has the gradients of {mini} mini steps of optax.MultiSteps, for which torch's optimizers "
                "have no place: convert it after a whole step"
            )


def _check_floating(part: str, tree: Any, own: Any) -> None:
    """`ValueError` for integers and the like where the model's own tree has floating numbers."""
    expected = flat(own)
    for name, leaf in (flat(tree) if isinstance(tree, Mapping) else {}).items():
        kind, of_model = _dtype_of(leaf), _dtype_of(expected.get(name))
        if of_model.is_floating_point and not kind.is_floating_point:
            raise ValueError(f"{part} has {name!r} in {leaf.dtype}, and the model has floating numbers there")


def _check_without_slots(opt_state: Any, optimizer: Optimizer) -> None:
    """`ValueError` where an optimizer without slots is given those of another; counts of steps alone are none."""
    if slots := [name for name, one in flat({"opt_state": opt_state}).items() if np.ndim(one)]:
        raise ValueError(f"{slots[0]} is a slot, and {_name(optimizer)} without momentum keeps none")


def _check_places(there: Any, node: Mapping[str, Any]) -> None:
    """`ValueError` where `there` keeps slots of other parameters, or of other shapes, than `node`."""
    for field, tree in node.items():
        have, given = (_shapes(one) for one in (_field(there, field), tree))
        if wrong := [name for name in sorted(have.keys() | given.keys()) if have.get(name) != given.get(name)]:
            name = wrong[0]
            what = f"{field!r} of {name!r}" if name else repr(field)
            raise ValueError(
                f"opt_state has {what} in the shape {have.get(name)}, and the parameters have {given.get(name)}: make "
                "it by init over all parameters of this model"
            )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = flat(tree) if isinstance(tree, Mapping) else {"": tree}
    return {name: tuple(np.shape(one)) for name, one in leaves.items() if hasattr(one, "shape") or np.isscalar(one)}


def _tree(model: PreTrainedModel, saved: OptimizerState, slot: str, transform: conversion.Transform) -> Any:
    """A slot of every parameter as a tree like that of the weights; zeros, as optax begins, where there is none yet."""
    if slot == "step":
        counts = {int(values["step"]) for values in saved.slots.values()} or {0}
        if len(counts) > 1:
            raise ValueError(f"parameters have taken {sorted(counts)} steps, and optax counts them together")
        return np.asarray(counts.pop(), np.int32)
    values = {}
    for name, parameter in model.named_parameters():
        value = saved.slots.get(name, {}).get(slot)
        values[id(parameter)] = torch.zeros_like(parameter) if value is None else value.to(parameter.device)
    # Buffers go along as they are, so that every name of a checkpoint is there; they have no slots.
    state = {name: values.get(id(one), one) for name, one in model.state_dict(keep_vars=True).items()}
    return _apart(transform({name: one.detach() for name, one in state.items()}))[0]


def _apart(tree: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The parameters of a tree, and `{"batch_stats": ...}` where the model has them."""
    if set(tree) == {"params", "batch_stats"}:
        return tree["params"], {"batch_stats": tree["batch_stats"]}
    return tree, {}


def _by_name(model: PreTrainedModel, params: Any, stats: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a tree of weights, or of slots, by the names of the model's parameters, in a dtype of all."""
    tree = {"params": params, **stats} if stats else params
    found = _dtypes(tree)
    # one dtype for all: of several the one that holds each
    dtype = found.pop() if len(found) == 1 else torch.float64 if torch.float64 in found else torch.float32
    config = conversion.plain_config(model.config)
    built: nn.Module = conversion.from_flax(type(model), config, tree, copy=True, dtype=dtype)
    return {**graphstate(built), **graphother(built)}


def _kinds_by_name(model: PreTrainedModel, tree: Any, stats: Mapping[str, Any]) -> dict[str, torch.dtype]:
    """The dtypes of a tree of slots by the names of the model's parameters, or wider where torch needs that: its
    optimizers step where a slot has its parameter's dtype, and nothing is lost by a wider one."""
    found, own = sorted(_dtypes(tree), key=str), {name: one.dtype for name, one in graphstate(model).items()}
    kinds = dict.fromkeys(own, found[0])
    if len(found) > 1:  # where each leaf goes is seen by what it is filled with
        numbers = _by_name(model, _filled(tree, lambda leaf: found.index(_dtype_of(leaf))), stats)
        kinds = {name: found[int(numbers[name].max())] if numbers[name].numel() else own[name] for name in own}
    return {
        name: own[name] if torch.promote_types(kind, own[name]) == own[name] else kind for name, kind in kinds.items()
    }


def _filled(tree: Any, number: Callable[[Any], int]) -> Any:
    """`tree` with each leaf full of one number, float32."""
    if isinstance(tree, Mapping):
        return {key: _filled(one, number) for key, one in tree.items()}
    return np.full(np.shape(tree), number(tree), np.float32)


def _dtypes(tree: Any) -> set[torch.dtype]:
    """The floating dtypes of the leaves."""
    return {one for one in map(_dtype_of, flat(tree).values()) if one.is_floating_point}


def _dtype_of(leaf: Any) -> torch.dtype:
    """A leaf's dtype; float32 for those that torch does not have."""
    found = getattr(torch, str(getattr(leaf, "dtype", "float32")), torch.float32)
    return found if isinstance(found, torch.dtype) else torch.float32


def _part(train_state: Any, key: str, *, optional: bool = False) -> Any:
    found = train_state.get(key) if isinstance(train_state, Mapping) else getattr(train_state, key, None)
    if found is None and not optional:
        raise ValueError(f"the train state has no {key!r}; it has step, params and opt_state as flax's TrainState has")
    return found


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, Mapping):
        yield from node.values()
    elif isinstance(node, list | tuple):
        yield from node


def _field(node: Any, field: str) -> Any:
    return node[field] if isinstance(node, Mapping) else getattr(node, field)


def _names(node: Any) -> set[str]:
    return set(node) if isinstance(node, Mapping) else set(getattr(node, "_fields", ()))


def _has(node: Any, fields: set[str]) -> bool:
    return _names(node) == fields


def _with_fields(tree: Any, fields: set[str]) -> Iterator[Any]:
    """The parts of an optimizer's state that have these fields and others."""
    if _names(tree) >= fields:
        yield tree
    for child in _children(tree):
        yield from _with_fields(child, fields)


def _mapping(like: Mapping[str, Any], items: dict[str, Any]) -> Any:
    """`items` as a mapping of the same class, which for jax is part of a tree's structure."""
    return items if type(like) is dict else type(like)(items)  # type: ignore[call-arg]


def _in_dtypes(tree: Any, like: Any) -> Any:
    """The arrays of `tree` in the dtypes of those in `like`: `mu_dtype`, for one."""
    if isinstance(tree, Mapping):
        return {key: _in_dtypes(one, like.get(key)) for key, one in tree.items()}
    dtype = getattr(like, "dtype", None)
    return tree if dtype is None or not hasattr(tree, "astype") else tree.astype(dtype, copy=False)


def _nodes(tree: Any, fields: set[str]) -> Iterator[Any]:
    """The parts of an optimizer's state that have exactly these fields."""
    if _has(tree, fields):
        yield tree
        return
    for child in _children(tree):
        yield from _nodes(child, fields)


def _counted(tree: Any, count: int, fields: set[str]) -> Any:
    """`tree` with `count` in the parts that count steps and nothing else, or for hyperparameters that are injected."""
    if _has(tree, fields) and fields:
        return tree
    names = _names(tree)
    counts = "count" in names and (names == {"count"} or "hyperparams" in names) and not np.ndim(_field(tree, "count"))
    counted = "count" if counts else "gradient_step" if names >= _MULTI_STEPS else None

    def of(name: str, child: Any) -> Any:
        if name == counted:
            return np.asarray(count, getattr(child, "dtype", np.int32))
        return _counted(child, count, fields)

    if isinstance(tree, Mapping):
        return _mapping(tree, {key: of(key, child) for key, child in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(of, tree._fields, tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_counted(child, count, fields) for child in tree)
    return tree


def _replaced(tree: Any, node: Mapping[str, Any]) -> Any:
    """`tree` with `node` in the place of the part that has its fields."""
    if _has(tree, set(node)):
        filled = {field: _in_dtypes(one, _field(tree, field)) for field, one in node.items()}
        return _mapping(tree, filled) if isinstance(tree, Mapping) else type(tree)(**filled)
    if isinstance(tree, Mapping):
        return _mapping(tree, {key: _replaced(child, node) for key, child in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_replaced(child, node) for child in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_replaced(child, node) for child in tree)
    return tree
