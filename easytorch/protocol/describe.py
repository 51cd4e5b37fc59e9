"""Forward's static arguments, the auto class and the sharding of a model."""

from __future__ import annotations

import inspect
import re
from typing import Any

import transformers
from transformers import PreTrainedModel

from easytorch.argument_types import check_types

# The auto classes that any model of a kind is in, beside that of its own head.
_GENERAL = ("AutoModelForPreTraining", "AutoModelForMultimodalLM", "AutoModelForTextEncoding")


@check_types()
def get_static_arguments(model: PreTrainedModel | type[PreTrainedModel]) -> tuple[str, ...]:
    """The names of forward's arguments that are no tensors: those whose values `torch.compile` guards on.

    They are its switches and counts (`use_cache`, `output_attentions`, `logits_to_keep`, ...), what jax calls
    `static_argnames`.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    annotations = {one.name: str(one.annotation) for one in parameters if one.kind is not one.VAR_KEYWORD}
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        # What every model takes beside its own arguments.
        common = inspect.get_annotations(transformers.utils.TransformersKwargs)
        annotations |= {name: str(one) for name, one in common.items() if name not in annotations}
    return tuple(name for name, annotation in annotations.items() if _is_static(annotation))


def _is_static(annotation: str) -> bool:
    words = set(re.findall(r"\w+", annotation))
    return bool(words & {"bool", "int"}) and "dict" not in words


@check_types()
def get_torch_loader(model_class: type[PreTrainedModel] | PreTrainedModel) -> Any:
    """transformers' auto class that loads models of this class, such as `AutoModelForCausalLM`.

    `ValueError` where no auto class makes it.
    """
    name = model_class.__name__ if isinstance(model_class, type) else type(model_class).__name__
    found = []
    for auto in dir(transformers):
        mapping = getattr(getattr(transformers, auto), "_model_mapping", None) if auto.startswith("AutoModel") else None
        classes = getattr(mapping, "_model_mapping", {}).values()
        if any(name == one or (isinstance(one, list | tuple) and name in one) for one in classes):
            found.append(auto)
    if not found:
        raise ValueError(f"no auto class of transformers makes {name}; load it by {name}.from_pretrained")
    own = [auto for auto in found if auto not in _GENERAL] or found
    # AutoModel stands for base models alone: a head's own auto class says more.
    best = next((auto for auto in own if auto != "AutoModel"), own[0])
    return getattr(transformers, best)
