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


def _has(cpuinfo: str, *flags: str) -> bool:
    """Whether the processor has all of these instructions."""
    lines = (line for line in cpuinfo.splitlines() if line.startswith("flags"))
    return set(flags) <= set(next(lines, "").split())


# read at import, once: a traced function could not read the file
_CPUINFO = _cpuinfo()
VENDOR = _vendor(_CPUINFO)
# The C++ operators were measured on CPUs with these, and are chosen on no others: of levels.h the second and the third.
AVX2 = _has(_CPUINFO, "avx2", "fma", "f16c")
AVX512 = AVX2 and _has(_CPUINFO, "avx512f", "avx512bw", "avx512dq", "avx512vl")
BFLOAT16_PRODUCTS = _has(_CPUINFO, "avx512_bf16") or _has(_CPUINFO, "amx_bf16")
FLOAT16_PRODUCTS = _has(_CPUINFO, "avx512_fp16") or _has(_CPUINFO, "amx_fp16")
BYTE_DOT_PRODUCTS = AVX512 and _has(_CPUINFO, "avx512_vnni")
