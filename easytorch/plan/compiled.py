"""A train step of a model on the meta device, compiled for a mesh of devices that are not here."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from easytorch.backends.xla.aot import AbsentDevices, Facts, compile_for
from easytorch.frontend.step_layout import Layout
from easytorch.frontend.step_program import build, spec_of
from easytorch.frontend.train_step import leaf_names, loss_of

# TPUs whose slices have three dimensions, and two.
_CUBES, _PLANES = ("v4", "v5p"), ("v5e", "v6e")
_SHEETS = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
# The sizes that a v5p slice may have along each of its three dimensions, and the chips of a host.
_LARGEST = (16, 20, 28)
_HOST = 4
COMPILERS = ("auto", "libtpu", "cpu")


def compile_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    layout: Layout,
    batch: tuple[int, int],
    devices: Sequence[Any],
    *,
    recompute: bool,
    autocast: torch.dtype | None,
) -> Facts:
    """The facts of a step over (sequences, tokens of each) for the devices of a mesh."""
    spec = spec_of(model, optimizer, layout, loss=loss_of, max_norm=1.0, recompute=recompute, autocast=autocast)
    ids = torch.zeros(batch, dtype=torch.int64)
    leaves, structure = pytree.tree_flatten(((), {"input_ids": ids, "labels": ids, "use_cache": False}))
    backend = AbsentDevices(math.prod(layout.axes.values()))
    step = build(spec, backend, layout, leaves, structure, leaf_names(structure))
    return compile_for(step.finish(), devices, step.changed, quickly=True)


def compiler_devices(count: int, compiler: str = "auto", device: str = "v5p") -> tuple[str, list[Any]]:
    """(the compiler's name, at least `count` devices it compiles for): a slice of libtpu's of that kind of TPU, else
    CPUs.

    For a GPU, and for more chips than a slice of its kind has, it is a slice of v5p, which has the most memory of the
    TPUs: no compiler of GPUs runs without one.
    """
    if compiler not in COMPILERS:
        raise ValueError(f"unknown compiler {compiler!r}; known: {', '.join(COMPILERS)}")
    from easytorch.backends.xla import pjrt
    from easytorch.kernels.interop.tpu_compile import ENVIRONMENT

    libtpu = compiler == "libtpu" or (compiler == "auto" and importlib.util.find_spec("libtpu") is not None)
    kind = device if device in (*_CUBES, *_PLANES) and tpu_slice(count, device) else "v5p"
    if libtpu and (shape := tpu_slice(count, kind)) is not None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        return f"libtpu, {kind} {shape}", pjrt.tpu_devices(f"{kind}:{shape}")
    found = pjrt.devices("cpu")
    if len(found) < count:
        raise ValueError(
            f"a plan for {count} devices needs libtpu (pip install libtpu), or as many CPU devices of jax: set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"
        )
    return "jaxlib, CPU", found


def tpu_slice(count: int, kind: str = "v5p") -> str | None:
    """The shape of a slice of TPUs with at least `count` chips, "4x4x8" or, of v5e and v6e, "8x8"; None where there is
    none."""
    if kind in _PLANES:
        return next((shape for chips, shape in _SHEETS.items() if chips >= count), None)
    wanted = max(count, _HOST)
    found = []
    for x in range(2, _LARGEST[0] + 1, 2):
        for y in range(x, _LARGEST[1] + 1, 2):
            z = wanted // (x * y)
            if x * y * z == wanted and (z == 1 or (z >= y and z % 2 == 0)) and z <= _LARGEST[2]:
                found.append((max(x, y, z) - min(x, y, z), f"{x}x{y}x{z}"))
    return min(found)[1] if found else None
