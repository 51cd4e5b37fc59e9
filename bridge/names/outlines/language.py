"""The two small languages of outlines: numbers by the keys of a config, and conditions on them.

A number is a sum of products and quotients, read from the left: `3*hidden_size`, `max_position_embeddings+2`,
`hidden_size/num_attention_heads`, of which nothing may be left over. A condition is `key=value`, `key!=value` or
`key>value`; the value is another key, or as JSON writes it, or a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

Settings = Mapping[str, Any]


def value_of(expression: str, settings: Settings) -> int | None:
    """The number; None where a key is none, or a quotient leaves a rest."""
    total = 0
    for term in _terms(expression):
        product = 1
        for sign, factor in term:
            value = factor if isinstance(factor, int) else settings[factor]
            if type(value) is not int or (sign == "/" and (value == 0 or product % value)):
                return None
            product = product // value if sign == "/" else product * value
        total += product
    return total


@lru_cache(maxsize=4096)
def _terms(expression: str) -> tuple[tuple[tuple[str, int | str], ...], ...]:
    """The factors of every term, each with the sign before it."""
    return tuple(
        tuple(
            (sign, int(factor) if factor.isdecimal() else factor)
            for sign, factor in re.findall(r"([*/]?)([^*/]+)", term)
        )
        for term in expression.split("+")
    )


def holds(condition: str, settings: Settings) -> bool:
    """Whether `condition` is true of `settings`."""
    key, sign, value = _parsed(condition)
    one = settings[key]
    other = settings[value] if isinstance(value, str) and value in settings else value
    if sign == ">":
        return bool(one > other)
    return ((type(one), one) == (type(other), other)) == (sign == "=")


@lru_cache(maxsize=4096)
def _parsed(condition: str) -> tuple[str, str, Any]:
    found = re.fullmatch(r"([\w.]+)(!=|=|>)(.*)", condition)
    assert found is not None, condition
    key, sign, value = found.groups()
    try:
        return key, sign, json.loads(value)
    except ValueError:
        return key, sign, value
