"""Lowering jax functions for a compiler other than this jax's own, such as the libtpu that came with torch_xla."""

from __future__ import annotations

import jax
from jax.interpreters import mlir

# A kernel in Pallas is written in the dialect of today's compiler, which an older one refuses ("Unsupported version:
# expected <= 7 but got 8"). Lowered as for export, it is in the dialect that compilers of some months ago read too.
_FOR_EXPORT = mlir.LoweringParameters(for_export=True)


def lower_for_export(traced: jax.stages.Traced, platform: str | None = None) -> jax.stages.Lowered:
    """`traced` lowered for `platform` ("tpu", "cpu"; None: where its arguments are), readable by older compilers."""
    platforms = None if platform is None else (platform,)
    return traced.lower(lowering_platforms=platforms, _private_parameters=_FOR_EXPORT)
