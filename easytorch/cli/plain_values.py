"""Arguments that arrive as what they are declared to be: a string for a `str`, a default, an option not given.

typer has pydantic check these too, whose import takes longer than reading a checkpoint's header.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, get_args, get_origin, get_type_hints

_PLAIN = frozenset((str, bool, int, float))


class PlainValues:
    """Before a class of typer's, whose parameters then take such values unchecked."""

    callback: Any

    def get_params(self, ctx: Any) -> Any:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        hints = get_type_hints(self.callback, include_extras=True)
        for parameter in parameters:
            if "process_value" not in vars(parameter):
                types = _plain_types(hints.get(parameter.name))
                parameter.process_value = partial(_processed, parameter, types, parameter.process_value)
        return parameters


def _plain_types(hint: Any) -> frozenset[Any]:
    """The types in a parameter's annotation whose values need no check; none where it has a parser of its own."""
    declared, *settings = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if any(getattr(one, key, None) is not None for one in settings for key in ("parser", "click_type")):
        return frozenset()
    return frozenset(get_args(declared) or (declared,)) & _PLAIN


def _processed(
    parameter: Any, types: frozenset[Any], check: Callable[[Any, Any], Any], context: Any, value: Any
) -> Any:
    """`parameter.process_value(context, value)`; `check` is the one it had."""
    if value is None and not parameter.required:
        value = () if parameter.multiple or parameter.nargs == -1 else None
    elif type(value) not in types:
        return check(context, value)
    return value if parameter.callback is None else parameter.callback(context, parameter, value)
