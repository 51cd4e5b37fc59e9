"""The arguments of an operation, read off the signature of its definition."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

_TENSOR = re.compile(r"(torch\.)?Tensor|Optional|<class 'torch.Tensor'>")  # multi_latent.py's Optional is one or None


def signature_of(definition: Callable[..., Any]) -> tuple[tuple[tuple[int, str, bool], ...], tuple[str, ...] | None]:
    """From a method's signature: position and name of each tensor, and whether it may be None; the names of all
    positional arguments, None where it takes any number of them.
    """
    parameters = list(inspect.signature(definition).parameters.values())[1:]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return (), None
    places = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    tensors = tuple(
        (place, p.name, p.default is None)
        for place, p in enumerate(places)
        if _TENSOR.fullmatch(str(p.annotation).removesuffix(" | None"))
    )
    return tensors, tuple(p.name for p in places)


def keywords_of(definition: Callable[..., Any]) -> tuple[str, ...] | None:
    """From a method's signature: every name that may be given; None where it takes any."""
    names: list[str] = []
    for parameter in list(inspect.signature(definition).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            options = _options_of(definition, parameter)
            if options is None:
                return None
            names += options
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            names.append(parameter.name)
    return tuple(names)


def _options_of(definition: Callable[..., Any], parameter: inspect.Parameter) -> dict[str, Any] | None:
    """Name -> annotation of `**options: Unpack[Options]`; None of other ones."""
    unpacked = re.fullmatch(r"Unpack\[(\w+)\]", str(parameter.annotation))
    options = getattr(definition, "__globals__", {}).get(unpacked[1]) if unpacked else None
    return getattr(options, "__annotations__", None)


def flags_of(definition: Callable[..., Any]) -> tuple[tuple[int, str], ...]:
    """From a method's signature: position and name of each `bool`, those of `**options: Unpack[Options]` included."""
    found: list[tuple[int, str]] = []
    for place, parameter in enumerate(list(inspect.signature(definition).parameters.values())[1:]):
        if parameter.kind is parameter.VAR_KEYWORD:
            kinds = _options_of(definition, parameter) or {}
            found += [(sys.maxsize, n) for n, kind in kinds.items() if getattr(kind, "__forward_arg__", "") == "bool"]
        elif str(parameter.annotation) == "bool":
            keyword = parameter.kind is parameter.KEYWORD_ONLY
            found.append((sys.maxsize if keyword else place, parameter.name))
    return tuple(found)
