"""The requests of scripts/bench_generation.py's cases: the same in each process."""

from __future__ import annotations

import random
from typing import NamedTuple


class Work(NamedTuple):
    """A prompt's tokens, and how many new ones follow."""

    prompt: list[int]
    new: int


# Tokens of the prefix that all share, of each prompt behind it, and how many are generated.
PREFIX, OWN, AFTER_PREFIX = 1024, 16, 16
# Tokens that are decoded after a long context.
AFTER_CONTEXT = 16


def mixed(count: int, *, small: bool) -> list[Work]:
    """Prompts of 32 to 512 tokens, with 64 to 256 new ones each."""
    draw = random.Random(0)
    shorter = 16 if small else 1
    return [
        Work(tokens(draw.randint(32, 512) // shorter, draw), draw.randint(64, 256) // shorter) for _ in range(count)
    ]


def prefixed(count: int, *, small: bool) -> list[Work]:
    """Prompts whose first tokens are the same."""
    draw = random.Random(1)
    shared = tokens(PREFIX // 16 if small else PREFIX, draw)
    return [Work(shared + tokens(OWN, draw), AFTER_PREFIX // 4 if small else AFTER_PREFIX) for _ in range(count)]


def tokens(length: int, draw: random.Random) -> list[int]:
    """Ids that every model has, none of which ends a text."""
    return [draw.randrange(2, 63) for _ in range(length)]


WORK = {"batch": mixed, "server": mixed, "prefix": prefixed}
