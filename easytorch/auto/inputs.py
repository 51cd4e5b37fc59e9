"""Small inputs for a model of any architecture: candidates by its forward's parameters, tried until one runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from easytorch.auto.failures import FAILURES, first_line
from easytorch.auto.named_inputs import BATCH, LAYOUTS, Maker

Inputs = dict[str, Any]

MOST_NUMBERS = 400_000
_CORRECTIONS = 3


def working_inputs(model: PreTrainedModel, seed: int = 0) -> tuple[Inputs | None, str]:
    """(what `model` runs with or None, what the likeliest candidate failed with)."""
    failure = ""
    for candidate in candidate_inputs(model, seed):
        inputs: Inputs | None = candidate
        for _ in range(_CORRECTIONS):
            if inputs is None or sum(tensor.numel() for tensor in inputs.values()) > MOST_NUMBERS:
                break
            try:
                with torch.no_grad():
                    model(**inputs)
                return inputs, ""
            except FAILURES as error:
                failure = failure or first_line(error)
                inputs = _resized(inputs, str(error), seed) or _with_places(model.config, inputs, str(error), seed)
    return None, failure


# (torch's message for a size that does not fit a weight, the dimension); its groups are the given and the wanted size.
_WRONG_SIZES = (
    (r"mat1 and mat2 shapes cannot be multiplied \(\d+x(?P<given>\d+) and (?P<wanted>\d+)x\d+\)", -1),
    (r"normalized_shape=\[(?P<wanted>\d+)\].*got input of size\[.*\b(?P<given>\d+)\]", -1),
    (r"expected input\[.*\] to have (?P<wanted>\d+) channels, but got (?P<given>\d+) channels", 1),
)


def _resized(inputs: Inputs, message: str, seed: int) -> Inputs | None:
    """`inputs` resized as the error asks; None where it names no size, or no input has the wrong one."""
    for pattern, dim in _WRONG_SIZES:
        found = re.search(pattern, message)
        wrong = {} if found is None else {
            name: tensor
            for name, tensor in inputs.items()
            if tensor.is_floating_point() and tensor.ndim > 1 and tensor.shape[dim] == int(found["given"])
        }  # fmt: skip
        if found is not None and wrong:
            generator = torch.Generator().manual_seed(seed)
            shapes = {name: list(tensor.shape) for name, tensor in wrong.items()}
            for shape in shapes.values():
                shape[dim] = int(found["wanted"])
            return inputs | {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return None


_WRONG_PLACES = re.compile(r"(?P<kind>\w+) features and \w+ tokens do not match,.*features:? \D*(?P<wanted>\d+)")


def _with_places(config: PreTrainedConfig, inputs: Inputs, message: str, seed: int) -> Inputs | None:
    """`inputs` with as many image (or audio) placeholder tokens as the error says there are features."""
    found = _WRONG_PLACES.search(message)
    if found is None or "input_ids" not in inputs:
        return None
    maker, kind = Maker(config, torch.Generator().manual_seed(seed)), found["kind"].lower()
    place = maker.first(f"{kind}_token_id", None) or maker.first(f"{kind}_token_index", None)
    places = torch.full((BATCH, int(found["wanted"]) // BATCH), place or 0)
    return inputs | {"input_ids": torch.cat((maker.tokens(1), places, maker.tokens()), 1)} if place else None


# Tried first: (required parameters, optional ones that are added if the forward has them).
_GROUPS = (
    (("input_ids",), ("bbox", "decoder_input_ids")),
    (("pixel_values",), ("decoder_input_ids",)),
    (("pixel_values", "input_ids"), ("decoder_input_ids",)),
    (("pixel_values_videos",), ()),
    (("input_features",), ("decoder_input_ids",)),
    (("input_values",), ("decoder_input_ids",)),
    (("inputs_embeds",), ()),
    (("hidden_states",), ()),
)


def candidate_inputs(model: PreTrainedModel, seed: int = 0) -> Iterator[Inputs]:
    """Possible inputs for `model`, the likeliest first; the caller tries them."""
    parameters = inspect.signature(model.forward).parameters
    names = [name for name in parameters if name not in ("args", "kwargs")]
    main = [model.main_input_name] if isinstance(model.main_input_name, str) else model.main_input_name
    required = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    groups = [*_GROUPS, ((*required, *main), ()), (tuple(required), tuple(names))]
    tried = set()
    for needed, welcome in groups:
        if not set(needed) <= set(names) or not {*needed, *welcome}:
            continue
        for layout in range(LAYOUTS):
            maker = Maker(model.config, torch.Generator().manual_seed(seed), layout)
            wanted = [name for name in names if name in needed or name in welcome]
            inputs = {name: value for name in wanted if (value := maker.make(name, names)) is not None}
            shapes = tuple((name, tensor.shape) for name, tensor in inputs.items())
            if inputs and inputs.keys() >= set(needed) and shapes not in tried:
                tried.add(shapes)
                yield inputs
