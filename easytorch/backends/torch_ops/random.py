"""Philox 4x32-10 (Salmon et al. 2011) in int64: the same bits as every other backend (see numpy_ops/random.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from easytorch.backends.torch_ops.carriers import carrier
from easytorch.backends.torch_ops.site import Binder, Kernel, Site
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
    """x < y of carried uint64."""
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


def _rng_bit_generator(site: Site) -> Kernel:
    shape = site.attributes["shape"]
    bits, to = shape.dtype.bits, carrier(shape.dtype)
    blocks = -(-shape.size * max(bits // 32, 1) // 4)
    count = torch.arange(blocks, dtype=torch.int64, device=site.device)
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


RANDOM: dict[OpType, Binder] = {OpType.RNG_BIT_GENERATOR: _rng_bit_generator}
