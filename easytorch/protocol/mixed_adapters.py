"""`adapter_names=[...]` of a call: an adapter for each row of the batch, as `peft.PeftModel` takes them.

PEFT's layers compute such a batch themselves where they are given the names; its wrapper, which gives them, is not
around a model whose adapters transformers put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from easytorch.layers.packed_tower import PackedPatches
from easytorch.protocol.adapters import require_peft, wrapped_layers

BASE = "__base__"


class _Rows:
    """The names of a batch's rows, and how often `generate` repeats each row: once per beam or returned sequence."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.repeats = list(names), 1

    def hook(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        names = self.names
        # an encoder runs before the rows are repeated
        if self.repeats > 1 and args and len(args[0]) != len(names):
            names = [name for name in names for _ in range(self.repeats)]
        return args, {**kwargs, "adapter_names": names}


@contextmanager
def rows_of_adapters(model: nn.Module, names: Any) -> Iterator[_Rows]:
    """While it is open, row i of every input of PEFT's layers in `model` gets the adapter `names[i]`.

    names: a list of adapters' names, "__base__" for none. `ValueError` where the model has no such adapter, is in
    training mode, or has layers that do not tell rows apart; the layers raise PEFT's for another length, DoRA and
    merged adapters. `TypeError` for another type.
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
    expand = model._expand_inputs_for_generation
    with rows_of_adapters(model, adapter_names) as rows:

        def noted(expand_size: int = 1, *more: Any, **inputs: Any) -> Any:
            rows.repeats = expand_size
            return expand(expand_size, *more, **inputs)

        model._expand_inputs_for_generation = noted
        try:
            return theirs(model, *args, **kwargs)
        finally:
            del model._expand_inputs_for_generation


def _layers(model: Any, wanted: set[str]) -> list[nn.Module]:
    """PEFT's layers of `model`, once they are known to carry `wanted`."""
    peft = require_peft()
    tuners, copies = peft.tuners, peft.utils.other.AuxiliaryTrainingWrapper
    adapted = wrapped_layers(model)
    if not adapted:
        raise ValueError(f"adapter_names: {type(model).__name__} has no adapter; load_adapter gives it one")
    if model.training:
        raise ValueError("adapter_names is for inference, and the model is in training mode: call model.eval()")
    found, known = [], set[str]()
    for name, layer in adapted.items():
        if isinstance(layer, tuners.lora.layer.LoraLayer):
            known |= layer.lora_A.keys() | layer.lora_embedding_A.keys()
            found.append(layer)
        elif not isinstance(layer, tuners.trainable_tokens.layer.TrainableTokensLayer):
            raise ValueError(f"adapter_names is for LoRA, and {name} is a {type(layer).__name__} of another kind")
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
