"""Some operators of the library in C++ against float64, on the machine that runs this: scripts/check_neon.sh --root.

For machines where the suites cannot run, as under an emulator: nothing but torch is needed. The exit code is 1 where a
relative RMS error is above that of the dtype.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from easytorch.kernels.attention import cpu as attention
from easytorch.kernels.cpu import library
from easytorch.kernels.decode import cpu as decode
from easytorch.kernels.quantized_matmul import cpu as quantized
from easytorch.kernels.quantized_matmul.weight import quantize

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
failed = []


def compare(name: str, output: Tensor, expected: Tensor) -> None:
    """Prints the relative RMS error."""
    error = float((output.double() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
    ok = error <= TOLERANCE[output.dtype]
    print(f"{name:<14} {str(output.dtype)[6:]:<9} {error:.1e}{'' if ok else ' FAILED'}", flush=True)
    if not ok:
        failed.append(name)


def main() -> None:
    print(platform.machine(), "torch", torch.__version__, library.missing() or "library loaded")
    if library.missing() is not None:
        sys.exit(1)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    operators = torch.ops.easytorch_cpu
    for dtype in TOLERANCE:
        x, weight, gain = draw(3, 200, dtype=dtype), draw(70, 200, dtype=dtype), draw(200, dtype=dtype)
        none = torch.empty(0, dtype=dtype)
        compare("linear", operators.linear(x, weight, none, library.BEST), x.double() @ weight.double().t())
        normed = F.rms_norm(x.double(), gain.shape, gain.double(), 1e-6)
        compare("rms_norm", operators.rms_norm(x, gain, 1e-6, library.BEST), normed)
        for format in quantized.FORMATS:
            codes = quantize(torch.randn(48, 256, generator=generator), format)
            x = draw(7, 256, dtype=dtype)
            expected = x.double() @ codes.dequantize(torch.float64).t()
            compare(format, quantized.run(x, codes, None, library.BEST), expected)
        query, key, value = (draw(1, rows, heads, 64, dtype=dtype) for rows, heads in ((60, 4), (130, 2), (130, 2)))
        turned = [one.double().transpose(1, 2) for one in (query, key, value)]
        found = F.scaled_dot_product_attention(*turned, enable_gqa=True).transpose(1, 2)
        compare("attention", attention.attention(query, key, value), found)
        compare("decode", decode.decode(query[:, -1:], key, value), found[:, -1:])
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
