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


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_BYTES = (*_AVX512, "avx512_vnni")
# What oneDNN asks for before it multiplies a dtype by instructions of its own (mayiuse() of its cpu_isa_traits.hpp):
# AMX alone, as a virtual machine may show it, is not used.
_BFLOAT16 = (*_BYTES, "avx512_bf16")
_FLOAT16 = (*_BFLOAT16, "avx512_fp16", "avx_vnni")
_AMX = (*_FLOAT16, "amx_tile", "amx_int8", "amx_bf16")

# read at import, once: a traced function could not read the file
_CPUINFO = _cpuinfo()
VENDOR = _vendor(_CPUINFO)
# The C++ operators were measured on CPUs with these, and are chosen on no others: of levels.h the second and the third.
AVX2 = _has(_CPUINFO, *_AVX2)
AVX512 = _has(_CPUINFO, *_AVX512)
BYTE_DOT_PRODUCTS = _has(_CPUINFO, *_BYTES)
BFLOAT16_PRODUCTS = _has(_CPUINFO, *_BFLOAT16)
FLOAT16_PRODUCTS = _has(_CPUINFO, *_FLOAT16)
# Tiles of bfloat16: oneDNN and, through it, ATen's fused attention use them, the C++ operators do not.
AMX_PRODUCTS = _has(_CPUINFO, *_AMX)
