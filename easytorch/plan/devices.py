"""Accelerators: memory, peak rate of bfloat16 products, and how many make up a host or node."""

from __future__ import annotations

from dataclasses import dataclass

from easytorch.bridge.errors import nearest

GIB = 2**30
# Of a device's memory, what the runtime, its programs and fragmentation take.
RESERVE = 0.06


@dataclass(frozen=True)
class Device:
    """memory: bytes of HBM; flops: dense bfloat16 operations a second; node: devices of a host or node."""

    name: str
    memory: int
    flops: float
    node: int

    @property
    def usable(self) -> int:
        """Bytes that a program can have."""
        return int(self.memory * (1 - RESERVE))


DEVICES = {
    one.name: one
    for one in (
        # cloud.google.com/tpu/docs/v4, v5e, v5p, v6e: HBM and peak a chip, chips a host
        Device("v4", 32 * GIB, 275e12, 4),
        Device("v5e", 16 * GIB, 197e12, 8),
        Device("v5p", 95 * GIB, 459e12, 4),
        Device("v6e", 32 * GIB, 918e12, 8),
        # NVIDIA's data sheets, dense (without sparsity), memory as nvidia-smi shows it
        Device("a100", 81_920 * 2**20, 312e12, 8),
        Device("h100", 81_559 * 2**20, 989e12, 8),
        Device("h200", 143_771 * 2**20, 989e12, 8),
        Device("b200", 183_359 * 2**20, 2250e12, 8),
    )
}


def device_of(name: str) -> Device:
    """The device of that name in any case; `ValueError` names the known ones."""
    found = DEVICES.get(name.lower())
    if found is None:
        raise ValueError(f"unknown device {name!r}{nearest(name.lower(), DEVICES)}; known: {', '.join(DEVICES)}")
    return found
