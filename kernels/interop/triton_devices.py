"""Which GPUs the Triton kernels run on, what those have, and which tensors they take. Loads no Triton."""

from __future__ import annotations

import os

import torch

from easytorch.kernels.interop.installed import missing

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOO_OLD = "its kernels need compute capability 8.0 (Ampere) or later"

# Shared memory a block may have, in bytes (CUDA C++ Programming Guide, table 30; AMD CDNA3 ISA, 1.1).
SHARED_MEMORY = {"sm_80": 166912, "sm_86": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}


def architecture_of(device: torch.device) -> str | None:
    """The key of `SHARED_MEMORY` for a device ("interpreter" for the CPU); None where the kernels cannot run."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return None
    if (major, minor) in ((8, 0), (8, 7)):
        return "sm_80"
    # 8.6, 8.9 and 12.x have the least shared memory; so may what is not known yet
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_86")


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """None when Triton kernels run on this device with this dtype, else the reason why not.

    The meta device is taken: it stands for a device that is not there (easytorch.operations.dispatch.table asks).
    """
    absent = missing("triton")
    if absent is not None:
        return absent
    if dtype not in DTYPES:
        return f"its dtypes are float32, float16 and bfloat16, got {dtype}"
    if device.type == "meta":
        return None
    if device.type == "cpu":
        if not interpreted():
            return "the tensors are on the CPU, where Triton only runs under TRITON_INTERPRET=1"
        if dtype == torch.bfloat16:
            return "Triton's interpreter truncates to bfloat16 where a device rounds: float32 and float16 only"
        return None
    if device.type != "cuda":
        return f"Triton runs on CUDA and ROCm devices, the tensors are on {device}"
    # while a graph is traced a device cannot be asked: the operator fails with Triton's own message there
    return None if torch.compiler.is_compiling() or architecture_of(device) else TOO_OLD


def interpreted() -> bool:
    """True where Triton kernels run on CPU tensors, by its interpreter."""
    # the words that Triton itself takes for yes
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


def processors(device: torch.device) -> int:
    """How many multiprocessors (AMD: compute units) the device has; 2 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
