"""The cross entropies, against torch's own on float32 logits, as transformers' losses take it."""

from __future__ import annotations

import torch.nn.functional as F

from bench.registry import Calls, Shape, Tensors, bench, nbytes, ours

PASSES = (False, True)


@bench("cross_entropy", shapes=("T1024 V32000", "T256 V128256"), tiny=("T1 V1000", "T63 V60"), backward=PASSES)
def cross_entropy(tensors: Tensors, s: Shape) -> Calls:
    logits, labels = tensors.randn(s["T"], s["V"]), tensors.integers(0, s["V"], s["T"])
    torchs = {"F.cross_entropy": lambda: F.cross_entropy(logits.float(), labels)}
    size = nbytes(logits)
    return Calls(*ours("cross_entropy", logits, labels), torchs, moved=size, moved_backward=2 * size)


bench("cross_entropy", shapes=("T8192 V32000", "T4096 V128256"), backward=PASSES, devices=("cuda",))(cross_entropy)


@bench(
    "fused_linear_cross_entropy", shapes=("T1024 D1024 V32000", "T512 D2048 V32000"),
    tiny=("T1 D64 V1000", "T63 D60 V60"), backward=PASSES,
)  # fmt: skip
def fused_linear_cross_entropy(tensors: Tensors, s: Shape) -> Calls:
    hidden, weight = tensors.randn(s["T"], s["D"]), tensors.randn(s["V"], s["D"], scale=s["D"] ** -0.5)
    labels = tensors.integers(0, s["V"], s["T"])
    torchs = {"F.linear, F.cross_entropy": lambda: F.cross_entropy(F.linear(hidden, weight).float(), labels)}
    flops = 2.0 * s["T"] * s["D"] * s["V"]
    call = ours("fused_linear_cross_entropy", hidden, weight, labels)
    return Calls(*call, torchs, flops=flops, flops_backward=2.0 * flops)


bench(
    "fused_linear_cross_entropy", shapes=("T8192 D4096 V128256",), dtypes=("bfloat16",), backward=PASSES,
    devices=("cuda",),
)(fused_linear_cross_entropy)  # fmt: skip
