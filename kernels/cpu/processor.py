"""This machine's CPU: its vendor, and the instructions that decide which kernels are faster."""

from __future__ import annotations

import platform
from pathlib import Path


def _cpuinfo() -> str:
    """The first processor's entry of /proc/cpuinfo."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        with cpuinfo.open() as file:
            return file.read(8192)  # the file has an entry for every processor
    return platform.processor()


def _vendor(cpuinfo: str) -> str:
    """The CPU's vendor id as cpuid gives it ("AuthenticAMD", "GenuineIntel"), or "" where it is unknown."""
    return next((name for name in ("AuthenticAMD", "GenuineIntel") if name in cpuinfo), "")


# read at import: a traced function could not read the file
VENDOR = _vendor(_cpuinfo())
BFLOAT16_DOT_PRODUCTS = "avx512_bf16" in _cpuinfo()
