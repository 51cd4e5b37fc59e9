"""Matrix products: float32 on an AMD CPU, a mixture's experts, weights in few bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.registry import Calls, Reach, Shape, Tensors, bench, nbytes, ours

AMD: dict[tuple[str, bool], Reach | float] = {("float32", False): 0.50, ("float32", True): 0.50}


@bench(
    "linear", shapes=("M64 N4096 K4096", "M256 N4096 K4096", "M1024 N2048 K2048"),
    tiny=("M1 N4096 K4096", "M4 N64 K64", "M63 N60 K60"), backward=(False, True), reach=AMD,
)  # fmt: skip
def linear(tensors: Tensors, s: Shape) -> Calls:
    x, weight = tensors.randn(s["M"], s["K"]), tensors.randn(s["N"], s["K"], scale=s["K"] ** -0.5)
    flops = 2.0 * s["M"] * s["N"] * s["K"]
    torchs = {"F.linear": lambda: F.linear(x, weight)}
    return Calls(*ours("linear", x, weight), torchs, flops=flops, flops_backward=2 * flops)


@bench(
    "grouped_matmul", shapes=("M2048 E8 N1024 K1024", "M256 E64 N704 K1024"), tiny=("M8 E4 N64 K64",),
    backward=(False, True),
)  # fmt: skip
def grouped_matmul(tensors: Tensors, s: Shape) -> Calls:
    """Groups of uneven sizes, some empty, against a loop over the experts."""
    x, weight = tensors.randn(s["M"], s["K"]), tensors.randn(s["E"], s["K"], s["N"], scale=s["K"] ** -0.5)
    sizes = torch.bincount(tensors.integers(0, s["E"], s["M"]), minlength=s["E"])
    counts = sizes.tolist()

    def loop() -> Tensor:
        return torch.cat([rows @ w for rows, w in zip(x.split(counts), weight, strict=True)])

    flops = 2.0 * s["M"] * s["N"] * s["K"]
    call = ours("grouped_matmul", x, weight, sizes)
    return Calls(*call, {"loop": loop}, flops=flops, flops_backward=2 * flops)


def _quantized(format: str) -> None:
    @bench("quantized_matmul", format, shapes=("M1 N4096 K4096", "M64 N4096 K4096"), tiny=("M1 N64 K128",))
    def quantized_matmul(tensors: Tensors, s: Shape) -> Calls:
        from easytorch.kernels.quantized_matmul.weight import quantize

        x = tensors.randn(s["M"], s["K"])
        weight = quantize(tensors.randn(s["N"], s["K"], scale=s["K"] ** -0.5, dtype=torch.float32), format)
        torchs = {"dequantize, F.linear": lambda: F.linear(x, weight.dequantize(x.dtype))}
        return Calls(*ours("quantized_matmul", x, weight), torchs, moved=nbytes(weight.data, x))


for _format in ("int8", "int4", "nf4", "fp8"):
    _quantized(_format)
