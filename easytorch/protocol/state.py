"""A model as data: its tensors apart from the rest, in dicts that `torch.func` takes, and merged again.

    graphdef, graphstate, graphother = split_module(model)
    output = graphdef.apply({**graphstate, **graphother}, input_ids=tokens)    # no tensor but those given
    again = merge_module(graphdef, graphstate, graphother)

A state is a flat dict, name -> tensor, under the names of `named_parameters` and `named_buffers`: a weight that is tied
has the first of its names, and wrappers (`torch.compile`, PEFT's, DDP's) add none. Its tensors are the model's own
memory, without gradients. `flatten` and `unflatten` turn it into nested dicts and back. The names are those of
EasyDeL's `BaseModuleProtocol`; there they are Flax NNX's `split` and `merge`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from easytorch.argument_types import check_types
from easytorch.bridge.core.nested import flat, nested
from easytorch.bridge.errors import nearest
from easytorch.layers.quantized import separate_codes
from easytorch.protocol.wrappers import unwrapped

State = dict[str, torch.Tensor]


class GraphDef:
    """A module without its tensors: classes, config, hooks and modes, and the names, shapes and dtypes of its state."""

    def __init__(self, module: nn.Module) -> None:
        separate_codes(module)
        memo: dict[int, Any] = {id(one): _on_meta(one) for one in (*module.parameters(), *module.buffers())}
        self._skeleton = copy.deepcopy(module, memo)

    @property
    def module_class(self) -> type[nn.Module]:
        return type(self._skeleton)

    @property
    def skeleton(self) -> Any:
        """The module itself, its tensors on the meta device."""
        return self._skeleton

    @property
    def config(self) -> Any:
        """The module's config; None for a module without one."""
        return getattr(self._skeleton, "config", None)

    def apply(self, state: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """The module's forward with the parameters and buffers of `state`, which `torch.func.grad` and `vmap` may map.

        `ValueError` where a name is missing or is not the module's.
        """
        known = {name for name, _ in _slots(self._skeleton)}
        _check_names(state, self._skeleton, required=set(tensors_of(self._skeleton)), known=known)
        return torch.func.functional_call(self._skeleton, dict(state), args, kwargs)

    def merge(self, state: Mapping[str, torch.Tensor]) -> Any:
        """A new module around the tensors of `state`, all parameters and buffers, whose memory it shares.

        `ValueError` where a name is missing, is not the module's, or has another shape.
        """
        values = checked(self._skeleton, state, complete=True)
        module = copy.deepcopy(self._skeleton)
        _assign(module, values)
        return module

    def _described(self) -> tuple[Any, ...]:
        tensors = [(name, tuple(one.shape), one.dtype) for name, one in tensors_of(self._skeleton).items()]
        return (str(self._skeleton), str(self.config), tuple(tensors))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GraphDef) and self._described() == other._described()

    def __hash__(self) -> int:
        return hash(self._described())

    def __repr__(self) -> str:
        return f"GraphDef({self.module_class.__qualname__}, {len(tensors_of(self._skeleton))} tensors)"


@check_types()
def graphdef(model: nn.Module) -> GraphDef:
    """`model` without its tensors."""
    return GraphDef(unwrapped(model))


@check_types()
def graphstate(model: nn.Module) -> State:
    """The parameters of `model`: name -> tensor, detached, in the model's own memory."""
    return {name: parameter.detach() for name, parameter in unwrapped(model).named_parameters()}


@check_types()
def graphother(model: nn.Module) -> State:
    """The buffers of `model`, those too that its checkpoints leave out: name -> tensor, in the model's own memory."""
    return dict(_buffers_of(unwrapped(model)))


@check_types()
def split_module(model: nn.Module) -> tuple[GraphDef, State, State]:
    """(graphdef, graphstate, graphother) of `model`: its structure, its parameters, its buffers."""
    return graphdef(model), graphstate(model), graphother(model)


@check_types()
def merge_module(
    definition: GraphDef, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]
) -> Any:
    """A new module of what `split_module` gave; it shares the memory of the tensors."""
    return definition.merge({**parameters, **buffers})


@check_types()
def split_params(model: nn.Module) -> State:
    """The parameters of `model`: `graphstate`."""
    return graphstate(model)


@check_types("params_dict")
def split_params_dict(model: nn.Module, params_dict: Mapping[str, Any] | None = None) -> dict[str, State]:
    """A dict of tensors, nested or flat, in its parts: `{"params": ..., "buffers": ...}`, flat.

    Without `params_dict` those of `model` itself. `ValueError` for a name that the model does not have.
    """
    model = unwrapped(model)
    given = tensors_of(model) if params_dict is None else flatten(params_dict)
    parameters = {name for name, kind in _slots(model) if kind == "parameter"}
    _check_names(given, model, required=(), known={name for name, _ in _slots(model)})
    parts: dict[str, State] = {"params": {}, "buffers": {}}
    for name, tensor in given.items():
        parts["params" if name in parameters else "buffers"][name] = tensor
    return parts


@check_types("tree")
def merge_params(model: nn.Module, tree: Mapping[str, Any]) -> Any:
    """Puts the parameters of `tree`, nested or flat, into `model`, which is returned; none may be missing.

    Values are copied, and cast to the parameter's dtype, so that optimizers and tied weights stay as they are;
    parameters on the meta device (`lazy_init`) take the tensors themselves. `ValueError` or `TypeError` where a
    name, a shape or a value does not fit; the model is then unchanged.
    """
    _merge(unwrapped(model), tree, complete=True)
    return model


@check_types("params_dict")
def merge_params_dict(model: nn.Module, params_dict: Mapping[str, Any]) -> Any:
    """`merge_params` with some of the parameters and buffers; those that are not given stay as they are."""
    _merge(unwrapped(model), params_dict, complete=False)
    return model


@check_types("tree")
def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """`{"layers": {"0": {"weight": w}}}` -> `{"layers.0.weight": w}`; a flat dict comes back as it is."""
    _check_mapping(tree)
    return flat(tree, separator=".")


@check_types("leaves")
def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """`{"layers.0.weight": w}` -> `{"layers": {"0": {"weight": w}}}`, what Flax calls a pytree of parameters.

    `ValueError` for a name that is both a tensor and the beginning of another.
    """
    _check_mapping(leaves)
    if others := [name for name in leaves if not isinstance(name, str)]:
        raise TypeError(f"names of parameters are str, and {others[0]!r} is {type(others[0]).__name__}")
    return nested(leaves, separator=".")


def _check_mapping(tree: Any) -> None:
    if not isinstance(tree, Mapping):
        raise TypeError(f"parameters are a dict of tensors, nested or flat, not {type(tree).__name__}")


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by the first of its names."""
    return {**dict(module.named_parameters()), **dict(_buffers_of(module))}


def _buffers_of(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Its named buffers, codes of quantized layers as they are saved."""
    separate_codes(module)
    return module.named_buffers(remove_duplicate=remove_duplicate)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _slots(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(name, "parameter" or "buffer") of every tensor, under each of its names."""
    yield from ((name, "parameter") for name, _ in module.named_parameters(remove_duplicate=False))
    yield from ((name, "buffer") for name, _ in _buffers_of(module, remove_duplicate=False))


def _check_names(
    given: Collection[str], module: nn.Module, *, required: Collection[str], known: Collection[str]
) -> None:
    """`ValueError` where a name is given that is not `known`, or one that is `required` is not given."""
    kind = type(module).__name__
    for name in given:
        if name not in known:
            raise ValueError(f"{name!r} is no parameter or buffer of {kind}{nearest(name, known)}")
    if missing := [name for name in required if name not in given]:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{missing[0]!r}{others} of {kind} is not given; pass every one, or use merge_params_dict")


def check_value(name: str, value: Any, target: torch.Tensor) -> None:
    """`TypeError` or `ValueError` where `value` cannot be copied into `target`, the tensor `name` of a model.

    Integers are no values of a floating point parameter: they are codes of a quantized one.
    """
    if not isinstance(value, torch.Tensor):
        kind = type(value).__name__
        raise TypeError(f"{name!r} is {kind} and must be a torch.Tensor; trees of arrays go through from_flax")
    if value.shape != target.shape:
        raise ValueError(f"{name!r} has the shape {tuple(value.shape)}, and {tuple(target.shape)} in the model")
    if (value.is_complex(), value.is_floating_point()) != (target.is_complex(), target.is_floating_point()):
        raise ValueError(f"{name!r} is {value.dtype}, and {target.dtype} in the model")
    if value.layout != torch.strided:
        raise ValueError(f"{name!r} is {value.layout}, and the model's are dense; pass its to_dense()")
    if value.is_meta and not target.is_meta:
        raise ValueError(f"{name!r} is on the meta device and has no values; the model's has")


def checked(module: nn.Module, tree: Mapping[str, Any], *, complete: bool | str) -> State:
    """`tree` flat, each tensor under the first of its names, once all of it is known to fit.

    complete: True requires every parameter and buffer, "parameters" every parameter.
    """
    leaves = flatten(tree)
    every = dict(module.named_parameters(remove_duplicate=False)) | dict(_buffers_of(module, remove_duplicate=False))
    first = {id(tensor): name for name, tensor in tensors_of(module).items()}
    named: dict[str, str] = {}
    values: State = {}
    _check_names(leaves, module, required=(), known=every)
    for name, value in leaves.items():
        target = every[name]
        check_value(name, value, target)
        one = first[id(target)]
        if one in values and values[one] is not value and not _equal(values[one], value):
            raise ValueError(f"{name!r} and {named[one]!r} are one tensor in the model, and differ here")
        values[one], named[one] = value, name
    if complete:
        required = tensors_of(module) if complete is True else dict(module.named_parameters())
        _check_names(values, module, required=required, known=every)
    return values


@torch.no_grad()
def _merge(model: nn.Module, tree: Mapping[str, Any], *, complete: bool) -> Any:
    values = checked(model, tree, complete="parameters" if complete else False)
    targets = tensors_of(model)
    if any(one.is_meta for one in model.buffers()):
        _fill_buffers(model, given=values, device=next((one.device for one in values.values()), torch.device("cpu")))
        targets = tensors_of(model)
    # A value may be another parameter's memory: all are read before any is written.
    memory = {one.untyped_storage().data_ptr(): one for one in targets.values() if not one.is_meta}
    ready = {}
    for name, value in values.items():
        target = targets[name]
        if target.is_meta:
            # an expanded tensor has one number in several places
            ready[name] = value.clone() if 0 in value.stride() and value.numel() > 1 else value
        elif not _same_memory(value, target):
            ready[name] = value.clone() if value.untyped_storage().data_ptr() in memory else value
    _assign(model, {name: value for name, value in ready.items() if targets[name].is_meta})
    for name, value in ready.items():
        if not targets[name].is_meta:
            targets[name].copy_(value)
    return model


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN being one of them."""
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or not one.is_floating_point() or one.is_meta or other.is_meta:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _same_memory(value: torch.Tensor, target: torch.Tensor) -> bool:
    return (value.data_ptr(), value.stride(), value.dtype) == (target.data_ptr(), target.stride(), target.dtype)


def _fill_buffers(model: nn.Module, *, given: Collection[str], device: torch.device) -> None:
    """Gives buffers on the meta device the values that construction computes, through transformers' `_init_weights`.

    `ValueError` for one that this cannot compute and that is not `given`.
    """
    empty = {
        (name, module): {key: one for key, one in module.named_buffers(recurse=False) if one.is_meta}
        for name, module in model.named_modules()
    }
    for (name, module), buffers in empty.items():
        computed = isinstance(model, PreTrainedModel) and all(one.is_meta for one in module.parameters(recurse=False))
        for key in buffers:
            path = f"{name}.{key}" if name else key
            if not computed and path not in given:
                raise ValueError(f"the buffer {path!r} is on the meta device, and is not given; pass it too")
    for (_, module), buffers in empty.items():
        for key, one in buffers.items():
            module._buffers[key] = torch.empty_like(one, device=device)
        if buffers and isinstance(model, PreTrainedModel):
            model._init_weights(module)


def _assign(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Puts the tensors themselves into the module, under every name of each, with the gradient flags it had."""
    old = tensors_of(module)
    new: dict[int, torch.Tensor] = {}
    for name, value in values.items():
        target = old[name]
        kept = nn.Parameter(value.detach(), target.requires_grad) if isinstance(target, nn.Parameter) else value
        new[id(target)] = kept
    for part in module.modules():
        slots: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for tensors in slots:
            for name, one in tensors.items():
                if one is not None and id(one) in new:
                    tensors[name] = new[id(one)]
