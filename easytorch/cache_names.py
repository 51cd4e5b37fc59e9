"""What the installed transformers calls a model's cache, the one place that asks.

transformers 5.23 calls the argument, and the field of the output, `past_key_values`, and `cache_params` where a layer
keeps a recurrent state; 5.24 calls both `cache`, and takes the older names with a warning. Our functions say `cache`:
`takes_cache` and `takes_states` give them the installed signature, and `**cache_keyword(cache)` passes one on where
others can see the name: to a module, to transformers' functions, to an output.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

from transformers.masking_utils import create_causal_mask
from transformers.utils.deprecation import deprecate_kwarg

_NEW: Final = "cache"
_OF_ATTENTION, _OF_STATES = "past_key_values", "cache_params"
_RENAMED: Final = _NEW in inspect.signature(create_causal_mask).parameters
_REMOVAL = "5.40.0"  # of the older names, as transformers announces it

CACHE: Final = _NEW if _RENAMED else _OF_ATTENTION
"""The name in models with attention, and in transformers' functions."""
STATES: Final = _NEW if _RENAMED else _OF_STATES
"""The name in models without attention, and in layers with a recurrent state."""
NAMES: Final = (_NEW, _OF_ATTENTION, _OF_STATES)
"""All names of the argument, old and new."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def cache_keyword(cache: Any) -> dict[str, Any]:
    """The cache as a keyword of a model or an attention, of transformers' functions, and of outputs."""
    return {CACHE: cache}


def state_keyword(cache: Any) -> dict[str, Any]:
    """The cache as a keyword of a layer with a recurrent state, of a model without attention, and of its outputs."""
    return {STATES: cache}


def cache_of(outputs: Any) -> Any:
    """The cache in a model's outputs; None where they have none."""
    found = getattr(outputs, CACHE, None)
    return getattr(outputs, STATES, None) if found is None and STATES != CACHE else found


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the keywords of a call, by any of its names; None where there is none."""
    return next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)


def cache_argument(forward: Callable[..., Any]) -> str:
    """The name of the cache argument of a model's forward. Models without attention may have another, and silently
    ignore the usual one."""
    taken = inspect.signature(forward).parameters
    return STATES if STATES in taken and CACHE not in taken else CACHE


def under_installed_name(forward: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a call of a model, or of its `generate`, with `cache` under the name that its forward has."""
    if _RENAMED or _NEW not in kwargs:
        return kwargs
    return {cache_argument(forward) if name == _NEW else name: value for name, value in kwargs.items()}


def takes_cache(function: _Function) -> _Function:
    """A function of the argument `cache`, under the installed name, for models with attention and their parts."""
    return cast(_Function, _under_installed_name(function, _OF_ATTENTION))


def takes_states(function: _Function) -> _Function:
    """The same for models without attention, and for layers with a recurrent state."""
    return cast(_Function, _under_installed_name(function, _OF_STATES))


def _under_installed_name(function: Any, older: str) -> Any:
    if _RENAMED:
        warned = deprecate_kwarg(older, _REMOVAL, new_name=_NEW)(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (warned if older in kwargs else function)(*args, **kwargs)

        return call

    @functools.wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if older in kwargs:
            kwargs[_NEW] = kwargs.pop(older)
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    named = [one.replace(name=older) if one.name == _NEW else one for one in signature.parameters.values()]
    renamed.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return renamed
