"""`check_types`: arguments of a function that are of no type in its signature are a `TypeError` that says which."""

from __future__ import annotations

import functools
import inspect
import numbers
import os
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

import numpy as np
import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LONGEST = 60
_ALSO: dict[Any, Any] = {list: list | tuple, dict: Mapping}


def check_types(*but: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A decorator: `TypeError` before the function runs where an argument is of none of its annotation's types.

    bool is no int, an int is a float, NumPy's numbers are Python's, 0 and 1 are a bool, a tuple is a list, any mapping
    is a dict, a path is what `os.fspath` takes, and any module is a model: wrappers (`torch.compile`, PEFT's, DDP's)
    are left to the function. What says nothing (`Any`) or is inside a container is left to the function, and so are the
    arguments `but`, of which it has more to say.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        signature = inspect.signature(function)
        if unknown := set(but) - set(signature.parameters):
            raise ValueError(f"{function.__name__} has no arguments {sorted(unknown)}")

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if not torch.compiler.is_compiling():
                _check(function, signature, but, args, kwargs)
            return function(*args, **kwargs)

        vars(call)["left_to_the_function"] = but
        return call

    return decorate


def _check(
    function: Callable[..., Any], signature: inspect.Signature, but: tuple[str, ...], args: Any, kwargs: Any
) -> None:
    hints = _hints(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as error:  # for names and counts
        raise TypeError(f"{function.__name__}() {error}") from None
    for name, value in given.items():
        if name in hints and name not in but and not _fits(value, hints[name]):
            raise TypeError(f"{function.__name__}: {name}={_shown(value)} must be {_words(hints[name])}")


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations that can be read at run time, of parameters alone; not of `*args` and `**kwargs`."""
    hints = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        reader = types.SimpleNamespace(__annotations__={"hint": parameter.annotation})
        try:
            hints[parameter.name] = typing.get_type_hints(reader, inspect.unwrap(function).__globals__)["hint"]
        except NameError:  # a name for type checkers alone
            continue
    return hints


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in get_args(hint))
    if origin is typing.Literal:
        return type(value) in {type(one) for one in get_args(hint)}  # which of them it may be, the function says
    if hint is None or hint is type(None):
        return value is None
    if origin is type:
        return isinstance(value, type | types.GenericAlias | types.UnionType)
    kind = origin or hint
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    if kind in (int, float):
        return isinstance(value, numbers.Real if kind is float else numbers.Integral) and not isinstance(value, bool)
    if kind is bool:
        return isinstance(value, bool | np.bool_) or (isinstance(value, numbers.Integral) and value in (0, 1))
    if isinstance(kind, type) and issubclass(kind, os.PathLike):
        return isinstance(value, os.PathLike)
    return isinstance(value, torch.nn.Module if _is_model(kind) else _ALSO.get(kind, kind))


def _is_model(kind: type) -> bool:
    return issubclass(kind, torch.nn.Module)


def _words(hint: Any) -> str:
    if get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_words(one) for one in get_args(hint))
    if get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, get_args(hint)))
    if hint is None or hint is type(None):
        return "None"
    if get_origin(hint) is type:
        return "a class"
    kind = get_origin(hint) or hint
    if kind is Path or kind is os.PathLike:
        return "a path"
    if isinstance(kind, type) and _is_model(kind):
        return "a model"
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return name if kind.__module__ == "builtins" else f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # of the user's class
        return f"<{type(value).__name__}>"
    simple = isinstance(value, str | bytes | int | float | list | dict | tuple | None | torch.dtype)
    return text if simple and len(text) <= _LONGEST else f"<{type(value).__name__}>"
