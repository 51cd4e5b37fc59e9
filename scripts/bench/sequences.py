"""Convolutions and recurrences along a sequence, against torch's convolution and the definitions' loops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.registry import Calls, Shape, Tensors, bench, nbytes
from easytorch.operations import OperationMetadata, OperationRegistry

PASSES = (False, True)


def _outputs(name: str, *args: Tensor, **kwargs: bool | str) -> Calls:
    """Ours and, as what torch has, the definition: token by token in eager torch."""
    operation, definition = OperationRegistry.create(name), OperationRegistry.create(name, _NATIVE)
    return Calls(
        lambda: operation(*args, **kwargs).outputs, operation.choose(*args, **kwargs),
        {"eager": lambda: definition(*args, **kwargs).outputs},
    )  # fmt: skip


_NATIVE = OperationMetadata(backend="native")


@bench("causal_conv1d", shapes=("B1 T2048 C2048",), tiny=("B1 T16 C64",), backward=PASSES)
def causal_conv1d(tensors: Tensors, s: Shape) -> Calls:
    x, weight = tensors.randn(s["B"], s["T"], s["C"]), tensors.randn(s["C"], 4)
    calls = _outputs("causal_conv1d", x, weight, activation="silu")

    def conv1d() -> Tensor:
        mixed = F.conv1d(x.transpose(1, 2), weight[:, None], padding=3, groups=s["C"])[..., : s["T"]]
        return F.silu(mixed).transpose(1, 2)

    calls.torch, calls.moved, calls.moved_backward = {"F.conv1d": conv1d}, 2 * nbytes(x), 3 * nbytes(x)
    return calls


@bench("ssm1", shapes=("B1 T256 C512 N16",), tiny=("B1 T1 C64 N16",), dtypes=("float32",), backward=PASSES)
def ssm1(tensors: Tensors, s: Shape) -> Calls:
    x, dt = (tensors.randn(s["B"], s["T"], s["C"]) for _ in range(2))
    decay = tensors.randn(s["C"], s["N"], grad=False).abs().neg()
    b, c = (tensors.randn(s["B"], s["T"], s["N"]) for _ in range(2))
    return _outputs("ssm1", x, dt, decay, b, c, dt_softplus=True)


@bench("ssm2", shapes=("B1 T256 H8 P64 N64",), tiny=("B1 T1 H2 P16 N16",), dtypes=("float32",), backward=PASSES)
def ssm2(tensors: Tensors, s: Shape) -> Calls:
    x, dt = tensors.randn(s["B"], s["T"], s["H"], s["P"]), tensors.randn(s["B"], s["T"], s["H"])
    decay = tensors.randn(s["H"], grad=False).abs().neg()
    b, c = (tensors.randn(s["B"], s["T"], 1, s["N"]) for _ in range(2))
    return _outputs("ssm2", x, dt, decay, b, c, dt_softplus=True)


@bench("gated_delta_rule", shapes=("B1 T256 H4 D64",), tiny=("B1 T1 H2 D32",), dtypes=("float32",), backward=PASSES)
def gated_delta_rule(tensors: Tensors, s: Shape) -> Calls:
    query, key, value = (tensors.randn(s["B"], s["T"], s["H"], s["D"]) for _ in range(3))
    g = tensors.randn(s["B"], s["T"], s["H"], grad=False).abs().neg()
    beta = torch.sigmoid(tensors.randn(s["B"], s["T"], s["H"], grad=False))
    return _outputs("gated_delta_rule", query, key, value, g, beta, use_qk_l2norm=True)
