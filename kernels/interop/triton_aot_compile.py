"""Triton kernels compiled ahead of time for GPUs that need not be present, and the resources they use.

    python -m easytorch.kernels.interop.triton_aot_compile easytorch.kernels.glu.triton_calls bfloat16 sm_90 gfx942

prints one line of JSON for each call that the module's `typical_calls(dtype)` describes, on each architecture. Where
block sizes depend on it, the function takes the architecture too: `typical_calls(dtype, architecture)`.
A process that has loaded Triton under TRITON_INTERPRET=1 cannot compile.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from easytorch.kernels.interop.triton_call import Call
from easytorch.kernels.interop.triton_devices import SHARED_MEMORY

ARCHITECTURES = tuple(SHARED_MEMORY)

_POINTERS = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32",
    torch.uint8: "*u8",
}  # fmt: skip


class Usage(NamedTuple):
    """The resources of one compiled kernel.

    registers (AMD: vector and accumulation registers) and bytes of stack a thread; bytes of shared memory a block;
    columns of the tensor memory of Blackwell, of which a multiprocessor has 512.
    """

    registers: int
    stack: int
    shared: int
    tensor_memory: int


def compile_call(call: Call, architecture: str) -> Usage:
    """Compile the kernel of `call`, whose tensors may be on the meta device, for one of `ARCHITECTURES`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if architecture not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {architecture!r}; known: {', '.join(ARCHITECTURES)}")
    hip = architecture.startswith("gfx")
    target = GPUTarget("hip", architecture, 64) if hip else GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    source = ASTSource(call.kernel, *_specialize(call.kernel, call.arguments))
    compiled = triton.compile(source, target=target, options=call.options)
    registers, stack = _amd_usage(compiled.asm["amdgcn"]) if hip else _nvidia_usage(compiled.asm["cubin"])
    tensor_memory = getattr(compiled.metadata, "tmem_size", None) or 0
    return Usage(registers, stack, compiled.metadata.shared, tensor_memory)


def _specialize(kernel: Any, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """signature, constants and attributes of `arguments`, specialized as Triton's launcher does (alignment too)."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def describe(path: tuple[int, ...], value: Any, constant: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(describe((*path, i), item, constant) for i, item in enumerate(value))
        if constant or value is None or (isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor) or value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            return _POINTERS[value.dtype]
        if isinstance(value, float):
            attributes.pop(path, None)
            return "fp32"
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    for index, parameter in enumerate(kernel.params):
        signature[parameter.name] = describe((index,), arguments[parameter.name], parameter.is_constexpr)
    return signature, constants, attributes


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread, read by the cuobjdump that Triton ships."""
    import triton

    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        report = subprocess.run(
            [program, "--dump-resource-usage", file], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found, f"cuobjdump printed no resource usage: {report}"
    return int(found[1]), int(found[2])


def _amd_usage(assembly: str) -> tuple[int, int]:
    """(VGPRs, bytes of private memory) of a thread, from the kernel's metadata in the assembly."""
    vgprs, stack = (re.search(rf"\.{name}:\s+(\d+)", assembly) for name in ("vgpr_count", "private_segment_fixed_size"))
    assert vgprs and stack, "the assembly has no kernel metadata"
    return int(vgprs[1]), int(stack[1])


def compile_module(module: str, dtype: str, architecture: str) -> list[dict[str, Any]]:
    """`Usage` of each of the typical calls of a module, as a row: its kernel's name, the architecture, the numbers."""
    typical_calls = importlib.import_module(module).typical_calls
    by_architecture = "architecture" in inspect.signature(typical_calls).parameters
    calls = typical_calls(getattr(torch, dtype), *([architecture] if by_architecture else []))
    return [
        {"kernel": name, "architecture": architecture, **compile_call(call, architecture)._asdict()}
        for name, call in calls
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="a module of kernels with `typical_calls(dtype)` or `(dtype, architecture)`")
    parser.add_argument("dtype", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("architectures", nargs="+", choices=ARCHITECTURES)
    given = parser.parse_args()
    for architecture in given.architectures:
        for row in compile_module(given.module, given.dtype, architecture):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
