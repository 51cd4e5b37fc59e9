"""`adapter_names=[...]` of a call: an adapter for each row of the batch, as `peft.PeftModel` takes them.

PEFT's layers compute such a batch themselves where they are given the names; its wrapper, which gives them, is not
around a model whose adapters transformers put in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from easytorch.layers.packed_tower import PackedPatches
from easytorch.protocol.adapters import require_peft, wrapped_layers

BASE = "__base__"
# `generate` of names puts an attribute on the model
_ONE_AT_A_TIME = threading.RLock()


class _Rows:
    """The names of a batch's rows, and how often `generate` repeats each row: once per beam or returned sequence."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.repeats, self._thread = list(names), 1, threading.get_ident()

    def here(self) -> bool:
        """Whether this call is that of the names: another thread may run the same model meanwhile."""
        return torch.compiler.is_compiling() or threading.get_ident() == self._thread

    def hook(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not self.here():
            return None
        names = self.names
        # an encoder runs before the rows are repeated
        if self.repeats > 1 and args and len(args[0]) != len(names):
            names = [name for name in names for _ in range(self.repeats)]
        if args and len(args[0]) != len(names):
            raise ValueError(
                f"adapter_names has {len(names)} names, and a layer with an adapter gets {len(args[0])} rows: give one "
                "for each prompt; if there are as many, the class runs tokens as rows, and cannot take a name for each"
            )
        return args, {**kwargs, "adapter_names": names}


@contextmanager
def rows_of_adapters(model: nn.Module, names: Any) -> Iterator[_Rows]:
    """While it is open, row i of every input of PEFT's layers in `model` gets the adapter `names[i]`.

    names: a list of adapters' names, "__base__" for none. `ValueError` where the model has no such adapter, is in
    training mode, was compiled in place (`model.compile()`: such a graph sees no names), or has layers that do not tell
    rows apart; the layers raise PEFT's for another length, DoRA and merged adapters. `TypeError` for another type.
    """
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f'adapter_names={names!r} must be a list with an adapter\'s name, or "{BASE}", for each row')
    layers = _layers(model, set(names) - {BASE})
    rows = _Rows(names)
    handles = [layer.register_forward_pre_hook(rows.hook, with_kwargs=True) for layer in layers]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


def generate_rows(theirs: Callable[..., Any], model: Any, *args: Any, adapter_names: Any, **kwargs: Any) -> Any:
    """`theirs`, a `generate` of transformers, with an adapter for each row of the prompts."""
    kwargs.setdefault("disable_compile", True)  # a graph that was made without the names would run without them
    with _ONE_AT_A_TIME, rows_of_adapters(model, adapter_names) as rows:
        expand = model._expand_inputs_for_generation

        def noted(expand_size: int = 1, *more: Any, **inputs: Any) -> Any:
            if rows.here():
                rows.repeats = expand_size
            return expand(expand_size, *more, **inputs)

        model._expand_inputs_for_generation = noted
        try:
            return theirs(model, *args, **kwargs)
        finally:
            vars(model).pop("_expand_inputs_for_generation", None)


def _layers(model: Any, wanted: set[str]) -> list[nn.Module]:
    """PEFT's layers of `model`, once they are known to carry `wanted`."""
    peft = require_peft()
    tuners, copies = peft.tuners, peft.utils.other.AuxiliaryTrainingWrapper
    adapted = wrapped_layers(model)
    if not adapted:
        raise ValueError(f"adapter_names: {type(model).__name__} has no adapter; load_adapter gives it one")
    if model.training:
        raise ValueError("adapter_names is for inference, and the model is in training mode: call model.eval()")
    if any(getattr(one, "_compiled_call_impl", None) is not None for one in model.modules()):
        raise ValueError(
            "adapter_names: the model was compiled in place, and such a graph sees no names; use "
            "torch.compile(model)(...), or a model that was not compiled"
        )
    _check_towers(model, adapted)
    found, known = [], set[str]()
    for name, layer in adapted.items():
        if isinstance(layer, tuners.lora.layer.LoraLayer):
            known |= layer.lora_A.keys() | layer.lora_embedding_A.keys()
            found.append(layer)
        elif not isinstance(layer, tuners.trainable_tokens.layer.TrainableTokensLayer):
            raise ValueError(f"adapter_names is for LoRA, and {name} is a {type(layer).__name__} of another kind")
    if BASE in known:
        raise ValueError(f"adapter_names: an adapter is called {BASE!r}, which stands for none; give it another name")
    if unknown := sorted(wanted - known):
        raise ValueError(f"adapter_names: there is no LoRA adapter {', '.join(unknown)}; there are {sorted(known)}")
    for name, module in model.named_modules():
        if isinstance(module, copies):
            if lacks := sorted(wanted - set(module._adapters)):
                raise ValueError(f"adapter_names: {name} is trained apart by other adapters, and not by {lacks[0]!r}")
            found.append(module)
        elif isinstance(module, PackedPatches):
            tower = name.rpartition(".")[0]
            if any(one.startswith(f"{tower}.") for one in adapted):
                raise ValueError(f"adapter_names: {tower} has adapters, and its rows are patches of all images")
    return found


def _check_towers(model: nn.Module, adapted: Iterable[str]) -> None:
    """`ValueError` for adapters beside a tower of images, which are not as many as the rows of the text."""
    parts = {name: one for name, one in model.named_modules() if name and isinstance(one, PreTrainedModel)}
    towers = [name for name, one in parts.items() if one.main_input_name == "pixel_values"]
    for tower in towers:
        around = tower.rpartition(".")[0]
        others = [name for name in parts if name not in towers and not f"{tower}.".startswith(f"{name}.")]
        for name in adapted:
            inside = name.startswith(f"{around}." if around else "")
            head = not around and "." not in name
            if inside and not head and not any(name.startswith(f"{other}.") for other in others):
                raise ValueError(f"adapter_names: {name} has adapters, and its rows are images, not rows of the text")
