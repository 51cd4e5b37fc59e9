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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from easytorch.argument_types import check_types
from easytorch.bridge.core.json_files import read_json
from easytorch.bridge.errors import CheckpointError
from easytorch.bridge.storage.atomic import new_folder
from easytorch.protocol.adapters import (
    active_adapters,
    add_described_adapters,
    described_adapters,
    frozen_before_adapters,
)
from easytorch.protocol.lazy import check_model_class, lazy_init
from easytorch.protocol.optimizer_state import OptimizerState
from easytorch.protocol.quantization import quantize
from easytorch.protocol.quantization_config import METHOD, QuantizationConfig
from easytorch.protocol.state import GraphDef, State, checked, merge_module, merge_params_dict, split_module
from easytorch.protocol.train_state_file import (
    FORMAT,
    STATE,
    STATE_LIMIT,
    TENSORS,
    VERSION,
    Document,
    encode,
    read_document,
)
from easytorch.protocol.wrappers import unwrapped

CONFIG = "config.json"


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
        model = unwrapped(model)
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
        tensors: dict[str, Tensor] = {}
        content = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "params": encode(self.graphstate, "params", tensors),
            "buffers": encode(self.graphother, "buffers", tensors),
        }
        model = self.graphdef.skeleton
        content["frozen"] = [name for name, one in model.named_parameters() if not one.requires_grad]
        if adapters := described_adapters(model):
            content["adapters"], content["active_adapters"] = adapters, active_adapters(model)
            content["frozen_before_adapters"] = frozen_before_adapters(model)
        if self.optimizer is not None:
            content["optimizer"] = {
                "kind": self.optimizer.kind,
                "slots": encode(self.optimizer.slots, "slots", tensors),
                "groups": encode(self.optimizer.groups, "groups", tensors),
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
    """The train state of `model`, with the slots of `optimizer` where one is given; `ValueError` for slots that do not
    fit their parameters."""
    if type(step) is not int or step < 0:
        raise ValueError(f"step={step!r} must be an int of at least 0")
    model = unwrapped(model)
    slots = None if optimizer is None else OptimizerState.of(optimizer, model)
    if slots is not None:
        slots.check_slots(dict(model.named_parameters()))
    return TrainState(step, *split_module(model), slots)


@check_types()
def load_state(folder: str | os.PathLike[str], *, model_class: type[Any]) -> TrainState:
    """The state that `TrainState.save` wrote, its tensors on the CPU, quantized layers and adapters included.

    model_class: that of the model, or an auto class.

    `CheckpointError` for a folder that is none, is damaged, or holds another model.
    """
    check_model_class(model_class)
    folder = Path(folder)
    document = read_document(folder)
    model = lazy_init(model_class, _read_config(folder, model_class))
    try:
        _change_layers(model, document)
        _untie(model, document.params)
        checked(model, {**document.params, **document.buffers}, complete=True)
        _freeze(model, document.frozen)
        if document.optimizer is not None:
            document.optimizer.check_slots(dict(model.named_parameters()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"does not fit {type(model).__name__}: {error}", file=folder) from error
    return TrainState(document.step, GraphDef(model), document.params, document.buffers, document.optimizer)


def _read_config(folder: Path, model_class: type[Any]) -> Any:
    read_json(folder / CONFIG, limit=STATE_LIMIT)
    config_class = getattr(model_class, "config_class", None)
    if config_class is None:
        from transformers import AutoConfig

        config_class = AutoConfig
    try:
        return config_class.from_pretrained(folder)
    except (StrictDataclassError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"is damaged ({reason}); save the state again", file=folder / CONFIG) from error


def _untie(model: nn.Module, saved: State) -> None:
    """Gives weights that a new model ties tensors of their own, where the state has one for each of their names: they
    were untied when it was saved, whatever the config says."""
    first = {id(one): name for name, one in model.named_parameters()}
    for name, one in list(model.named_parameters(remove_duplicate=False)):
        if first[id(one)] != name and {name, first[id(one)]} <= saved.keys():
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, nn.Parameter(one.detach().clone(), one.requires_grad))


def _freeze(model: nn.Module, names: list[str] | None) -> None:
    """Freezes the parameters `names`, and no others; states of before have no such list."""
    if names is None:
        return
    parameters = dict(model.named_parameters())
    if unknown := [name for name in names if name not in parameters]:
        raise ValueError(f"it has no parameter {unknown[0]!r}")
    frozen = set(names)
    for name, parameter in parameters.items():
        if parameter.is_floating_point() or parameter.is_complex():
            parameter.requires_grad_(name not in frozen)


def _change_layers(model: Any, document: Document) -> None:
    """Gives a new model the quantized layers that its config names, and the adapters of a saved state."""
    quantized = getattr(model.config, "quantization_config", None)
    if quantized is not None:
        given = quantized if isinstance(quantized, dict) else quantized.to_dict()
        model.config.quantization_config = None
        if given.get("quant_method") == METHOD:
            quantize(model, QuantizationConfig(**given))
    if document.adapters:
        _freeze(model, document.frozen_before_adapters)
        add_described_adapters(model, document.adapters, document.active_adapters)
