"""A train state: step, parameters, buffers and the slots of an optimizer, as data that saves and restores.

    state = to_state(model, optimizer, step=100)
    state.save("state-100")
    load_state("state-100", model_class=type(model)).restore(model, optimizer)

What `flax.training.train_state.TrainState` and EasyDeL's `EasyDeLState` are in JAX. An optimizer's slots are kept by
the parameter's name, not by its number in the optimizer, so that they fit one that lists them in another order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.optim import Optimizer

from easytorch.argument_types import check_types
from easytorch.bridge.core.json_files import read_json
from easytorch.bridge.errors import CheckpointError, nearest
from easytorch.bridge.storage.atomic import new_folder
from easytorch.protocol.adapters import add_described_adapters, described_adapters, frozen_before_adapters
from easytorch.protocol.lazy import lazy_init
from easytorch.protocol.quantization import quantize
from easytorch.protocol.quantization_config import METHOD, QuantizationConfig
from easytorch.protocol.state import GraphDef, State, checked, merge_module, merge_params_dict, split_module

TENSORS, STATE, CONFIG = "train_state.safetensors", "train_state.json", "config.json"
# Some hundred bytes a tensor.
_STATE_LIMIT = 1 << 28
# Slots of torch's own optimizers that have their parameter's shape.
_SHAPED = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "acc_delta", "sum"}
_SHAPED |= {"ax", "grad_avg", "prev", "variance"}
# Adafactor's, of rows and columns.
_FACTORED = {"row_var": -1, "col_var": -2}


@dataclass(frozen=True)
class OptimizerState:
    """The slots of a torch optimizer by parameter name, and its groups, whose "params" are names."""

    kind: str
    slots: Mapping[str, Mapping[str, Any]]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer, model: nn.Module) -> OptimizerState:
        """The state of `optimizer` for the parameters of `model`; `ValueError` for a parameter of another model."""
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
        """`ValueError` where the slots do not fit `optimizer` over `model`."""
        if _kind(optimizer) != self.kind:
            raise ValueError(f"the state is that of {self.kind}, and the optimizer is {_kind(optimizer)}")
        parameters = dict(model.named_parameters())
        there = OptimizerState.of(optimizer, model).groups
        if [set(group["params"]) for group in there] != [set(group["params"]) for group in self.groups]:
            have, given = ([len(group["params"]) for group in groups] for groups in (there, self.groups))
            raise ValueError(f"the optimizer's groups hold {have} parameters, and the state's {given}, or others")
        for name, values in self.slots.items():
            if name not in parameters:
                raise ValueError(f"{name!r} has slots, and is no parameter{nearest(name, parameters)}")
            for slot, value in values.items():
                wanted = _shape(slot, parameters[name])
                if wanted is not None and isinstance(value, torch.Tensor) and tuple(value.shape) != wanted:
                    shapes = f"{tuple(value.shape)}, and its parameter {tuple(parameters[name].shape)}"
                    raise ValueError(f"the slot {slot!r} of {name!r} has the shape {shapes}")

    def restore(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Puts slots and settings into `optimizer`. Unlike `Optimizer.load_state_dict` it keeps the slots' dtypes."""
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


@dataclass(frozen=True)
class TrainState:
    """Step, model and optimizer as data; the tensors of `to_state` are the model's and the optimizer's own memory."""

    step: int
    graphdef: GraphDef
    graphstate: State
    graphother: State
    optimizer: OptimizerState | None = None

    @property
    def model(self) -> Any:
        """A model around the state's tensors."""
        return merge_module(self.graphdef, self.graphstate, self.graphother)

    def restore(self, model: nn.Module, optimizer: Optimizer | None = None) -> int:
        """Puts the state into `model` and `optimizer`, in place, and returns the step.

        `ValueError` where names, shapes or the kind of optimizer differ; both are then unchanged.
        """
        values = {**self.graphstate, **self.graphother}
        checked(model, values, complete=True)
        if optimizer is not None:
            if self.optimizer is None:
                raise ValueError("the state holds no optimizer; restore the model alone, or save the state with one")
            self.optimizer.check(optimizer, model)
        merge_params_dict(model, values)
        if optimizer is not None and self.optimizer is not None:
            self.optimizer.restore(optimizer, model)
        return self.step

    def save(self, folder: str | Path) -> None:
        """Writes config.json, train_state.json and train_state.safetensors into a new folder, complete or not at all.

        `TypeError` for an optimizer whose state is neither tensors nor what JSON holds. For a model that
        `from_pretrained` reads, save `state.model`.
        """
        for values in (self.graphstate, self.graphother):
            if empty := next((name for name, one in values.items() if one.is_meta), None):
                raise ValueError(f"{empty!r} of the state is on the meta device and has no values to save")
        tensors: dict[str, torch.Tensor] = {}
        content = {
            "format": "easytorch train state",
            "version": 1,
            "step": self.step,
            "params": _encode(self.graphstate, "params", tensors),
            "buffers": _encode(self.graphother, "buffers", tensors),
        }
        model = self.graphdef.skeleton
        content["frozen"] = [name for name, one in model.named_parameters() if not one.requires_grad]
        if adapters := described_adapters(model):
            content["adapters"], content["active_adapters"] = adapters, model.active_adapters()
            content["frozen_before_adapters"] = frozen_before_adapters(model)
        if self.optimizer is not None:
            content["optimizer"] = {
                "kind": self.optimizer.kind,
                "slots": _encode(self.optimizer.slots, "slots", tensors),
                "groups": _encode(self.optimizer.groups, "groups", tensors),
            }
        if self.graphdef.config is None:
            raise TypeError(f"{type(model).__name__} has no config to save; it must be a model of transformers")
        text = json.dumps(content)
        with new_folder(Path(folder)) as partial:
            self.graphdef.config.save_pretrained(partial)
            save_file(tensors, partial / TENSORS, metadata={"format": "pt"})
            (partial / STATE).write_text(text, encoding="utf-8")


@check_types("step")
def to_state(model: nn.Module, optimizer: Optimizer | None = None, *, step: int = 0) -> TrainState:
    """The train state of `model`, with the slots of `optimizer` where one is given."""
    if type(step) is not int or step < 0:
        raise ValueError(f"step={step!r} must be an int of at least 0")
    inside = getattr(model, "_orig_mod", None)  # of torch.compile, which puts its name before every parameter's
    model = inside if isinstance(inside, nn.Module) else model
    slots = None if optimizer is None else OptimizerState.of(optimizer, model)
    return TrainState(step, *split_module(model), slots)


@check_types()
def load_state(folder: str | os.PathLike[str], *, model_class: type[Any]) -> TrainState:
    """The state that `TrainState.save` wrote, its tensors on the CPU, quantized layers and adapters included.

    model_class: that of the model, or an auto class.

    `CheckpointError` for a folder that is none, is damaged, or holds another model.
    """
    folder = Path(folder)
    if not (folder / STATE).is_file():
        raise CheckpointError("is not there; pass a folder that TrainState.save wrote", file=folder / STATE)
    content = read_json(folder / STATE, limit=_STATE_LIMIT)
    if content.get("format") != "easytorch train state" or content.get("version") != 1:
        raise CheckpointError("is no train state of version 1, as TrainState.save writes it", file=folder / STATE)
    try:
        with safe_open(folder / TENSORS, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        parts = {key: _decode(content[key], tensors.__getitem__) for key in ("params", "buffers")}
        saved = content.get("optimizer")
        optimizer = None
        if saved is not None:
            slots, groups = (_decode(saved[key], tensors.__getitem__) for key in ("slots", "groups"))
            optimizer = OptimizerState(str(saved["kind"]), slots, groups)
        step = int(content["step"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"is damaged ({error}); save the state again", file=folder / TENSORS) from error
    model = lazy_init(model_class, _read_config(folder, model_class))
    _change_layers(model, content, folder / STATE)
    try:
        checked(model, {**parts["params"], **parts["buffers"]}, complete=True)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"does not fit {type(model).__name__}: {error}", file=folder) from error
    _freeze(model, content, "frozen", folder / STATE)
    return TrainState(step, GraphDef(model), parts["params"], parts["buffers"], optimizer)


def _read_config(folder: Path, model_class: type[Any]) -> Any:
    read_json(folder / CONFIG, limit=_STATE_LIMIT)
    config_class = getattr(model_class, "config_class", None)
    if config_class is None:
        from transformers import AutoConfig

        config_class = AutoConfig
    try:
        return config_class.from_pretrained(folder)
    except (StrictDataclassError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"is damaged ({reason}); save the state again", file=folder / CONFIG) from error


def _freeze(model: nn.Module, content: Mapping[str, Any], key: str, file: Path) -> None:
    """Freezes the parameters that `content` lists under `key`, and no others; states of before have no such list."""
    if key not in content:
        return
    names, parameters = content[key], dict(model.named_parameters())
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"is damaged: {key!r} is no list of names; save the state again", file=file)
    if unknown := [name for name in names if name not in parameters]:
        raise CheckpointError(f"does not fit {type(model).__name__}: it has no parameter {unknown[0]!r}", file=file)
    frozen = set(names)
    for name, parameter in parameters.items():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(name not in frozen)


def _change_layers(model: Any, content: Mapping[str, Any], file: Path) -> None:
    """Gives a new model the quantized layers that its config names, and the adapters of a saved state."""
    quantized = getattr(model.config, "quantization_config", None)
    if quantized is not None:
        given = quantized if isinstance(quantized, dict) else quantized.to_dict()
        model.config.quantization_config = None
        if given.get("quant_method") == METHOD:
            quantize(model, QuantizationConfig(**given))
    if content.get("adapters"):
        _freeze(model, content, "frozen_before_adapters", file)
        add_described_adapters(model, content["adapters"], content["active_adapters"])


def _shape(slot: str, parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The shape that a slot of torch's own optimizers has; None where it is another one's, or a number."""
    shape = list(parameter.shape)
    if slot in _FACTORED and len(shape) > 1:
        shape[_FACTORED[slot]] = 1
    return tuple(shape) if slot in _SHAPED | _FACTORED.keys() else None


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


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON; its tensors go to `tensors` under their path."""
    if isinstance(value, torch.Tensor):
        # A file of safetensors holds no views.
        tensors[path] = value.detach().contiguous().clone()
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"dict": [[key, _encode(one, f"{path}/{key}", tensors)] for key, one in value.items()]}
    if isinstance(value, list | tuple):
        inner = [_encode(one, f"{path}/{number}", tensors) for number, one in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": inner}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{path} is {type(value).__name__}, which a train state cannot hold; it holds tensors and numbers")


def _decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensor(inner)
    if kind == "dict":
        return {key: _decode(one, tensor) for key, one in inner}
    made = [_decode(one, tensor) for one in inner]
    return tuple(made) if kind == "tuple" else made
