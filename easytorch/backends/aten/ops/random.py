"""Philox 4x32-10 (Salmon et al. 2011) in int64: the same bits as every other backend (see reference/ops/random.py)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from easytorch.backends.aten.node_context import Binder, Kernel, NodeContext
from easytorch.backends.aten.storage_dtypes import storage_dtype
from easytorch.backends.reference.ops.random import KEY_SCHEDULE, PARITY, ROTATIONS
from easytorch.backends.shapeinference.random import halves
from easytorch.backends.types import OpType

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
# The golden ratio and the square root of 3, less one: what each round adds to the key.
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_TOP = -(2**63)


def _upper(x: Tensor) -> Tensor:
    return (x >> 32) & _LOW


def _below(x: Tensor, y: Tensor) -> Tensor:
    """x < y of uint64 stored as int64."""
    return x.bitwise_xor(_TOP) < y.bitwise_xor(_TOP)


def _philox(key: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """(), (n,) and (n,), the halves of the counters -> (n, 4) words of 32 bits."""
    words = [low & _LOW, _upper(low), high & _LOW, _upper(high)]
    keys = [key & _LOW, _upper(key)]
    for _ in range(_ROUNDS):
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            _upper(second) ^ words[1] ^ keys[0],
            second & _LOW,
            _upper(first) ^ words[3] ^ keys[1],
            first & _LOW,
        ]
        keys = [(one + step) & _LOW for one, step in zip(keys, _WEYL, strict=True)]
    return torch.stack(words, -1)


def _rng_bit_generator(context: NodeContext) -> Kernel:
    shape = context.attributes["shape"]
    bits, to = shape.dtype.bits, storage_dtype(shape.dtype)
    blocks = -(-shape.size * max(bits // 32, 1) // 4)
    count = torch.arange(blocks, dtype=torch.int64, device=context.device)
    integer = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]

    def generate(state: Tensor) -> tuple[Tensor, Tensor]:
        key, low, high = state.unbind()
        lows = low + count
        words = _philox(key, lows, high + _below(lows, low)).reshape(-1)
        if bits == 64:
            words = words[::2] | (words[1::2] << 32)
        values = words[: shape.size].to(integer).view(to).reshape(shape.dimensions)
        last = low + blocks
        return torch.stack((key, last, high + _below(last, low))), values

    return generate


def _rng_bit_generator_three_fry(context: NodeContext) -> Kernel:
    shape = context.attributes["shape"]
    bits, to = shape.dtype.bits, storage_dtype(shape.dtype)
    half, axis = halves(shape)
    steps = shape.size if bits == 64 else math.prod(half)
    count = torch.arange(steps, dtype=torch.int64, device=context.device)
    integer = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
    kept = shape.dimensions[axis] if shape.rank else 1

    def generate(state: Tensor) -> tuple[Tensor, Tensor]:
        key, start = state.unbind()
        first, second = _three_fry(key, start + count)
        if bits == 64:
            words = first | (second << 32)
        else:
            joined = torch.stack([first.reshape(half), second.reshape(half)], axis + 1).flatten(axis, axis + 1)
            words = joined.narrow(axis, 0, kept)
        values = words.to(integer).contiguous().view(to).reshape(shape.dimensions)
        return torch.stack((key, start + steps)), values

    return generate


def _three_fry(key: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
    low, high = key & _LOW, _upper(key)
    keys = (low, high, low ^ high ^ PARITY)
    x, y = ((counter & _LOW) + low) & _LOW, (_upper(counter) + high) & _LOW
    for group, (first, second) in enumerate(KEY_SCHEDULE):
        for by in ROTATIONS[group % 2]:
            x = (x + y) & _LOW
            y = (((y << by) | (y >> (32 - by))) & _LOW) ^ x
        x, y = (x + keys[first]) & _LOW, (y + keys[second] + group + 1) & _LOW
    return x, y


RANDOM: dict[OpType, Binder] = {
    OpType.RNG_BIT_GENERATOR: _rng_bit_generator,
    OpType.RNG_BIT_GENERATOR_THREE_FRY: _rng_bit_generator_three_fry,
}
