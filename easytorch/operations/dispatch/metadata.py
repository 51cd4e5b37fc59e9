"""`OperationMetadata`: what is fixed for an operation before its tensors are known."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from easytorch.kernels.interop.arguments import check_number, check_scale
from easytorch.kernels.ring.layout import LAYOUTS

# The fields that every operation reads; those that read more name them (`OperationImpl.settings`).
OF_EVERY_OPERATION = ("runtime_dtype", "mesh", "backend", "mode")
MODES = ("__autoregressive__", "__prefill__", "__train__", "__insert__")


@dataclass(frozen=True, kw_only=True)
class OperationMetadata:
    """Settings of an operation that outlive one call.

    An operation refuses a field that it has no use for when it is created, unless it has its default: attention reads
    softmax scale, dtype and dropout, `ring` also the sequence's, and `metadata_fields()` of any says which.

    runtime_dtype: floating dtype the inputs are cast to, and that of the output; None keeps the inputs' own.
    runtime_softmax_dtype: dtype of attention's scores and softmax; None means float32, or float64 for float64 inputs.
        The definitions accept any; the kernels, and all of `ring`, accept only that default.
    softmax_scale: factor of the scores when the call gives none; None means head_dim ** -0.5.
    dropout_prob: probability of dropping an attention weight when the call gives none.
    mesh: a `torch.distributed.device_mesh.DeviceMesh`, process group or torch_xla `Mesh` for the sharded operations.
    sequence_axis: the axis of the mesh that shards the sequence; None means one named "sp", "cp", "sequence",
        "context" or "seq", else the only axis. A process group, or a mesh without names, has none to choose from.
    sequence_layout: "contiguous", or "zigzag" for equal work under a causal mask; kernels/ring/layout.py says what a
        rank holds.
    backend: forces an implementation ("flash"), a backend ("native", "aten", "xla", "triton", ...) or both
        ("flash:triton"). It is obeyed or refused with the reason, never replaced.
    mode: overrides what `OperationImpl.get_mode` reads off the query's shape.
    """

    runtime_dtype: torch.dtype | None = None
    runtime_softmax_dtype: torch.dtype | None = None
    softmax_scale: float | None = None
    dropout_prob: float = 0.0
    mesh: Any = None
    sequence_axis: str | None = None
    sequence_layout: str = "contiguous"
    backend: str | None = None
    mode: str | None = None

    def __post_init__(self) -> None:
        for name in ("runtime_dtype", "runtime_softmax_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} must be a floating torch.dtype or None, got {dtype!r}")
        scale = check_scale("OperationMetadata", "softmax_scale", self.softmax_scale)
        dropout_prob = check_number("OperationMetadata", "dropout_prob", self.dropout_prob)
        if dropout_prob is None or not 0.0 <= dropout_prob < 1.0:
            raise ValueError(f"dropout_prob must be in [0, 1), got {self.dropout_prob}")
        object.__setattr__(self, "softmax_scale", scale)  # frozen, and NumPy's numbers are none for a kernel
        object.__setattr__(self, "dropout_prob", dropout_prob)
        if not (self.backend is None or isinstance(self.backend, str)):
            raise TypeError(f"backend must be the name of an implementation or a backend, got {self.backend!r}")
        if self.sequence_layout not in LAYOUTS:
            raise ValueError(f"sequence_layout must be one of {', '.join(LAYOUTS)}, got {self.sequence_layout!r}")
        if self.mode is not None and self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)} or None, got {self.mode!r}")

    def given(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        values = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: value for field, value in values if value is not field.default and value != field.default}

    def softmax_refusal(self, dtype: torch.dtype) -> str | None:
        """Why a kernel with a float32 softmax (float64 for float64 inputs) refuses `runtime_softmax_dtype`, or None."""
        wanted = self.runtime_softmax_dtype
        own = torch.float64 if (self.runtime_dtype or dtype) == torch.float64 else torch.float32
        return None if wanted in (None, own) else f"its softmax is not computed in {wanted}"
