"""A function of transformers that calls others of ours: the same code, which sees them under a global's name, or under
an attribute's of the object that it is a method of."""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


def global_of(function: Any, name: str) -> Any:
    """What `function`, below its decorators, calls by the global `name`; None where it calls none.

    None, too, below a decorator that does not keep what it calls in a cell: `with_global` cannot make it anew.
    """
    if not remakable(function):
        return None
    function = inspect.unwrap(function)
    called = isinstance(function, types.FunctionType) and name in function.__code__.co_names
    return function.__globals__.get(name) if called else None


def remakable(function: Any) -> bool:
    """Whether each decorator of `function` keeps what it calls in a cell: it can be made anew around another."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if not any(_holds(cell, inner) for cell in getattr(function, "__closure__", None) or ()):
            return False
        function = inner
    return isinstance(function, types.FunctionType)


def _holds(cell: types.CellType, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # it is empty: its variable is not set yet
        return False


def with_global(function: Any, name: str, value: Any) -> Any:
    """`function`, which sees `value` under the global `name`; the others are those of its module."""
    return _innermost(function, lambda inner: _like(inner, {**inner.__globals__, name: value}, inner.__closure__))


def called_of_self(function: Any) -> frozenset[str]:
    """The attributes of its first argument that the code of a method, below its decorators, calls, and does nothing
    else with: none of that name is read, set, or one of another object; none at all where that variable is set."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not code.co_argcount:
        return frozenset()
    first = code.co_varnames[0]
    called: set[str] = set()
    otherwise: set[str] = set()
    before = None
    for one in dis.get_instructions(code):
        if _sets(one, first):
            return frozenset()
        if one.opcode in dis.hasname:  # not a variable of that name
            # a target of jumps, as in `(other if given else self).name()`, is of several objects
            of_self = _loads_method(one) and not one.is_jump_target and before is not None and _loads(before, first)
            (called if of_self else otherwise).add(one.argval)
        before = one
    return frozenset(called - otherwise)


def _loads_method(instruction: dis.Instruction) -> bool:
    # from Python 3.12 on a bit says so
    by_bit = sys.version_info >= (3, 12) and instruction.opname == "LOAD_ATTR" and (instruction.arg or 0) & 1
    return instruction.opname == "LOAD_METHOD" or bool(by_bit)


def _loads(instruction: dis.Instruction, variable: str) -> bool:
    """Whether it loads this variable last."""
    # a cell, where a comprehension or a function within reads it too; from Python 3.13 on one instruction has two
    name = instruction.opname
    return ("LOAD_FAST" in name or name.startswith("LOAD_DEREF")) and _variables(instruction)[-1] == variable


def _sets(instruction: dis.Instruction, variable: str) -> bool:
    """Whether it sets or deletes this variable."""
    found = _variables(instruction)[:1] if "_LOAD_" in instruction.opname else _variables(instruction)
    return instruction.opname.startswith(_SETTING) and variable in found


_SETTING = ("STORE_FAST", "STORE_DEREF", "DELETE_FAST", "DELETE_DEREF", "LOAD_FAST_AND_CLEAR")


def _variables(instruction: dis.Instruction) -> tuple[Any, ...]:
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


def with_attributes(function: Any, names: Mapping[str, str]) -> Any:
    """`function`, which reads other attributes in place of those that `called_of_self` gives."""

    def renamed(inner: Any) -> Any:
        code = inner.__code__
        code = code.replace(co_names=tuple(names.get(name, name) for name in code.co_names))
        return _like(inner, inner.__globals__, inner.__closure__, code)

    return _innermost(function, renamed)


def _innermost(function: Any, change: Callable[[Any], Any]) -> Any:
    """`function` with what is below its decorators changed; each of them made anew."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return change(function)
    replaced = _innermost(inner, change)
    cells = tuple(types.CellType(replaced) if _holds(cell, inner) else cell for cell in function.__closure__)
    outer = _like(function, function.__globals__, cells)
    outer.__wrapped__ = replaced
    return outer


def _like(function: Any, seen: dict[str, Any], cells: Any, code: types.CodeType | None = None) -> Any:
    made = types.FunctionType(code or function.__code__, seen, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
    vars(made).update(vars(function))
    return made
