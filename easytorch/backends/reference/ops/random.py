"""Philox 4x32-10: random bits from a key and a counter (Salmon et al. 2011), laid out as XLA's RNG_PHILOX."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from easytorch.backends.reference.narrow import wrapped
from easytorch.backends.shapeinference.random import halves
from easytorch.backends.shapes import Shape
from easytorch.backends.types import OpType

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
# The golden ratio and the square root of 3, less one: what each round adds to the key.
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_WORD = 2**64
# ThreeFry 2x32: by how many bits a word is rotated in each round, and which keys are added after every four rounds.
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
KEY_SCHEDULE = ((1, 2), (2, 0), (0, 1), (1, 2), (2, 0))
PARITY = 0x1BD11BDA


def philox(key: int, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """(n,) and (n,) uint64, the halves of the counters -> (n, 4) words of 32 bits, held in uint64."""
    words = [low & _LOW, low >> _HALF, high & _LOW, high >> _HALF]
    keys = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * words[0], _MULTIPLIERS[1] * words[2]
        words = [
            (second >> _HALF) ^ words[1] ^ np.uint64(keys[0]),
            second & _LOW,
            (first >> _HALF) ^ words[3] ^ np.uint64(keys[1]),
            first & _LOW,
        ]
        keys = [(one + step) & 0xFFFFFFFF for one, step in zip(keys, _WEYL, strict=True)]
    return np.stack(words, -1)


def _rng_bit_generator(state: np.ndarray, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Each counter value gives four words. A 64-bit element takes two, the low one first; a narrower one takes the low
    bits of one word."""
    key, low, high = (int(word) for word in state)
    bits = shape.dtype.bits
    blocks = -(-shape.size * max(bits // 32, 1) // 4)
    lows = np.uint64(low) + np.arange(blocks, dtype=np.uint64)
    highs = np.uint64(high) + (lows < np.uint64(low)).astype(np.uint64)
    words = philox(key, lows, highs).reshape(-1)
    if bits == 64:
        words = words[::2] | words[1::2] << _HALF
    words = words[: shape.size]
    # 4-bit elements are bytes here, whose high bits are ignored.
    narrow = words.astype(f"u{shape.dtype.size}")
    values = wrapped(narrow, shape.dtype) if bits == 4 else narrow.view(shape.dtype.numpy)
    counter = (low + blocks + (high << 64)) % _WORD**2
    return np.array([key, counter % _WORD, counter // _WORD], np.uint64), values.reshape(shape.dimensions)


def three_fry(key: int, counter: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) uint64 -> two words of 32 bits for each, held in uint64."""
    low, high = key & 0xFFFFFFFF, key >> 32
    keys = [np.uint64(word) for word in (low, high, low ^ high ^ PARITY)]
    x, y = (counter & _LOW) + keys[0] & _LOW, (counter >> _HALF) + keys[1] & _LOW
    for group in range(len(KEY_SCHEDULE)):
        for by in ROTATIONS[group % 2]:
            x = x + y & _LOW
            y = (y << np.uint64(by) | y >> np.uint64(32 - by)) & _LOW ^ x
        first, second = KEY_SCHEDULE[group]
        x, y = x + keys[first] & _LOW, y + keys[second] + np.uint64(group + 1) & _LOW
    return x, y


def _rng_bit_generator_three_fry(state: np.ndarray, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    key, start = (int(word) for word in state)
    half, axis = halves(shape)
    bits = shape.dtype.bits
    steps = shape.size if bits == 64 else math.prod(half)
    first, second = three_fry(key, np.uint64(start) + np.arange(steps, dtype=np.uint64))
    if bits == 64:
        words = (first | second << _HALF).reshape(shape.dimensions)
    else:
        pairs = np.stack([first.reshape(half), second.reshape(half)], axis + 1)
        joined = pairs.reshape(*half[:axis], 2 * half[axis], *half[axis + 1 :])
        kept = shape.dimensions[axis] if shape.rank else 1
        words = joined[(slice(None),) * axis + (slice(0, kept),)].reshape(shape.dimensions)
    narrow = np.ascontiguousarray(words.astype(f"u{shape.dtype.size}"))
    values = wrapped(narrow, shape.dtype) if bits == 4 else narrow.reshape(-1).view(shape.dtype.numpy)
    return np.array([key, (start + steps) % _WORD], np.uint64), values.reshape(shape.dimensions)


RANDOM: dict[OpType, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    OpType.RNG_BIT_GENERATOR: _rng_bit_generator,
    OpType.RNG_BIT_GENERATOR_THREE_FRY: _rng_bit_generator_three_fry,
}
