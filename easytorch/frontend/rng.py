"""Random numbers of a compiled program: Philox, whose state is a hidden input drawn from torch's generator.

A program that draws numbers has one parameter more than its graph, `STATE`, the last one. Whoever runs it gives a
fresh state at every call (`fresh_state`): `torch.manual_seed` makes runs repeatable, two calls differ, and what saves
and restores torch's generator (`fork_rng`, activation checkpointing) holds for compiled programs too, as it would not
for a state that stays on the device. Within a program the state is threaded from draw to draw.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from easytorch.backends.builder import Builder
from easytorch.backends.dtypes import DType, dtype_of
from easytorch.backends.graph import Op
from easytorch.backends.interface import Backend, Buffer, Executable
from easytorch.backends.shapes import Shape
from easytorch.frontend.errors import LoweringError

# The name of the hidden parameter; a torch graph's own are Python identifiers.
STATE = "random state"
_STATE_SHAPE = Shape(DType.UINT64, (3,))


class RandomState:
    """The state as it goes from draw to draw through the program that `builder` builds."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self.value: Op | None = None

    def current(self) -> Op:
        """uint64[3]: key and counter, as of the next draw.

        `LoweringError` within a closure: a loop's body or a branch cannot hand the advanced state out.
        """
        if self.value is None:
            if self._builder.graph.parent is not None:
                raise LoweringError("random numbers are not drawn inside a branch or a loop; draw them before it")
            self.value = self._builder.parameter(STATE, _STATE_SHAPE)
        return self.value

    def bits(self, dimensions: tuple[int, ...], dtype: Any) -> Op:
        """Random bits of an unsigned integer type; the state advances."""
        self.value, values = self._builder.rng_bit_generator(self.current(), Shape(dtype_of(dtype), dimensions))
        return values


def is_random(executable: Executable) -> bool:
    """Whether the program takes a random state after the inputs of its graph."""
    names, _ = executable.inputs()
    return bool(names) and names[-1] == STATE


def fresh_state(backend: Backend, generator: torch.Generator | None = None) -> Buffer:
    """A state with 64 bits of `generator` (torch's own for the CPU if None), which advances, for its key."""
    key = torch.empty(1, dtype=torch.int64).random_(-(2**63), None, generator=generator).numpy().view(np.uint64)
    return backend.buffer_from_numpy(np.array([key[0], 0, 0], np.uint64))
